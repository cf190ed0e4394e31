"""Pure functions of tensors: advantages and losses."""

from lightning_rl.functional.advantages import discounted_return, gae
from lightning_rl.functional.groups import first_episode_mask, group_relative_advantage
from lightning_rl.functional.losses import (
    approx_kl,
    clip_fraction,
    clipped_surrogate_loss,
    clipped_value_loss,
    explained_variance,
    kl_penalty,
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
    "first_episode_mask",
    "gae",
    "group_relative_advantage",
    "kl_penalty",
    "masked_mean",
    "normalize_advantage",
    "ratio",
    "simple_kl",
    "value_loss",
]
