"""Parts of algorithms: objectives, checks, replays, processes."""

from lightning_rl.algorithms.action_parts import weigh_parts as weigh_parts
from lightning_rl.algorithms.checks import check_batch_size as check_batch_size
from lightning_rl.algorithms.on_policy import epochs as epochs
from lightning_rl.algorithms.on_policy import make_sampler as make_sampler
from lightning_rl.algorithms.rollout_evaluation import states_of as states_of
from lightning_rl.algorithms.rollout_evaluation import write_values as write_values
from lightning_rl.algorithms.sequence_sampler import steps_of as steps_of
from lightning_rl.buffers.base import BufferClosed as BufferClosed
from lightning_rl.buffers.base import OfflineRewards as OfflineRewards
from lightning_rl.buffers.base import ReadInterrupted as ReadInterrupted
from lightning_rl.buffers.base import ReplayFactory as ReplayFactory
from lightning_rl.buffers.base import WriterError as WriterError
from lightning_rl.buffers.columns import available_bytes as available_bytes
from lightning_rl.optim.update import Objective as Objective
from lightning_rl.optim.update import Update as Update
from lightning_rl.optim.update import micro_batches as micro_batches
from lightning_rl.system.sharded import load_whole as load_whole
from lightning_rl.system.sharded import shard_like as shard_like
from lightning_rl.system.sharded import whole as whole

__all__: list[str]
