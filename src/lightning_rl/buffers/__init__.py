"""Buffers: where rollouts wait for the learner."""

from lightning_rl.buffers.base import BufferClosed as BufferClosed
from lightning_rl.buffers.base import ReadInterrupted as ReadInterrupted
from lightning_rl.buffers.base import Replay as Replay
from lightning_rl.buffers.base import ReplayFactory as ReplayFactory
from lightning_rl.buffers.base import WriterError as WriterError
from lightning_rl.buffers.circular_buffer import CircularBuffer as CircularBuffer
from lightning_rl.buffers.replay_buffer import ReplayBuffer as ReplayBuffer
from lightning_rl.buffers.segments import Segment as Segment
from lightning_rl.buffers.segments import Window as Window
from lightning_rl.buffers.segments import allocate_segments as allocate_segments
from lightning_rl.buffers.segments import saved_rollout as saved_rollout
from lightning_rl.system.lazy import names_of

__getattr__ = names_of("lightning_rl")  # classes of extensions lay here in earlier versions
