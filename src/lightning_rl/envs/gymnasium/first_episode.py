"""End the first episode of a Gymnasium env early."""

from typing import Any

import gymnasium
import numpy as np


class RandomFirstEpisode(gymnasium.Wrapper):
    """An env whose episode after a seeded reset begins at a random step below the time limit.

    Args:
        env: the env.
        limit: time limit, in steps.
    """

    def __init__(self, env: gymnasium.Env, limit: int) -> None:
        super().__init__(env)
        self._limit = self._left = limit

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        # From the seed, which a resumed run replays. The second number separates these draws from
        # those of the env.
        elapsed = 0 if seed is None else np.random.default_rng([seed, 1]).integers(self._limit)
        self._left = self._limit - int(elapsed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._left -= 1
        return observation, reward, terminated, bool(truncated) or self._left <= 0, info
