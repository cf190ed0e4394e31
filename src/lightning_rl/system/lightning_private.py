"""All that is used of Lightning beyond its documented interface; nothing else touches such names.

Tried with lightning 2.6.6. `OF_LIGHTNING` says what that is, and a test fails by the name of what
another version lacks.
"""

import subprocess
from typing import Any, Protocol

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy

OF_LIGHTNING = {
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": (
        "manual_optimization",
        "_broadcast_sigterm_tensor",
    ),
    "lightning.pytorch.loops.optimization.manual._ManualOptimization": ("optim_step_progress",),
    "lightning.pytorch.core.module.LightningModule": ("_trainer",),
    "lightning.pytorch.strategies.DDPStrategy": ("_start_method",),
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": ("procs",),
    "lightning.pytorch.loggers.TensorBoardLogger": ("_experiment", "_kwargs"),
    "lightning.pytorch.cli.LightningCLI": ("_parse_ckpt_path",),
}
"""By class, the attributes that its instances have."""


class Counter(Protocol):
    """A count of Lightning's: of what has begun, and of what is done."""

    def increment_ready(self) -> None: ...

    def increment_completed(self) -> None: ...


def counter_of_steps(trainer: Trainer) -> Counter:
    """Return what `trainer.global_step` reads in manual optimization.

    It is not documented; Lightning has kept it since 2022.
    """
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


def skip_signal_exchange(trainer: Trainer) -> None:
    """Have the ranks not ask rank 0 before each batch, by gloo in 2 ms, for a signal.

    Whoever calls this gets the signals, and Lightning none: the answer would always be no.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]  # there is no hook


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the trainer of a module; None where it has none, for which `module.trainer` raises."""
    return module._trainer


def start_method_of(strategy: Strategy) -> str:
    """Return how a strategy starts its processes: `popen`, or by fork or spawn, as notebooks do."""
    return str(getattr(strategy, "_start_method", "popen"))


def processes_launched_by(strategy: Strategy) -> list[subprocess.Popen[bytes]]:
    """Return the processes of the other ranks that this one has started; none on most."""
    processes: list[subprocess.Popen[bytes]] = getattr(strategy.launcher, "procs", [])
    return processes


def has_writer(logger: TensorBoardLogger) -> bool:
    """Tell whether an event file is open. To ask for `logger.experiment` would open one."""
    return logger._experiment is not None


def forget_writer(logger: TensorBoardLogger) -> None:
    """Have the next thing written begin another event file; the one so far must be closed."""
    logger._experiment = None


def purge_from(logger: TensorBoardLogger, step: int) -> None:
    """Have TensorBoard forget, once the next event file is opened, what is of a step or later."""
    logger._kwargs["purge_step"] = step


class CommandLineAlone:
    """For a `LightningCLI`: let a checkpoint have no say in the settings.

    Lightning takes hyperparameters out of it, silently, over what was typed.
    """

    def _parse_ckpt_path(self) -> None:
        """Do nothing."""


def _nothing(*args: Any) -> None:
    """Stand for what is not needed."""
