"""Hide part of the observation, so that the policy needs a memory."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from lightning_rl import ConfigurationError


class PartialObservation(gymnasium.ObservationWrapper):
    """An env whose flat observation lacks some entries, such as velocities.

    Args:
        env: the env; its observations are a Box [D].
        entries: indices of hidden entries; negative ones count from the end.

    Raises:
        ConfigurationError: another observation space, an index out of range, or no entry left.
    """

    def __init__(self, env: gymnasium.Env, entries: list[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise ConfigurationError(
                "PartialObservation removes entries of a flat Box, but the observation space is "
                f"{space}: put gymnasium.wrappers.FlattenObservation before it, or hide keys of a "
                "Dict by actor_keys and critic_keys of the policy."
            )
        size = space.shape[0]
        # -1 and size - 1 are the same entry: compare them as positive indices.
        hidden = {entry % size for entry in entries if -size <= entry < size}
        if not entries or len(hidden) < len(set(entries)) or len(hidden) == size:
            raise ConfigurationError(
                f"PartialObservation: entries={list(entries)} must be different indices from 0 to "
                f"{size - 1}, and leave at least one entry."
            )
        self._kept = [entry for entry in range(size) if entry not in hidden]
        self.observation_space = Box(
            space.low[self._kept], space.high[self._kept], dtype=space.dtype.type
        )

    def observation(self, observation: Any) -> Any:
        return np.asarray(observation)[self._kept]
