"""Buffers: where rollouts wait for the learner."""

from lightning_rl.buffers.base import (
    Buffer,
    BufferClosed,
    GivenRewards,
    ReadInterrupted,
    Replay,
    ReplayFactory,
    RolloutBuffer,
    WriterError,
)
from lightning_rl.buffers.circular_buffer import CircularBuffer
from lightning_rl.buffers.replay_buffer import ReplayBuffer
from lightning_rl.buffers.segments import Segment, Window, allocate_segments, saved_rollout

__all__ = [
    "Buffer",
    "BufferClosed",
    "CircularBuffer",
    "GivenRewards",
    "ReadInterrupted",
    "Replay",
    "ReplayBuffer",
    "ReplayFactory",
    "RolloutBuffer",
    "Segment",
    "Window",
    "WriterError",
    "allocate_segments",
    "saved_rollout",
]
