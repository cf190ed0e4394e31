"""Keep entries of an env's info in rollouts."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from lightning_rl.envs.infos import RECORDED
from lightning_rl.envs.step_results import check_like, name_of, one_number
from lightning_rl.system.errors import EnvFaultError


class RecordedInfo(gymnasium.Wrapper):
    """Collects entries of each step's info as float32 arrays, which rollouts store.

    Args:
        env: the env with its other wrappers.
        shapes: shape of each entry, by name.
    """

    def __init__(self, env: gymnasium.Env, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(env)
        self._shapes = dict(shapes)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *result, info = self.env.step(action)
        entries = {name: self._array(info, name, shape) for name, shape in self._shapes.items()}
        return *result, {**info, RECORDED: entries}

    def _array(self, info: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
        owner = name_of(self.env)
        if name not in info:
            raise EnvFaultError(
                f"data.extra_fields names '{name}', but the info of a step of {owner} has "
                f"{', '.join(map(repr, info)) or 'nothing'}: name entries that the env reports at "
                "each step."
            )
        number = one_number(info[name]) if shape == () else None
        array = np.asarray(info[name] if number is None else number)
        check_like(owner, array, np.empty(shape), f"info {name}")
        return array.astype(np.float32)
