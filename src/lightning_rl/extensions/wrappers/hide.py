"""Hide part of the observation, so that the policy needs a memory."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from lightning_rl import ConfigurationError
from lightning_rl.extend.spaces import named, names_of


class PartialObservation(gymnasium.ObservationWrapper):
    """An env whose flat observation lacks some entries, such as velocities.

    Args:
        env: the env; its observations are a Box [D].
        entries: names or indices of hidden entries; negative ones count from the end.

    Raises:
        ConfigurationError: another observation space, an index out of range, or no entry left.
    """

    def __init__(self, env: gymnasium.Env, entries: list[int | str]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise ConfigurationError(
                "PartialObservation removes entries of a flat Box, but the observation space is "
                f"{space}: put gymnasium.wrappers.FlattenObservation before it, or hide keys of a "
                "Dict by actor_keys and critic_keys of the policy."
            )
        size, names = space.shape[0], names_of(space)
        # -1, size - 1 and its name are the same entry.
        places = {i: i % size for i in range(-size, size)} | {x: i for i, x in enumerate(names)}
        hidden = {places[entry] for entry in entries if entry in places}
        if not entries or len(hidden) < len(set(entries)) or len(hidden) == size:
            raise ConfigurationError(
                f"PartialObservation: entries={list(entries)} must be different indices from 0 to "
                f"{size - 1} or names out of {', '.join(names) or 'none'}, and leave at least one."
            )
        self._kept = [entry for entry in range(size) if entry not in hidden]
        box = Box(space.low[self._kept], space.high[self._kept], dtype=space.dtype.type)
        self.observation_space = named(box, [names[i] for i in self._kept] if names else ())

    def observation(self, observation: Any) -> Any:
        return np.asarray(observation)[self._kept]
