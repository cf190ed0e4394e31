"""Execute a chunk of actions in a single Gymnasium env."""

from typing import Any

import gymnasium
import numpy as np

from lightning_rl.envs.infos import EXECUTED_ACTION, INTERVENED, report_intervention
from lightning_rl.envs.pictures import picture_or_error
from lightning_rl.envs.step_results import one_number
from lightning_rl.rollout.names import named, names_of
from lightning_rl.rollout.structured_actions import StructuredActions
from lightning_rl.system.errors import ConfigurationError


class ChunkWrapper(gymnasium.Wrapper):
    """An env whose action is a chunk of K actions [K, *A], executed until the episode ends.

    The observation is a dict: `observation`, the env's own after the last executed action; and for
    the last chunk `step_reward` [K] and `executed` [K], 1 for executed actions. The info belongs to
    the last executed action, except `rewards` (summed), `executed_action` (a chunk) and
    `intervened` (any action).

    Args:
        env: the wrapped env.
        chunk_size: K.
        execute: maximum number of executed actions per chunk; default: all.
    """

    def __init__(self, env: gymnasium.Env, chunk_size: int, execute: int | None = None) -> None:
        super().__init__(env)
        self._chunk_size, self._execute = chunk_size, execute or chunk_size
        self._elapsed = 0  # env steps of the episode
        self.picture_every = 0  # env steps between two pictures; 0: none
        self.pictures: list[tuple[int, Any]] = []  # of the last chunk, with their env step
        self.action_space = repeated(env.action_space, chunk_size)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "observation": env.observation_space,
                "step_reward": gymnasium.spaces.Box(-np.inf, np.inf, (chunk_size,), np.float32),
                "executed": gymnasium.spaces.Box(0, 1, (chunk_size,), np.int8),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._elapsed = 0  # an automatic reset keeps the pictures of the last chunk
        return self._with_report(observation, *self._not_executed()), info  # no chunk yet

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        step_reward, executed = self._not_executed()
        terms: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        self.pictures = []
        for k in range(self._execute):
            observation, reward, terminated, truncated, info = self.env.step(action[k])
            step_reward[k], executed[k] = float(reward), 1
            self._elapsed += 1
            if self.picture_every and self._elapsed % self.picture_every == 0:
                self.pictures.append((self._elapsed, picture_or_error(self.env.render)))
            rewards = info.get("rewards")
            if isinstance(rewards, dict):
                for name, value in rewards.items():
                    # Others are left out, as in `InfoReader`.
                    if (number := one_number(value)) is not None:
                        terms[name] = terms.get(name, 0.0) + number
            if EXECUTED_ACTION in info or INTERVENED in info:
                report = report_intervention(info, action[k], False)
                # Copy the chunk: its other actions were executed unchanged.
                merged.setdefault(EXECUTED_ACTION, np.array(action))[k] = report[EXECUTED_ACTION]
                merged[INTERVENED] = merged.get(INTERVENED, False) or report[INTERVENED]
            if terminated or truncated:
                break  # the rest of the chunk must not act on the next episode
        if terms or merged:
            info = {**info, **({"rewards": terms} if terms else {}), **merged}
        reported = self._with_report(observation, step_reward, executed)
        return reported, step_reward.sum(), terminated, truncated, info

    def _not_executed(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(self._chunk_size, np.float32), np.zeros(self._chunk_size, np.int8)

    def _with_report(
        self, observation: Any, step_reward: np.ndarray, executed: np.ndarray
    ) -> dict[str, Any]:
        return {"observation": observation, "step_reward": step_reward, "executed": executed}


def repeated(space: gymnasium.Space[Any], count: int) -> gymnasium.Space[Any]:
    """Return the space of `count` consecutive actions, along a new first dimension."""
    if isinstance(space, gymnasium.spaces.Box) and not isinstance(space, StructuredActions):
        low, high = (np.stack([bound] * count) for bound in (space.low, space.high))
        return named(gymnasium.spaces.Box(low, high, dtype=space.dtype.type), names_of(space))
    if isinstance(space, gymnasium.spaces.Discrete) and space.start == 0:
        return gymnasium.spaces.MultiDiscrete([int(space.n)] * count)
    raise ConfigurationError(
        f"Action space {space} cannot be chunked: use a Box, or a Discrete that starts at 0."
    )
