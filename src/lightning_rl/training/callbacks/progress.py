"""Show the progress of a run in one line: env steps, time left, speed and returns."""

import os
import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_rl.system.output import losable
from lightning_rl.training.callbacks.metrics import MetricsWriter
from lightning_rl.training.callbacks.typed import algorithm_of, data_of


class _LosableConsole(Console):
    def on_broken_pipe(self) -> None:
        raise  # while rich handles it; rich would exit the process


class EnvStepProgress(ProgressBar):
    """A progress bar over env steps on a terminal, and a permanent line after each evaluation.

    Without a terminal, or if the environment variable CI is set, only the lines appear. NO_COLOR
    disables colours.

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
        if not self.enabled or not self.console.is_terminal or os.environ.get("CI"):
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self._bar.add_task("", total=data_of(trainer).total_env_steps)
        self._bar.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        now = time.perf_counter()
        if self._bar is not None and now - self._drawn >= self.interval:
            self._drawn = now
            task = self._bar.task_ids[0]
            self._bar.update(
                task,
                completed=algorithm_of(pl_module).env_steps,
                description=self._line(trainer, pl_module),
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self._evaluation = algorithm_of(pl_module).evaluation
        self.print(self._line(trainer, pl_module) + self._time_left(trainer, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        if self.enabled:
            with losable(self.console.file):
                self.console.print(sep.join(str(arg) for arg in args))

    def _close(self) -> None:
        if self._bar is not None:
            with losable(self.console.file):
                self._bar.stop()
            self._bar = None

    def _line(self, trainer: Trainer, pl_module: LightningModule) -> str:
        done, total = algorithm_of(pl_module).env_steps, data_of(trainer).total_env_steps
        latest = self.metrics.latest
        parts = [f"{done:>10,}/{total:,} env steps {min(1.0, done / total):4.0%}"]
        if "charts/SPS" in latest:
            parts.append(f"{latest['charts/SPS']:7,.0f} steps/s")
        if "charts/episode_reward_avg_100" in latest:
            parts.append(f"return {latest['charts/episode_reward_avg_100']:8.2f}")
        if self._evaluation:
            parts.append(f"eval {self._evaluation['avg_reward']:8.2f}")
            success = self._evaluation["success_rate"]
            parts += [] if success is None else [f"success {success:4.0%}"]
        return "  ".join(parts)

    def _time_left(self, trainer: Trainer, pl_module: LightningModule) -> str:
        done = algorithm_of(pl_module).env_steps - self._first_step
        left = max(0, data_of(trainer).total_env_steps - algorithm_of(pl_module).env_steps)
        seconds = round(left * (time.perf_counter() - self._began) / max(1, done))
        return f"  ETA {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
