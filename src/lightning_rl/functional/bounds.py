"""Bounds of numbers that are learnt."""

from typing import Any

import torch
from torch import Tensor


def bounded(value: Tensor, low: float, high: float) -> Tensor:
    """Return `value` clamped to [low, high], with a gradient that leads back from beyond a bound.

    The gradient of `torch.clamp` is 0 there, and a parameter never comes back. Here it is 0 only if
    a step of descent would lead further away.

    Source: the gradient of a projected descent, Bertsekas 1976, "On the Goldstein-Levitin-Polyak
    Gradient Projection Method". Differs: the value may lie beyond the bounds.

    Args:
        value: [...], such as a log standard deviation.
        low: smallest number.
        high: largest number.
    """
    clamped: Tensor = _Bounded.apply(value, low, high)
    return clamped


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, low: float, high: float) -> Tensor:
        clamped = value.clamp(low, high)
        ctx.save_for_backward(value - clamped)
        return clamped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (excess,), (gradient,) = ctx.saved_tensors, gradients
        # Descent moves against the gradient: away from the bound if the signs differ.
        return gradient.masked_fill(excess * gradient < 0, 0.0), None, None
