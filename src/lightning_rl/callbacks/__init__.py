"""Callbacks: budget, checkpoints, signals, metrics, videos, progress and reports."""

from lightning_rl.callbacks.budget import EnvStepBudget
from lightning_rl.callbacks.checkpoints import (
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    PeriodicCheckpoint,
    WarmStart,
)
from lightning_rl.callbacks.graceful_stop import GracefulStop
from lightning_rl.callbacks.loggers import EnvStepCSV, EnvStepTensorBoard
from lightning_rl.callbacks.manifest import RunManifest
from lightning_rl.callbacks.memory import MemoryEstimate
from lightning_rl.callbacks.metrics import MetricsWriter
from lightning_rl.callbacks.peers import Peers
from lightning_rl.callbacks.progress import EnvStepProgress
from lightning_rl.callbacks.report import EvaluationReport
from lightning_rl.callbacks.settings import SettingsWriter
from lightning_rl.callbacks.video import VideoRecorder, VideoSettings
from lightning_rl.callbacks.window import EpisodeLines, Window

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
