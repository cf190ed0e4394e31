"""Learning from what others did: recording it, and handing it out as rollouts."""

from lightning_rl.offline.demonstrations import Demonstrations

__all__ = ["Demonstrations"]
