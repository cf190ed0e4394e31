"""Keep the last and the best checkpoint of a run, each whole or absent."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl.files import write_atomically
from lightning_rl.runs import CHECKPOINTS


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write to a temporary file beside the target, flush it to the disk, and rename it.

    Lightning's own way goes through the system's temporary directory, which often is another file
    system, where a move is a copy that can be cut short.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; a kill at any moment leaves the file that was there before."""
        write_atomically(path, lambda file: torch.save(checkpoint, file))


class LastCheckpoint(Callback):
    """Save `last.ckpt` after every epoch, whatever the evaluation said.

    Not a `Checkpoint` of Lightning's, which would be moved behind `GracefulStop`.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / CHECKPOINTS / "last.ckpt"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, unless a signal cut the epoch short: then that moment has been saved."""
        if getattr(trainer, "stop_signal", None) is None:
            trainer.save_checkpoint(self.path)


def best_checkpoint(directory: Path) -> ModelCheckpoint:
    """Return Lightning's callback, set to keep the best evaluation's weights as `best.ckpt`."""
    return ModelCheckpoint(
        dirpath=directory / CHECKPOINTS,
        filename="best",
        monitor="eval/avg_reward",
        mode="max",
        auto_insert_metric_name=False,
        enable_version_counter=False,
        save_on_train_epoch_end=False,
    )
