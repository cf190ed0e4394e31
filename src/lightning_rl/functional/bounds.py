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
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, low: float, high: float) -> Tensor:
        return value.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        value, *ctx.bounds = inputs
        ctx.save_for_backward(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (value,), (gradient,), (low, high) = ctx.saved_tensors, gradients, ctx.bounds
        leads_away = ((value < low) & (gradient > 0)) | ((value > high) & (gradient < 0))
        return gradient.masked_fill(leads_away, 0.0), None, None
