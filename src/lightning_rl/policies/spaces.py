"""Compare and describe the spaces of policies."""

from typing import Any

from gymnasium import spaces

from lightning_rl.policies.base import Policy
from lightning_rl.rollout.spaces import SpaceData, space_data
from lightning_rl.system.construction import GIVEN_BY_THE_ENV


def spaces_of(policy: Policy) -> dict[str, SpaceData | None]:
    """Return the spaces of a policy as data, by argument name."""
    return {name: space_data(getattr(policy, name)) for name in GIVEN_BY_THE_ENV}


def fits(inner: spaces.Space[Any], outer: spaces.Space[Any]) -> bool:
    """Return whether observations of `outer` contain everything in `inner`, except bounds."""
    if isinstance(inner, spaces.Dict):
        children = outer.spaces if isinstance(outer, spaces.Dict) else {}
        return all(key in children and fits(child, children[key]) for key, child in inner.items())
    return (inner.shape, inner.dtype) == (outer.shape, outer.dtype)
