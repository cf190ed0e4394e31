"""Observations of goal envs, and the function that judges other goals.

A goal env, as in Gymnasium-Robotics, observes a dict of `observation`, `achieved_goal` and
`desired_goal`. Its reward is a function of the last two after a step.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
from torch import Tensor

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
"""Keys of a goal env's observation."""

GoalFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns the reward [M] and whether the goal ends the episode [M] bool.

Its arguments are the achieved goals [M, ...] after M steps, and the desired goals [M, ...]."""


def is_goal_space(space: gymnasium.Space[Any]) -> bool:
    """Return whether an observation space has goals."""
    return isinstance(space, gymnasium.spaces.Dict) and {ACHIEVED, DESIRED} <= space.keys()
