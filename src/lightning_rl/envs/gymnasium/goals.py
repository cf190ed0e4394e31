"""Judge other goals by the functions of a single goal env."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.rollout.goals import GoalFunction
from lightning_rl.system.errors import ConfigurationError, reason_of


def goal_function(env: gymnasium.Env) -> GoalFunction | None:
    """Return the function that judges goals by `compute_reward` and `compute_terminated`.

    The two must depend on their arguments alone; the info they get is empty. Without
    `compute_terminated` no goal ends an episode. None if the env has no `compute_reward`.
    """
    if not env.has_wrapper_attr("compute_reward"):
        return None
    reward_of = env.get_wrapper_attr("compute_reward")
    ends = None
    if env.has_wrapper_attr("compute_terminated"):
        ends = env.get_wrapper_attr("compute_terminated")

    def judge(achieved: Tensor, desired: Tensor) -> tuple[Tensor, Tensor]:
        arrays = achieved.cpu().numpy(), desired.cpu().numpy()
        reward = torch.from_numpy(_each("compute_reward", reward_of, *arrays).astype(np.float32))
        terminated = torch.zeros_like(reward, dtype=torch.bool)
        if ends is not None:
            terminated = torch.from_numpy(_each("compute_terminated", ends, *arrays).astype(bool))
        return reward.to(achieved.device), terminated.to(achieved.device)

    return judge


def _each(
    name: str, function: Callable[..., Any], achieved: np.ndarray, desired: np.ndarray
) -> np.ndarray:
    """Call a function for M goals, one by one if it returns no array [M] for all."""
    with suppress(Exception):  # of a function that was written for one goal
        together = np.asarray(function(achieved, desired, {}))  # most goal envs judge batches
        if together.shape == (len(achieved),):
            return together
    try:
        rows = zip(achieved, desired, strict=True)
        return np.array([function(a, d, {}) for a, d in rows]).reshape(len(achieved))
    except Exception as error:
        raise ConfigurationError(
            f"{name} of the env cannot judge a goal: {type(error).__name__}: {reason_of(error)}. "
            "It gets an achieved goal, a desired goal and an empty info, and returns one number."
        ) from error
