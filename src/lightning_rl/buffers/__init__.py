"""Buffers: where rollouts wait for the learner."""

from lightning_rl.buffers.base import Buffer
from lightning_rl.buffers.rollout_buffer import RolloutBuffer

__all__ = ["Buffer", "RolloutBuffer"]
