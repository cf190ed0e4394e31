"""Add a condition to observations: how good the policy's action must be."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor

from lightning_rl.system.errors import ConfigurationError

CONDITION = "condition"
"""Key of the condition in Dict observations."""


class Conditioned(gymnasium.Wrapper):
    """An env whose observation has one more number, 1, which asks the policy for a good action.

    For policies cloned with that number, 1 for good actions and 0 for others (`condition` of
    `Demonstrations`). It is the last number of a flat Box of floats, or the key `condition` [1] of
    a Dict.

    Source: Physical Intelligence 2025, "pi*0.6: a VLA That Learns From Experience".

    Args:
        env: the env; its observations are a Box [D] of floats, or a Dict.

    Raises:
        ConfigurationError: for other observation spaces.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = conditioned(env.observation_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return _with_one(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, *result, info = self.env.step(action)
        return _with_one(observation), *result, info


def conditioned(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return an observation space with the condition.

    Raises:
        ConfigurationError: the space is neither a Box [D] of floats nor a Dict without that key.
    """
    if isinstance(space, Dict) and CONDITION not in space.spaces:
        return Dict({**space.spaces, CONDITION: Box(0, 1, (1,), np.float32)})
    if isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        low, high = np.append(space.low, 0), np.append(space.high, 1)
        return Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
    raise ConfigurationError(
        f"Conditioned adds a number to a flat Box of floats, or to a Dict without the key "
        f"'{CONDITION}', and the observation space is {space}: wrap the env in "
        "gymnasium.wrappers.FlattenObservation before."
    )


def unconditioned(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return an observation space without the condition of `Conditioned`.

    Raises:
        ConfigurationError: the space has no condition.
    """
    if isinstance(space, Dict) and CONDITION in space.spaces:
        return Dict({key: one for key, one in space.spaces.items() if key != CONDITION})
    if isinstance(space, Box) and len(space.shape) == 1 and space.shape[0] > 1:
        low, high = space.low, space.high
        if low[-1] == 0 and high[-1] == 1:
            return Box(low[:-1], high[:-1], dtype=space.dtype.type)
    raise ConfigurationError(
        f"The observation space {space} has no place for the condition of demonstrations: let "
        "lightning_rl.Conditioned be the last of the env's wrappers."
    )


def with_condition(observation: Any, condition: Tensor) -> Any:
    """Add a condition [L] to observations: a tensor [L, D] or a dict of tensors [L, ...]."""
    column = condition[:, None]
    if isinstance(observation, dict):
        return {**observation, CONDITION: column.float()}
    return torch.cat((observation, column.to(observation)), 1)


def _with_one(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {**observation, CONDITION: np.ones(1, np.float32)}
    return np.append(observation, np.ones(1, observation.dtype))
