"""Lay what a minibatch gives into one tensor: scalars to report, gradients, and a one at the end.

All of it is times the number of samples, so that pieces of a minibatch, and the parts that ranks
have of it, add up; divided by the last element they are averages again.
"""

from collections.abc import Sequence
from functools import cached_property, reduce

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flattened(row: Tensor, gradients: Sequence[Tensor], count: int) -> Tensor:
    """Return scalars [L] and gradients, averages over `count` samples, as sums [L + P + 1]."""
    flat: Tensor = _flatten_dense_tensors([row, *gradients, row.new_ones(1)])
    return flat * count


def averages(flat: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return scalars [L] and gradient [P] as averages.

    Args:
        flat: [L + P + 1], what `flattened` returned, or a sum of such.
        size: P.
    """
    flat = flat / flat[-1]
    return flat[: -1 - size], flat[-1 - size : -1]


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what to multiply a gradient by, as `torch.nn.utils.clip_grad_norm_` does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class FlatGradient:
    """The gradient in one tensor [P], of which the `.grad` of each parameter is a view.

    A backward pass then leaves nothing to gather, and what is set is set in one copy. Parameters of
    another dtype than most have a `.grad` of their own.

    Args:
        parameters: what is trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @cached_property
    def _whole(self) -> Tensor:
        """The gradient [P]; allocated when it is first needed."""
        dtype = reduce(torch.promote_types, (p.dtype for p in self._parameters))
        size = sum(parameter.numel() for parameter in self._parameters)
        return torch.zeros(size, dtype=dtype, device=self._parameters[0].device)

    @cached_property
    def _views(self) -> list[tuple[nn.Parameter, Tensor, bool]]:
        """Each parameter, its part of the gradient, and whether its `.grad` can be that."""
        parts = _unflatten_dense_tensors(self._whole, self._parameters)
        pairs = zip(self._parameters, parts, strict=True)
        return [(p, part, p.dtype == part.dtype) for p, part in pairs]

    def clear(self) -> None:
        """Set all gradients to zero, for backward passes to add to."""
        self._whole.zero_()
        for parameter, part, same in self._views:
            parameter.grad = part if same else None

    def with_scalars(self, row: Tensor, count: int) -> Tensor:
        """Return scalars [L] and what the passes have added up, as `flattened` does."""
        for parameter, part, same in self._views:
            if not same and parameter.grad is not None:
                part.copy_(parameter.grad)
        return flattened(row, [self._whole], count)

    def set_clipped(self, flat: Tensor, max_norm: float) -> Tensor:
        """Set the gradients, clipped; return the scalars [L + 1], their norm behind the others.

        Args:
            flat: [L + P + 1], what `flattened` returned, or a sum of such.
            max_norm: bound on the norm of the whole gradient.
        """
        row, gradient = averages(flat, len(self._whole))
        norm = gradient.norm()
        torch.mul(gradient, clip_factor(norm, max_norm), out=self._whole)
        for parameter, part, same in self._views:
            parameter.grad = part if same else part.to(parameter.dtype)
        return torch.cat([row, norm[None]])
