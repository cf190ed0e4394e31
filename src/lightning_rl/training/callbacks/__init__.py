"""Callbacks: budget, checkpoints, signals, metrics, videos, progress and reports."""

from lightning_rl.training.callbacks.budget import EnvStepBudget
from lightning_rl.training.callbacks.checkpoints import (
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    PeriodicCheckpoint,
    WarmStart,
)
from lightning_rl.training.callbacks.graceful_stop import GracefulStop
from lightning_rl.training.callbacks.loggers import EnvStepCSV, EnvStepTensorBoard
from lightning_rl.training.callbacks.manifest import RunManifest
from lightning_rl.training.callbacks.memory import MemoryEstimate
from lightning_rl.training.callbacks.metrics import MetricsWriter
from lightning_rl.training.callbacks.peers import Peers
from lightning_rl.training.callbacks.progress import EnvStepProgress
from lightning_rl.training.callbacks.report import EvaluationReport
from lightning_rl.training.callbacks.settings import SettingsWriter
from lightning_rl.training.callbacks.video import VideoRecorder, VideoSettings
from lightning_rl.training.callbacks.window import EpisodeLines, Window

__all__ = [
    "AtomicCheckpointIO",
    "BestCheckpoint",
    "EnvStepBudget",
    "EnvStepCSV",
    "EnvStepProgress",
    "EnvStepTensorBoard",
    "EpisodeLines",
    "EvaluationReport",
    "GracefulStop",
    "LastCheckpoint",
    "MemoryEstimate",
    "MetricsWriter",
    "Peers",
    "PeriodicCheckpoint",
    "RunManifest",
    "SettingsWriter",
    "VideoRecorder",
    "VideoSettings",
    "WarmStart",
    "Window",
]
