"""Learning from what others did: recording it, and handing it out as rollouts."""

from lightning_rl.datasets.demonstrations import Demonstrations
from lightning_rl.datasets.episode import Episode, Episodes
from lightning_rl.datasets.frames import LabelledFrames
from lightning_rl.datasets.label import LabelSettings, label_dataset
from lightning_rl.datasets.minari import write_minari
from lightning_rl.datasets.mixed_replay import MixedReplay
from lightning_rl.datasets.reader import read_episodes
from lightning_rl.datasets.record import Recorded, Recorder
from lightning_rl.datasets.replays import read_replay, write_replay
from lightning_rl.datasets.writer import EpisodeWriter

__all__ = [
    "Demonstrations",
    "Episode",
    "EpisodeWriter",
    "Episodes",
    "LabelSettings",
    "LabelledFrames",
    "MixedReplay",
    "Recorded",
    "Recorder",
    "label_dataset",
    "read_episodes",
    "read_replay",
    "write_minari",
    "write_replay",
]
