"""Learning from what others did: recording it, and handing it out as rollouts."""

from lightning_rl.offline.demonstrations import Demonstrations
from lightning_rl.offline.episodes import (
    Episode,
    Episodes,
    EpisodeWriter,
    read_episodes,
    write_minari,
)
from lightning_rl.offline.mixed_replay import MixedReplay
from lightning_rl.offline.record import Recorded, Recorder

__all__ = [
    "Demonstrations",
    "Episode",
    "EpisodeWriter",
    "Episodes",
    "MixedReplay",
    "Recorded",
    "Recorder",
    "read_episodes",
    "write_minari",
]
