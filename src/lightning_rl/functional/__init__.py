"""Pure functions of tensors: advantages and losses."""

from lightning_rl.functional.advantages import discounted_return, gae
from lightning_rl.functional.losses import (
    approx_kl,
    clip_fraction,
    clipped_surrogate_loss,
    clipped_value_loss,
    explained_variance,
    masked_mean,
    normalize_advantage,
    ratio,
    simple_kl,
    value_loss,
)

__all__ = [
    "approx_kl",
    "clip_fraction",
    "clipped_surrogate_loss",
    "clipped_value_loss",
    "discounted_return",
    "explained_variance",
    "gae",
    "masked_mean",
    "normalize_advantage",
    "ratio",
    "simple_kl",
    "value_loss",
]
