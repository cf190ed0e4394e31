"""Print the result of `validate` or `test` as a table, and write it to a file."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lightning_rl.system.files import shown, write_atomically
from lightning_rl.training.callbacks.settings import evaluation_protocol
from lightning_rl.training.callbacks.typed import algorithm_of


class EvaluationReport(Callback):
    """Write `evaluation.json` after `validate` or `test.json` after `test`, and print a table.

    Args:
        directory: folder of the file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate" and trainer.is_global_zero:
            self._report(trainer, pl_module, "evaluation.json")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._report(trainer, pl_module, "test.json")

    def _report(self, trainer: Trainer, pl_module: LightningModule, name: str) -> None:
        evaluation = algorithm_of(pl_module).evaluation
        table = Table(title="Evaluation", show_header=False)
        for label, text in _rows(evaluation).items():
            table.add_row(label, text)
        console = Console(highlight=False)
        # Before the file: if that cannot be written, nothing has been played in vain.
        console.print(table)
        path = self.directory / name
        protocol = {"protocol": evaluation_protocol(trainer, pl_module)}
        content = json.dumps(evaluation | protocol, indent=2).encode()
        write_atomically(path, lambda file: file.write(content))
        console.print(f"Written to {shown(path)}", soft_wrap=True)


def _rows(evaluation: dict[str, Any]) -> dict[str, str]:
    low, high = evaluation["ci95"]
    success, by_chance = evaluation["success_rate"], evaluation["success_ci95"]
    by_task, by_time = evaluation["terminations"], evaluation["truncations"]
    acting = "deterministic" if evaluation["deterministic"] else "stochastic"
    return {
        "episodes": f"{evaluation['episodes']} ({acting}, one per seed)",
        "average return": f"{evaluation['avg_reward']:.2f} ± {evaluation['std_reward']:.2f} (std)",
        "95 % interval of the average": f"[{low:.2f}, {high:.2f}]",
        "average length": f"{evaluation['avg_length']:.1f} env steps",
        "success rate": "reported by no episode"
        if success is None
        else f"{success:.1%} (95 % interval [{by_chance[0]:.1%}, {by_chance[1]:.1%}])",
        "ended by the task / by time": f"{by_task} / {by_time}"
        + (f" ({evaluation['cut']} cut, data.max_eval_episode_steps)" if evaluation["cut"] else ""),
        **{f"metrics/{name}": f"{value:.4g}" for name, value in evaluation["metrics"].items()},
        "trained for": f"{evaluation['env_steps']:,} env steps",
    }
