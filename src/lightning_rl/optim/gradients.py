"""Store the results of a minibatch in one tensor [L + P + n + 1] that can be summed.

It holds L scalars, a gradient [P], for each of n parameters a flag whether the loss reaches it, and
the number 1. All are multiplied by the number of samples, so sums over micro-batches and ranks,
divided by the last element, are means. A parameter that the loss does not reach has no gradient,
not a zero gradient: its optimizer must neither count a step nor decay the weight.
"""

from collections.abc import Sequence
from functools import cached_property, partial, reduce

import torch
from torch import Tensor, nn

from lightning_rl.system.torch_private import flatten, unflatten


def flattened(
    row: Tensor, gradients: Sequence[Tensor], reached: Sequence[bool], count: int
) -> Tensor:
    """Return the means over `count` samples, times `count`, in one tensor [L + P + n + 1].

    Args:
        row: [L], the scalars.
        gradients: gradients of the n parameters, P numbers in total; zeros if the loss does not
            reach one.
        reached: for each parameter, whether the loss reaches it.
        count: number of samples.
    """
    flags = row.new_ones(len(reached) + 1)
    if not all(reached):
        flags = torch.cat([row.new_full((1,), float(flag)) for flag in (*reached, True)])
    flat: Tensor = flatten([row, *gradients, flags])
    return flat * count


def averages(flat: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean scalars [L], the mean gradient [P], and whether parameters are reached [n] bool.

    Args:
        flat: [L + P + n + 1], a result of `flattened`, or a sum of results.
        parameters: the n parameters.
    """
    sizes = [sum(parameter.numel() for parameter in parameters), len(parameters), 1]
    row, gradient, reached, count = flat.split([len(flat) - sum(sizes), *sizes])
    return row / count, gradient / count, reached > 0


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor [] of gradient clipping for a norm [], as `clip_grad_norm_` does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class FlatGradient:
    """The gradient in one tensor [P]; the `.grad` of each parameter is a view of it.

    One copy sets all gradients. Parameters with another dtype than [P] have their own `.grad`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._reached = [False] * len(parameters)

    @cached_property
    def _whole(self) -> Tensor:
        dtype = reduce(torch.promote_types, (p.dtype for p in self._parameters))
        size = sum(parameter.numel() for parameter in self._parameters)
        return torch.zeros(size, dtype=dtype, device=self._parameters[0].device)

    @cached_property
    def _views(self) -> list[tuple[nn.Parameter, Tensor, bool]]:
        parts = unflatten(self._whole, self._parameters)
        for i, parameter in enumerate(self._parameters):
            # `.grad` exists before the backward pass, so it does not show whether the loss reaches
            # a parameter.
            note = partial(self._note_reached, i)
            parameter.register_post_accumulate_grad_hook(note)
        pairs = zip(self._parameters, parts, strict=True)
        return [(p, part, p.dtype == part.dtype) for p, part in pairs]

    def clear(self) -> None:
        """Set all gradients to zero, before backward passes add to them."""
        self._whole.zero_()  # one operation for all parameters
        for i, (parameter, part, is_view) in enumerate(self._views):
            parameter.grad = part if is_view else None
            self._reached[i] = False

    def with_scalars(self, row: Tensor, count: int) -> Tensor:
        """Return scalars [L] and the accumulated gradients, as `flattened` does."""
        for parameter, part, is_view in self._views:
            if not is_view and parameter.grad is not None:
                part.copy_(parameter.grad)
        return flattened(row, [self._whole], self._reached, count)

    def no_sums(self, scalars: int) -> Tensor:
        """Return `with_scalars` of no samples: zeros [L + P + n + 1] for L = `scalars`."""
        return self._whole.new_zeros(scalars + len(self._whole) + len(self._parameters) + 1)

    def _note_reached(self, i: int, parameter: Tensor) -> None:
        self._reached[i] = True

    def set_clipped(self, flat: Tensor, max_norm: float) -> Tensor:
        """Set clipped gradients from `flat` [L + P + n + 1]; return scalars and norm, [L + 1]."""
        row, gradient, reached = averages(flat, self._parameters)
        norm = gradient.norm()
        # `_whole` holds the `.grad`s as views: one product sets them all.
        torch.mul(gradient, clip_factor(norm, max_norm), out=self._whole)
        for (parameter, part, is_view), flag in zip(self._views, reached.tolist(), strict=True):
            gradient = part if is_view else part.to(parameter.dtype)
            parameter.grad = gradient if flag else None
        return torch.cat([row, norm[None]])
