"""Add up, gather and agree over the processes of a run; with one process nothing is called.

All of it goes through the default group of `torch.distributed`, which Lightning's strategy opens;
on a CPU, where all processes are on one machine, through memory that they share. These are
collectives: every rank calls the same ones in the same order, from the main thread.
"""

import functools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_rl.system.machine import settings
from lightning_rl.system.shared_memory import LostRankError, SharedTable, open_table
from lightning_rl.system.torch_private import timeout_of

T = TypeVar("T")

_opened: tuple[Any, SharedTable | None] = (None, None)
"""The group, and its table."""


def world_size() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_first_process() -> bool:
    """Tell whether a run begins in this process, also before its processes are connected."""
    return bool(getattr(rank_zero_only, "rank", 0) == 0)  # of the launcher's environment


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over ranks, the same bit for bit on all; any device."""
    if world_size() == 1:
        return tensor
    with _peers_needed():
        parts = _exchanged(tensor)
        if parts is None:
            total = tensor.to(_device(), copy=True)  # all_reduce writes into it
            dist.all_reduce(total)
        else:
            # In the order of the ranks, on each of them: the same bits everywhere.
            total = torch.from_numpy(functools.reduce(np.add, parts))
    return total.view(tensor.shape).to(tensor.device)


def max_over_ranks(number: int) -> int:
    """Return the largest of the ranks' numbers."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number, device=_device())
    with _peers_needed():
        parts = _exchanged(largest)
        if parts is not None:
            return int(np.max(parts))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)


def agree(flag: bool) -> bool:
    """Tell whether a flag is up on any rank."""
    return bool(max_over_ranks(int(flag)))


def gather_over_ranks(value: T) -> list[T]:
    """Return the ranks' values, in their order; anything that can be pickled."""
    if world_size() == 1:
        return [value]
    with _peers_needed():
        table = _table()
        if table is None:
            return _gathered(value)
        parts = table.exchange(np.frombuffer(pickle.dumps(value), np.uint8))
        return [pickle.loads(part.tobytes()) for part in parts]


def moments_over_ranks(
    count: Tensor, mean: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of samples that lie on several ranks; float64 where there are several.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", equation
    2.1.

    Args:
        count: [D] or [], how many samples.
        mean: [D]; whatever it is where there are none.
        square: [D], sum of squared deviations from the mean.
    """
    if world_size() == 1:
        return count, mean, square
    counts = count.expand_as(mean)
    # What a rank without samples has for mean and square may be NaN, and would spoil the sum.
    own = torch.stack([counts, mean.where(counts > 0, 0.0), square.where(counts > 0, 0.0)]).double()
    # A row per rank, summed: a gather, by the sum that goes through shared memory.
    table = own.new_zeros(world_size(), *own.shape)
    table[rank()] = own
    counts, means, squares = sum_over_ranks(table).unbind(1)
    total = counts.sum(0)
    merged = (counts * means).sum(0) / total
    return total, merged, (squares + counts * (means - merged).square()).sum(0)


def normalize_over_ranks(values: Tensor, sizes: Sequence[int], *, eps: float = 1e-8) -> Tensor:
    """Do what `normalize_advantage` does, for several minibatches that ranks have parts of.

    Args:
        values: [M], this rank's parts, one after the other.
        sizes: of the parts; their sum is M.
        eps: added to the standard deviation.
    """
    # float64: a variance as a difference of sums of squares loses half of the digits.
    exact, lengths = values.double(), torch.tensor(sizes, device=values.device)
    sums = [torch.segment_reduce(x, "sum", lengths=lengths) for x in (exact, exact.square())]
    count, total, squares = sum_over_ranks(torch.stack([lengths, *sums]))
    mean = total / count
    variance = (squares - total * mean) / (count - 1).clamp(min=1)
    scale = variance.clamp(min=0).sqrt() + eps
    normalized: Tensor = (exact - mean.repeat_interleave(lengths)) / scale.repeat_interleave(
        lengths
    )
    return normalized.to(values.dtype)


def way_of_sums() -> str | None:
    """Say what sums go through, from the first one on; None with one process."""
    if world_size() == 1:
        return None
    shared = settings().shared_memory_sums and _opened[1] is not None
    return "shared memory" if shared else str(dist.get_backend())


def disconnect() -> None:
    """Close the connections to the other ranks, as the last thing before the process ends.

    Lightning does so on GPUs only; without it the threads of gloo may abort a process that ends.
    """
    global _opened
    if dist.is_initialized() and dist.get_backend() == "gloo":
        if _opened[1] is not None:
            _opened[1].leave()
        _opened = (None, None)
        dist.destroy_process_group()


def is_lost_rank(error: BaseException) -> bool:
    """Tell whether an error only says that another rank has gone, whose own says why."""
    return isinstance(error, LostRankError | dist.DistBackendError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _table() -> SharedTable | None:
    """Return the memory that all ranks share, if they can; opened by the first collective."""
    global _opened
    if not settings().shared_memory_sums:
        return None
    group: Any = dist.group.WORLD
    if _opened[0] is not group:
        table = None
        if dist.get_backend() == "gloo":
            table = open_table(rank(), _gathered, timeout_of(group))
        _opened = (group, table)
    return _opened[1]


def _exchanged(tensor: Tensor) -> list[np.ndarray] | None:
    """Return the ranks' tensors through the memory that they share; None where they share none.

    Flat, and they hold until the next exchange.
    """
    table = _table()
    return None if table is None else table.exchange(tensor.detach().cpu().numpy())


def _gathered(value: T) -> list[T]:
    """Gather through the group."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def _device() -> torch.device:
    """Return where the group's backend wants its tensors."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def _peers_needed() -> Iterator[None]:
    """Say what a failing collective means, which its own message does not."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"Rank {rank()} has lost another process of the run, whose own message says why: it "
            f"ended, or did not answer within the strategy's timeout ({str(error).splitlines()[0]})"
        ) from error
