"""Lay what a minibatch gives into one tensor [L + P + n + 1], which adds up.

It holds L scalars to report, a gradient [P], for each of n parameters whether the loss reaches it
(1 or 0), and a one. All of it is times the number of samples, so that micro-batches, and
the parts that ranks have of it, add up; divided by the last element they are averages again.

A parameter that the loss does not reach has no gradient, which is not the same as one of zero: its
optimizer leaves it alone, and neither counts a step nor decays its weight.
"""

from collections.abc import Sequence
from functools import cached_property, partial, reduce

import torch
from torch import Tensor, nn

from lightning_rl.system.torch_private import flatten, unflatten


def flattened(
    row: Tensor, gradients: Sequence[Tensor], reached: Sequence[bool], count: int
) -> Tensor:
    """Return averages over `count` samples as sums [L + P + n + 1].

    Args:
        row: [L], the scalars.
        gradients: of the n parameters, P numbers in all; zeros where the loss does not reach.
        reached: of each parameter, whether it does.
        count: samples.
    """
    flags = row.new_ones(len(reached) + 1)
    if not all(reached):
        flags = torch.cat([row.new_full((1,), float(flag)) for flag in (*reached, True)])
    flat: Tensor = flatten([row, *gradients, flags])
    return flat * count


def averages(flat: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return scalars [L] and gradient [P] as averages, and which parameters are reached [n] bool.

    Args:
        flat: [L + P + n + 1], what `flattened` returned, or a sum of such.
        parameters: the n parameters.
    """
    sizes = [sum(parameter.numel() for parameter in parameters), len(parameters), 1]
    row, gradient, reached, count = flat.split([len(flat) - sum(sizes), *sizes])
    return row / count, gradient / count, reached > 0


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what to multiply a gradient by, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        norm: a scalar [].
        max_norm: bound on it.

    Returns:
        a scalar [], at most 1.
    """
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
        self._reached = [False] * len(parameters)

    @cached_property
    def _whole(self) -> Tensor:
        """The gradient [P]; allocated when it is first needed."""
        dtype = reduce(torch.promote_types, (p.dtype for p in self._parameters))
        size = sum(parameter.numel() for parameter in self._parameters)
        return torch.zeros(size, dtype=dtype, device=self._parameters[0].device)

    @cached_property
    def _views(self) -> list[tuple[nn.Parameter, Tensor, bool]]:
        """Each parameter, its part of the gradient, and whether its `.grad` can be that."""
        parts = unflatten(self._whole, self._parameters)
        for i, parameter in enumerate(self._parameters):
            # A `.grad` that was there before a backward pass does not tell whether one has come.
            note = partial(self._note_reached, i)
            parameter.register_post_accumulate_grad_hook(note)
        pairs = zip(self._parameters, parts, strict=True)
        return [(p, part, p.dtype == part.dtype) for p, part in pairs]

    def clear(self) -> None:
        """Set all gradients to zero, for backward passes to add to."""
        self._whole.zero_()  # one operation, whatever the number of parameters
        for i, (parameter, part, same) in enumerate(self._views):
            parameter.grad = part if same else None
            self._reached[i] = False

    def with_scalars(self, row: Tensor, count: int) -> Tensor:
        """Return scalars [L] and what the passes have added up, as `flattened` does."""
        for parameter, part, same in self._views:
            if not same and parameter.grad is not None:
                part.copy_(parameter.grad)
        return flattened(row, [self._whole], self._reached, count)

    def no_sums(self, scalars: int) -> Tensor:
        """Return what `with_scalars` would for no samples at all: zeros [L + P + n + 1].

        Args:
            scalars: L.
        """
        return self._whole.new_zeros(scalars + len(self._whole) + len(self._parameters) + 1)

    def _note_reached(self, i: int, parameter: Tensor) -> None:
        self._reached[i] = True

    def set_clipped(self, flat: Tensor, max_norm: float) -> Tensor:
        """Set the gradients, clipped; return the scalars [L + 1], their norm behind the others.

        Args:
            flat: [L + P + n + 1], what `flattened` returned, or a sum of such.
            max_norm: bound on the norm of the whole gradient.
        """
        row, gradient, reached = averages(flat, self._parameters)
        norm = gradient.norm()
        # Into the tensor whose views the `.grad`s are: one product sets them all.
        torch.mul(gradient, clip_factor(norm, max_norm), out=self._whole)
        for (parameter, part, same), is_reached in zip(self._views, reached.tolist(), strict=True):
            own = part if same else part.to(parameter.dtype)
            parameter.grad = own if is_reached else None
        return torch.cat([row, norm[None]])
