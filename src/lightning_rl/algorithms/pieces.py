"""Cut minibatches into the pieces that go through a network at once."""

from typing import cast

from tensordict import TensorDict
from torch import Tensor

CPU_CHUNK = 2048
"""Samples that go through the networks at once on a CPU.

The activations of a larger chunk leave the cache, and their memory is asked for anew each time.
"""


def chunks(minibatch: TensorDict, size: int | None = None) -> list[tuple[TensorDict, float]]:
    """Split a minibatch [B]; return the parts and their shares of the samples.

    Args:
        minibatch: [B].
        size: of a part, for the memory; None for one that suits the cache.
    """
    if size is None and _is_large(minibatch):
        size = CPU_CHUNK
    if size is None or size >= len(minibatch):
        return [(minibatch, 1.0)]
    return [(chunk, len(chunk) / len(minibatch)) for chunk in minibatch.split(size)]


def _is_large(minibatch: TensorDict) -> bool:
    field = cast(Tensor, next(iter(minibatch.values(True, True))))
    return field.device.type == "cpu" and len(minibatch) >= 2 * CPU_CHUNK
