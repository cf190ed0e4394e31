"""Read checkpoints and trained policies."""

from lightning_rl.checkpoints.building import run_settings as run_settings
from lightning_rl.checkpoints.format import STATE_KEY as STATE_KEY
from lightning_rl.checkpoints.format import own_version as own_version
from lightning_rl.checkpoints.format import read_checkpoint as read_checkpoint
from lightning_rl.checkpoints.format import through_checkpoint as through_checkpoint
from lightning_rl.checkpoints.registry import present_settings as present_settings
from lightning_rl.deploy.acting import TrainedPolicy as TrainedPolicy
from lightning_rl.deploy.loading import load_trained as load_trained
from lightning_rl.system.saved_runs import CHECKPOINTS as CHECKPOINTS
from lightning_rl.system.saved_runs import find_checkpoint as find_checkpoint

__all__: list[str]
