"""Show a run: what begins, its progress in one line, and why it ended."""

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, Timer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lightning_rl.system.files import shown
from lightning_rl.system.output import losable
from lightning_rl.training.callbacks.metrics import MetricsWriter
from lightning_rl.training.callbacks.typed import algorithm_of, data_of

BAR_WIDTH = 8
"""Columns of the bar; the text needs the others."""

SILENCE_S = 30.0
"""Most seconds between two lines of a run without a terminal."""


class _LosableConsole(Console):
    def on_broken_pipe(self) -> None:
        raise  # while rich handles it; rich would exit the process


class EnvStepProgress(ProgressBar):
    """A progress bar over env steps on a terminal, and a permanent line after each evaluation.

    Without a terminal, or if the environment variable CI is set, lines alone appear, at least every
    30 s; in a notebook one display shows them all. NO_COLOR disables colours.

    Args:
        metrics: source of the latest metrics.
        interval: minimum seconds between two redraws of the bar.
    """

    def __init__(self, metrics: MetricsWriter, interval: float = 0.2) -> None:
        super().__init__()
        self.metrics = metrics
        self.interval = interval
        self.enabled = True
        self.console = _LosableConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._notebook: _NotebookDisplay | None = None
        self._drawn = 0.0
        self._began = 0.0
        self._first_step = 0
        self._evaluation: dict[str, Any] = {}

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self._first_step = time.perf_counter(), algorithm_of(pl_module).env_steps
        self._drawn = self._began
        if self.console.is_jupyter and self.enabled:
            self._notebook = _NotebookDisplay()
        for line in what_begins(trainer, algorithm_of(pl_module)):
            self.print(line)
        if not self.enabled or not self.console.is_terminal or os.environ.get("CI"):
            return
        columns = (TextColumn("{task.description}"), BarColumn(BAR_WIDTH))
        self._bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self._bar.add_task("", total=data_of(trainer).total_env_steps)
        with losable(self.console.file):
            self._bar.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        now = time.perf_counter()
        is_live = self._bar is not None or self._notebook is not None
        # Not at each iteration: a redraw may take longer than one.
        if not self.enabled or now - self._drawn < (self.interval if is_live else SILENCE_S):
            return
        self._drawn = now
        if self._bar is not None:
            line = self._line(trainer, pl_module, self.console.width - BAR_WIDTH - 1)
            done = algorithm_of(pl_module).env_steps
            self._bar.update(self._bar.task_ids[0], completed=done, description=line)
        elif self._notebook is not None:
            self._notebook.show(self._line(trainer, pl_module))
        else:
            self.print(self._line(trainer, pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self._evaluation = algorithm_of(pl_module).evaluation
        self._drawn = time.perf_counter()
        width = self.console.width if self.console.is_terminal else 1000
        self.print(self._line(trainer, pl_module, width))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        text = sep.join(str(arg) for arg in args)
        if self._notebook is not None:
            self._notebook.add(text)
        elif self.enabled:
            with losable(self.console.file):
                self.console.print(text)

    def _close(self) -> None:
        if self._bar is not None:
            with losable(self.console.file):
                self._bar.stop()
            self._bar = None

    def _line(self, trainer: Trainer, pl_module: LightningModule, width: int = 1000) -> str:
        """Return the state of the run; in a narrow terminal without its less important parts."""
        done, total = algorithm_of(pl_module).env_steps, data_of(trainer).total_env_steps
        latest = self.metrics.latest
        parts = {"steps": f"{done:>10,}/{total:,} env steps {min(1.0, done / total):4.0%}"}
        if "charts/SPS" in latest:
            parts["speed"] = f"{latest['charts/SPS']:7,.0f} steps/s"
        if "charts/episode_reward_avg_100" in latest:
            parts["return"] = f"return {return_text(latest['charts/episode_reward_avg_100']):>8}"
        if self._evaluation:
            parts["eval"] = f"eval {return_text(self._evaluation['avg_reward']):>8}"
            if (success := self._evaluation["success_rate"]) is not None:
                parts["success"] = f"success {success:4.0%}"
        parts["ETA"] = self._time_left(trainer, pl_module)
        # In a narrow terminal, first without alignment, then without some parts.
        if len("  ".join(parts.values())) > width:
            parts = {name: " ".join(part.split()) for name, part in parts.items()}
        for name in ("speed", "return", "steps", "success"):
            if len("  ".join(parts.values())) > width:
                parts.pop(name, None)
        return "  ".join(parts.values())

    def _time_left(self, trainer: Trainer, pl_module: LightningModule) -> str:
        # By the speed of this process: a resumed run begins at `_first_step`.
        done = algorithm_of(pl_module).env_steps - self._first_step
        remaining = max(0, data_of(trainer).total_env_steps - algorithm_of(pl_module).env_steps)
        seconds = round(remaining * (time.perf_counter() - self._began) / max(1, done))
        return f"ETA {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def return_text(value: float) -> str:
    """Format a return with two decimals, or with three significant digits if it is small."""
    digits = 2 if value == 0 or not math.isfinite(value) else 2 - math.floor(math.log10(abs(value)))
    return f"{value:.2e}" if digits > 6 else f"{value:.{max(2, digits)}f}"


def what_begins(trainer: Trainer, algorithm: Any) -> list[str]:
    """Return two lines: algorithm, policy, env, budget and device; and the run directory."""
    data = data_of(trainer)
    ranks = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
    names = [type(algorithm).__name__, type(algorithm.policy).__name__, data.env_name]
    run_dir = shown(Path(trainer.default_root_dir))
    return [
        f"{names[0]} trains {names[1]} in {names[2]}: {data.num_envs} envs, "
        f"{data.total_env_steps:,} env steps, on {trainer.strategy.root_device}{ranks}",
        f"Run directory: {run_dir}",
    ]


def why_early(trainer: Trainer) -> tuple[str, str] | None:
    """Return why a run ended before its budget, and the options that must be raised to train on.

    None if it did not end early.
    """
    done, total = algorithm_of(trainer.lightning_module).env_steps, data_of(trainer).total_env_steps
    if done >= total:
        return None
    reasons = [
        f"EarlyStopping of {callback.monitor}: {callback.stopping_reason_message}".rstrip(".")
        for callback in trainer.early_stopping_callbacks
        if callback.stopping_reason_message
    ]
    limits = {}
    # Lightning uses -1 for no limit.
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch:
        limits["max_epochs"] = f"is {trainer.max_epochs}"
    if 0 <= trainer.max_steps <= trainer.global_step:
        limits["max_steps"] = f"is {trainer.max_steps}"
    timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]  # Lightning declares none
    if any((seconds := timer.time_remaining()) is not None and seconds <= 0 for timer in timers):
        limits["max_time"] = "is over, which counts all parts of a run"
    reasons += [f"trainer.{name} {state}" for name, state in limits.items()]
    reason = " and ".join(reasons) or "a callback set trainer.should_stop"
    options = "".join(f" --trainer.{name} ..." for name in limits)
    return f"Ended at {done:,} of {total:,} env steps: {reason}.", options


class _NotebookDisplay:
    """One output of a notebook's cell, whose last line changes."""

    def __init__(self) -> None:
        from IPython.display import display  # a notebook has it

        self._lines: list[str] = []
        # One display with a changing content: prints would fill the cell.
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def add(self, line: str) -> None:
        self._lines.append(line)
        self.show()

    def show(self, *last: str) -> None:
        self._handle.update({"text/plain": "\n".join([*self._lines, *last])}, raw=True)
