"""Pure functions of tensors: advantages and losses."""

from lightning_rl.functional.advantages import (
    discounted_return,
    explained_variance,
    gae,
    vtrace,
)
from lightning_rl.functional.augmentation import shift_pictures
from lightning_rl.functional.groups import first_episode_mask, group_relative_advantage
from lightning_rl.functional.losses import (
    approx_kl,
    clip_fraction,
    clipped_surrogate_loss,
    clipped_value_loss,
    normalize_advantage,
    ratio,
    value_loss,
)
from lightning_rl.functional.off_policy import (
    behavior_weight,
    decoupled_surrogate_loss,
    effective_sample_size,
    kl_penalty,
    loglinear_proximal,
)
from lightning_rl.functional.q_learning import (
    categorical_loss,
    categorical_target,
    double_q_target,
    ensemble_loss,
    expected_soft_value,
    least_of_subset,
    outputs_of_least,
    random_subsets,
    soft_policy_loss,
    soft_target,
    temperature_loss,
)

__all__ = [
    "approx_kl",
    "behavior_weight",
    "categorical_loss",
    "categorical_target",
    "clip_fraction",
    "clipped_surrogate_loss",
    "clipped_value_loss",
    "decoupled_surrogate_loss",
    "discounted_return",
    "double_q_target",
    "effective_sample_size",
    "ensemble_loss",
    "expected_soft_value",
    "explained_variance",
    "first_episode_mask",
    "gae",
    "group_relative_advantage",
    "kl_penalty",
    "least_of_subset",
    "loglinear_proximal",
    "normalize_advantage",
    "outputs_of_least",
    "random_subsets",
    "ratio",
    "shift_pictures",
    "soft_policy_loss",
    "soft_target",
    "temperature_loss",
    "value_loss",
    "vtrace",
]
