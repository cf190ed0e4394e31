"""Learning from what others did: recording it, and handing it out as rollouts."""

from lightning_rl.offline.demonstrations import Demonstrations
from lightning_rl.offline.episodes import (
    Episode,
    Episodes,
    EpisodeWriter,
    read_episodes,
    write_minari,
)
from lightning_rl.offline.frames import LabelledFrames
from lightning_rl.offline.label import LabelSettings, label_dataset
from lightning_rl.offline.mixed_replay import MixedReplay
from lightning_rl.offline.record import Recorded, Recorder
from lightning_rl.offline.replays import read_replay, write_replay

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
