"""Callbacks: budget, checkpoints, signals, metrics, progress and reports."""

from lightning_rl.callbacks.budget import EnvStepBudget
from lightning_rl.callbacks.checkpoints import (
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    PeriodicCheckpoint,
    WarmStart,
)
from lightning_rl.callbacks.graceful_stop import GracefulStop
from lightning_rl.callbacks.metrics import EnvStepTensorBoard, MetricsWriter
from lightning_rl.callbacks.progress import EnvStepProgress
from lightning_rl.callbacks.report import EvaluationReport

__all__ = [
    "AtomicCheckpointIO",
    "BestCheckpoint",
    "EnvStepBudget",
    "EnvStepProgress",
    "EnvStepTensorBoard",
    "EvaluationReport",
    "GracefulStop",
    "LastCheckpoint",
    "MetricsWriter",
    "PeriodicCheckpoint",
    "WarmStart",
]
