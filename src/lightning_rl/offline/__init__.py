"""Learning from what others did: recording it, and handing it out as rollouts."""

from lightning_rl.offline.demonstrations import Demonstrations
from lightning_rl.offline.episodes import (
    Episode,
    Episodes,
    EpisodeWriter,
    read_episodes,
    write_minari,
)

__all__ = [
    "Demonstrations",
    "Episode",
    "EpisodeWriter",
    "Episodes",
    "read_episodes",
    "write_minari",
]
