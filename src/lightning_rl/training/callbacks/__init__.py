"""Callbacks: budget, checkpoints, signals, metrics, progress and reports."""

from lightning_rl.training.callbacks.budget import EnvStepBudget as EnvStepBudget
from lightning_rl.training.callbacks.checkpoints import AtomicCheckpointIO as AtomicCheckpointIO
from lightning_rl.training.callbacks.checkpoints import BestCheckpoint as BestCheckpoint
from lightning_rl.training.callbacks.checkpoints import LastCheckpoint as LastCheckpoint
from lightning_rl.training.callbacks.checkpoints import PeriodicCheckpoint as PeriodicCheckpoint
from lightning_rl.training.callbacks.checkpoints import WarmStart as WarmStart
from lightning_rl.training.callbacks.graceful_stop import GracefulStop as GracefulStop
from lightning_rl.training.callbacks.loggers import EnvStepCSV as EnvStepCSV
from lightning_rl.training.callbacks.loggers import EnvStepTensorBoard as EnvStepTensorBoard
from lightning_rl.training.callbacks.manifest import RunManifest as RunManifest
from lightning_rl.training.callbacks.memory import MemoryEstimate as MemoryEstimate
from lightning_rl.training.callbacks.metrics import MetricsWriter as MetricsWriter
from lightning_rl.training.callbacks.peers import Peers as Peers
from lightning_rl.training.callbacks.progress import EnvStepProgress as EnvStepProgress
from lightning_rl.training.callbacks.report import EvaluationReport as EvaluationReport
from lightning_rl.training.callbacks.settings import SettingsWriter as SettingsWriter
from lightning_rl.training.callbacks.window import EpisodeLines as EpisodeLines
from lightning_rl.training.callbacks.window import Window as Window
from lightning_rl.training.videos import VideoSettings as VideoSettings
