"""Report the penalty of part of an action, separate from the task's reward."""

from typing import Any

import gymnasium
import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import EnvFaultError, check_range, require
from lightning_rl.extend.spaces import names_of

ROUNDING = 1e-6
"""Tolerance at the thresholds, as a share of half their distance: observations are float32."""


class PenaltyTerms(gymnasium.Wrapper):
    """An env whose infos name penalties; reports their weighted sum as `info["penalty"]`.

    `GripperSAC` adds the penalty only to the rewards of the gripper's critic.

    Args:
        env: the wrapped env.
        terms: weights by info key; a term that is already negative needs a positive weight.

    Raises:
        ConfigurationError: no term is named.
    """

    def __init__(self, env: gymnasium.Env, terms: dict[str, float]) -> None:
        super().__init__(env)
        if not terms:
            raise ConfigurationError(
                "PenaltyTerms has no terms: name entries of the env's info, terms: "
                "{discrete_penalty: 1.0}, or remove the wrapper."
            )
        self.metadata = {**env.metadata, "reports_penalty": True}
        self.terms = terms

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *result, info = self.env.step(action)
        for name in self.terms:
            if name not in info:
                raise EnvFaultError(
                    f"PenaltyTerms adds up '{name}', but the info of the step has "
                    f"{', '.join(map(repr, info)) or 'nothing'}: `terms` must name entries that "
                    "the env reports at each step."
                )
        penalty = sum(weight * float(info[name]) for name, weight in self.terms.items())
        return *result, {**info, "penalty": penalty}


class GripperPenalty(gymnasium.Wrapper):
    """An env with a penalty for each opening or closing of a gripper, by its position.

    A gripper at or beyond `open_at` is open, at or beyond `closed_at` closed; between them its
    state does not change. Commands without an effect have no penalty. A step that opens a closed
    gripper or closes an open one adds `-weight` to `info["penalty"]`.

    Args:
        env: the wrapped env.
        index: index or name of the gripper's position in the observation, [S].
        open_at: least open position, in units of the observation; above or below `closed_at`.
        closed_at: least closed position.
        weight: penalty of a change, in units of the reward.
        key: key of the array, if the observation is a Dict.

    Raises:
        ConfigurationError: the observation has no such number, or a setting is out of range.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        index: int | str,
        open_at: float,
        closed_at: float,
        weight: float = 0.02,
        key: str | None = None,
    ) -> None:
        super().__init__(env)
        check_range("GripperPenalty.weight", weight, above=0)
        require(
            open_at != closed_at,
            f"GripperPenalty.open_at and closed_at are both {open_at}: noise at one threshold "
            "would be penalised. Set them apart.",
        )
        space: Any = env.observation_space
        keys = list(space) if isinstance(space, gymnasium.spaces.Dict) else [None]
        array = space[key] if key in keys and key is not None else space
        shape: tuple[int, ...] = getattr(array, "shape", None) or ()
        names = names_of(array)
        index = names.index(index) if index in names else index
        require(
            key in keys and len(shape) == 1 and isinstance(index, int) and 0 <= index < shape[0],
            f"GripperPenalty reads number {index} of key {key}, but the observation is {space}: "
            "give the index of the gripper's position, and the key of its array in a Dict.",
        )
        self.metadata = {**env.metadata, "reports_penalty": True}
        self._key, self._index, self._weight = key, index, weight
        # `_half` is negative if the gripper opens towards smaller numbers.
        self._middle, self._half = (open_at + closed_at) / 2, (open_at - closed_at) / 2
        self._side = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._side = self._side_of(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        old_side, side = self._side, self._side_of(observation)
        # Between the thresholds, the last state remains.
        self._side = side or old_side
        has_switched = old_side * side < 0
        # Another wrapper may have reported a penalty already.
        penalty = float(info.get("penalty", 0.0)) - self._weight * has_switched
        return observation, reward, terminated, truncated, {**info, "penalty": penalty}

    def _side_of(self, observation: Any) -> float:
        array = observation if self._key is None else observation[self._key]
        way = (float(array[self._index]) - self._middle) / self._half  # 1 at open_at
        return float(np.sign(way)) if abs(way) >= 1.0 - ROUNDING else 0.0
