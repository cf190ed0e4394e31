"""Lay what a minibatch gives into one tensor: scalars to report, gradients, and a one at the end.

Summed over ranks, each times its number of samples, the last element is the number of all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flattened(row: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return scalars [L] and gradients as [L + P + 1]."""
    flat: Tensor = _flatten_dense_tensors([row, *gradients, row.new_ones(1)])
    return flat


def unflattened(flat: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return scalars and gradients, as views of [L + P + 1].

    Args:
        flat: what `flattened` returned, or an average of such.
        parameters: of the gradients' shapes.
    """
    row, _ = _ends(flat, parameters)
    row, *gradients, _ = _unflatten_dense_tensors(flat, [row, *parameters, flat[-1:]])
    return row, gradients


def set_clipped(flat: Tensor, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the gradients and set them; return the scalars [L + 1], their norm behind the others.

    Args:
        flat: [L + P + 1]; its gradients are clipped in place, and are what is set.
        parameters: whose gradients these are.
        max_norm: bound on the norm of the whole gradient.
    """
    row, whole = _ends(flat, parameters)
    norm = whole.norm()
    whole.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for parameter, gradient in zip(parameters, unflattened(flat, parameters)[1], strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    return torch.cat([row, norm[None]])


def _ends(flat: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the scalars [L] and the whole gradient [P]."""
    size = sum(parameter.numel() for parameter in parameters)
    return flat[: -1 - size], flat[-1 - size : -1]
