"""Sum, gather and agree over the processes of a run; a single process communicates nothing.

The functions are collectives of the default group of `torch.distributed`: every rank calls the same
ones in the same order, from the main thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

T = TypeVar("T")


class LostRankError(RuntimeError):
    """Another process of the run has ended, or has not answered in time."""


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_first_process() -> bool:
    """Return whether this is rank 0, even before the processes are connected."""
    return bool(getattr(rank_zero_only, "rank", 0) == 0)  # set by the launcher's environment


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over ranks, equal bit for bit on all; any device."""
    if world_size() == 1:
        return tensor
    with _peers_needed():
        # Copy to contiguous memory, into which all_reduce writes.
        total = tensor.to(_device(), copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total)
    return total.to(tensor.device)


def max_over_ranks(number: int) -> int:
    """Return the largest number of all ranks."""
    if world_size() == 1:
        return number
    largest = torch.tensor(number, device=_device())
    with _peers_needed():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def agree(flag: bool) -> bool:
    """Return whether a flag is set on any rank."""
    return bool(max_over_ranks(int(flag)))


def gather_over_ranks(value: T) -> list[T]:
    """Return the values of all ranks, in order; pickle transfers them."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    with _peers_needed():
        dist.all_gather_object(values, value)
    return values


def reduction_backend() -> str | None:
    """Return the backend of the sums; None with one process."""
    return None if world_size() == 1 else str(dist.get_backend())


def disconnect() -> None:
    """Close the connections: with open connections gloo's threads may abort the process."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error only means that another rank is lost."""
    return isinstance(error, LostRankError | dist.DistBackendError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def _peers_needed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"Rank {rank()} has lost another process of the run, whose own message says why: it "
            f"ended, or did not answer within the strategy's timeout ({str(error).splitlines()[0]})"
        ) from error
