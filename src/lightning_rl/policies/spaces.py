"""Compare and describe the spaces of policies."""

from typing import Any

from gymnasium import spaces
from tensordict import TensorDict

from lightning_rl.policies.base import Policy
from lightning_rl.rollout.spaces import SpaceData, space_data
from lightning_rl.system.construction import GIVEN_BY_THE_ENV


def spaces_of(policy: Policy) -> dict[str, SpaceData | None]:
    """Return the spaces of a policy as data, by argument name."""
    return {name: space_data(getattr(policy, name)) for name in GIVEN_BY_THE_ENV}


def fits(wanted: spaces.Space[Any], given: spaces.Space[Any]) -> bool:
    """Return whether observations of `given` contain everything in `wanted`, except bounds."""
    if isinstance(wanted, spaces.Dict):
        there = given.spaces if isinstance(given, spaces.Dict) else {}
        return all(key in there and fits(one, there[key]) for key, one in wanted.items())
    return (wanted.shape, wanted.dtype) == (given.shape, given.dtype)


def part_for(space: spaces.Space[Any], observation: Any) -> Any:
    """Return the entries of observations [*batch, ...] that are in a space."""
    if not isinstance(space, spaces.Dict):
        return observation
    parts = {key: part_for(one, observation[key]) for key, one in space.items()}
    return TensorDict(parts, observation.batch_size)
