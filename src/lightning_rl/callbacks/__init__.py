"""Callbacks: budget, checkpoints, signals, metrics, progress and reports."""

from lightning_rl.callbacks.budget import EnvStepBudget
from lightning_rl.callbacks.checkpoints import AtomicCheckpointIO, LastCheckpoint, best_checkpoint
from lightning_rl.callbacks.graceful_stop import GracefulStop
from lightning_rl.callbacks.metrics import EnvStepTensorBoard, MetricsWriter
from lightning_rl.callbacks.peers import Peers
from lightning_rl.callbacks.progress import EnvStepProgress
from lightning_rl.callbacks.report import EvaluationReport

__all__ = [
    "AtomicCheckpointIO",
    "EnvStepBudget",
    "EnvStepProgress",
    "EnvStepTensorBoard",
    "EvaluationReport",
    "GracefulStop",
    "LastCheckpoint",
    "MetricsWriter",
    "Peers",
    "best_checkpoint",
]
