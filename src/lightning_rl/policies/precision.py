"""Compute networks in bfloat16.

`trainer.precision: bf16-mixed` makes Lightning run updates and evaluations under autocast; acting
is out of its reach, in a collector or in a thread of one. And the ratio of an update begins at 1
only where the log-prob of an action is computed in the same way twice.
"""

import torch
from torch import Tensor


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return the context in which a policy on a device computes in a dtype; None for its own.

    It may be entered again and again. Weights are cast at each use, as under Lightning: they move
    between uses.
    """
    return torch.autocast(
        device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False
    )


def in_float32(tensor: Tensor) -> torch.autocast:
    """Return the context in which products on the device of a tensor [...] are not autocast."""
    return torch.autocast(tensor.device.type, enabled=False)
