"""Say how each episode of an evaluation ended, and show them in a window, one after the other."""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rl.system.errors import require
from lightning_rl.training.callbacks.typed import algorithm_of, data_of


class EpisodeLines(Callback):
    """Print a line for each episode of an evaluation, and the average of their returns.

    `RLTrainer.play` puts it, or a `Window`, in the place of the report.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print them."""
        evaluation = algorithm_of(pl_module).evaluation
        ended = zip(*(evaluation[key] for key in ("seeds", "returns", "lengths")), strict=True)
        for i, (seed, value, length) in enumerate(ended):
            _say(i, len(evaluation["seeds"]), seed, value, f"{length} env steps")
        _sum_up(evaluation["avg_reward"])


class Window(Callback):
    """Have the env of the evaluation open a window, and print a line when an episode ends."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open it, before Lightning asks which episodes are played together.

        Raises:
            ConfigurationError: where the env has none, and with several processes.
        """
        require(
            trainer.world_size == 1,
            f"A policy is watched in one process, and these are {trainer.world_size}: add "
            "--trainer.devices 1 --trainer.strategy auto.",
        )
        data_of(trainer).show_evaluation()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: list[int],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look on at one episode."""
        data = data_of(trainer)
        taken = "env steps" if data.eval_env.steps_per_action == 1 else "chunks"

        def watch(step: int, returns: Tensor, running: Tensor) -> None:
            if not running.any():
                count, value = data.num_eval_episodes, float(returns[0])
                _say(batch_idx, count, batch[0], value, f"{step} {taken}")

        algorithm_of(pl_module).watch = watch

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look away, and sum up."""
        algorithm = algorithm_of(pl_module)
        algorithm.watch = None
        _sum_up(algorithm.evaluation["avg_reward"])


def _say(index: int, count: int, seed: int, value: float, length: str) -> None:
    said = f"Episode {index + 1} of {count} (seed {seed}): return {value:.2f} after {length}"
    print(said, flush=True)


def _sum_up(average: float) -> None:
    print(f"Average return: {average:.2f}", flush=True)
