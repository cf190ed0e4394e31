"""Parts of algorithms: objectives, checks, replays, processes."""

from lightning_rl.algorithms.action_parts import weigh_parts as weigh_parts
from lightning_rl.buffers.base import ReadInterrupted as ReadInterrupted
from lightning_rl.buffers.base import ReplayFactory as ReplayFactory
from lightning_rl.buffers.base import WriterError as WriterError
from lightning_rl.buffers.columns import available_bytes as available_bytes
from lightning_rl.optim.update import Objective as Objective
from lightning_rl.optim.update import Update as Update
from lightning_rl.system.sharded import shard_like as shard_like

__all__: list[str]
