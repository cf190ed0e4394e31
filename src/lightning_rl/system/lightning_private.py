"""The only file with internals of Lightning (tried with 2.6.6); a test checks `OF_LIGHTNING`."""

import re
import subprocess
from traceback import walk_tb
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import Strategy

OF_LIGHTNING = {
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": (
        "manual_optimization",
        "_broadcast_sigterm_tensor",
    ),
    "lightning.pytorch.loops.optimization.manual._ManualOptimization": ("optim_step_progress",),
    "lightning.pytorch.core.module.LightningModule": ("_trainer",),
    "lightning.pytorch.strategies.DDPStrategy": ("_start_method",),
    "lightning.pytorch.strategies.ModelParallelStrategy": ("_data_parallel_size",),
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": ("procs",),
    "lightning.pytorch.loggers.TensorBoardLogger": ("_experiment", "_kwargs"),
    "lightning.pytorch.loggers.WandbLogger": ("_wandb_init",),
    "lightning.pytorch.callbacks.ModelCheckpoint": ("_train_time_interval",),
    "lightning.pytorch.cli.LightningCLI": ("_parse_ckpt_path",),
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector": (
        *("resume_start", "restore_model", "restore_datamodule", "restore_callbacks"),
        "restore_training_state",
    ),
}
"""Attributes of instances, by class."""


class Counter(Protocol):
    """Lightning's count of started and of completed steps."""

    def increment_ready(self) -> None: ...

    def increment_completed(self) -> None: ...


def counter_of_steps(trainer: Trainer) -> Counter:
    """Return the counter that `trainer.global_step` reads in manual optimization."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


def skip_signal_exchange(trainer: Trainer) -> None:
    """Skip the exchange about signals before each batch, which takes 2 ms with gloo."""
    # The graceful stop asks all ranks itself.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]  # there is no hook


def was_restoring(error: BaseException) -> bool:
    """Return whether Lightning was restoring a checkpoint when an error was raised."""
    # No hook surrounds the restoring of callbacks, loops and optimizers.
    names = (frame.f_code.co_qualname for frame, _ in walk_tb(error.__traceback__))
    return any(re.match(r"_CheckpointConnector\._?(restore|resume_start)", name) for name in names)


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the trainer of a module, or None; `module.trainer` raises without one."""
    return module._trainer


def start_method_of(strategy: Strategy) -> str:
    """Return how a strategy starts processes: `popen`, or fork or spawn, as in notebooks."""
    return str(getattr(strategy, "_start_method", "popen"))


def processes_launched_by(strategy: Strategy) -> list[subprocess.Popen[bytes]]:
    """Return the processes of the other ranks that this process has started."""
    processes: list[subprocess.Popen[bytes]] = getattr(strategy.launcher, "procs", [])
    return processes


def has_writer(logger: TensorBoardLogger) -> bool:
    """Return whether an event file is open; `logger.experiment` would open one."""
    return logger._experiment is not None


def forget_writer(logger: TensorBoardLogger) -> None:
    """Begin another event file at the next write; the current one must be closed."""
    logger._experiment = None


def purge_from(logger: TensorBoardLogger, step: int) -> None:
    """Make TensorBoard discard entries from a step on, once the next event file opens."""
    logger._kwargs["purge_step"] = step


def omit_anonymous(logger: Logger) -> None:
    """Do not pass `anonymous=None` to `wandb.init`, which warns of it (0.31)."""
    if isinstance(logger, WandbLogger) and logger._wandb_init.get("anonymous") is None:
        logger._wandb_init.pop("anonymous", None)


def saves_by_time(callback: Callback) -> bool:
    """Return whether a callback saves at intervals of time: never, in manual optimization."""
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None


class CommandLineAlone:
    """Mixin for a `LightningCLI`: a checkpoint's hyperparameters must not replace options."""

    def _parse_ckpt_path(self) -> None: ...


def _nothing(*args: Any) -> None: ...
