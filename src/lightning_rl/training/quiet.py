"""Silence messages of Lightning that are not about the run."""

import logging
import warnings

NOISE = (
    "GPU available",
    "TPU available",
    "HPU available",
    "Tip:",
    "LOCAL_RANK",
    "You are using the plain ModelCheckpoint",
    "Restoring states from the checkpoint",
    "Restored all states from the checkpoint",
    "Loaded model weights from the checkpoint",
    "`Trainer.fit` stopped",
    "Seed set to",
    "distributed_backend=",
    "All distributed processes registered",
    "Initializing distributed",
    "Your model can run with static graph optimizations",
    "SLURM auto-requeueing enabled",  # nothing is requeued: `GracefulStop` has the signal
)
"""Beginnings or parts of Lightning's messages that are not about the run."""


def quieten_framework() -> None:
    """Silence Lightning's device lines, tips and advertisements, for the whole process."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            # Once per process: every trainer calls this function.
            if _is_news not in handler.filters:
                handler.addFilter(_is_news)
    for message in (
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*your dataloader is not resumable.*",
        ".*Your `IterableDataset` has `__len__` defined.*",
        ".*The dirpath has changed from.*",
        ".*logging on epoch level in distributed setting.*",  # logged values are already equal
        ".*isinstance.treespec, LeafSpec.*",
        ".*in eval mode at the start of training.*",  # a policy always is
        "Using ModelCheckpoint with manual optimization",  # the weights after the update are meant
    ):
        warnings.filterwarnings("ignore", message)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(noise in message for noise in NOISE)
