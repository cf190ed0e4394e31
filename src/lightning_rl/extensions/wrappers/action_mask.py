"""Add the mask of allowed actions from an env's infos to its observations."""

from typing import Any

import gymnasium
import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import EnvFaultError
from lightning_rl.extend.spaces import MASK, choices_of, flat_actions


class ActionMask(gymnasium.Wrapper):
    """An env whose observation has `action_mask` [C], from the info of each reset and step.

    C is the number of categories of all choices of an action: n of a Discrete, the sum of nvec of a
    MultiDiscrete. Observations that are not a Dict become a Dict of `observation` and
    `action_mask`. If the info of an episode's end has no mask, all actions are allowed.

    Args:
        env: the env whose infos hold the masks.
        key: info key of the mask: an array [C], or one array for each choice.

    Raises:
        ConfigurationError: actions have no choices, or observations already have a mask.
    """

    def __init__(self, env: gymnasium.Env, key: str = MASK) -> None:
        super().__init__(env)
        self._key = key
        self._size = sum(choices_of(flat_actions(env.action_space)))
        space = env.observation_space
        self._is_dict = isinstance(space, gymnasium.spaces.Dict)
        keys = dict(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else {}
        if self._size == 0 or MASK in keys:
            amiss = (
                f"the observation already has '{MASK}': remove the wrapper"
                if MASK in keys
                else f"the action space {env.action_space} has no choices: it is continuous"
            )
            raise ConfigurationError(f"ActionMask cannot be used, because {amiss}.")
        # A plain observation becomes an entry next to the mask.
        keys = keys or {"observation": space}
        self.observation_space = gymnasium.spaces.Dict(
            {**keys, MASK: gymnasium.spaces.MultiBinary(self._size)}
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info, False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        observed = self._with_mask(observation, info, bool(terminated or truncated))
        return observed, reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any], done: bool) -> dict[str, Any]:
        report = info.get(self._key)
        # No action follows the last observation, for which some envs report no mask.
        if report is None and done:
            report = np.ones(self._size, np.int8)
        # Masks of several choices are joined, as their logits are.
        choices = report if isinstance(report, tuple | list) else (report,)
        mask = np.concatenate([np.ravel(choice) for choice in choices])
        if report is None or mask.shape != (self._size,):
            names = ", ".join(map(repr, info)) or "nothing"
            entries = names if report is None else f"{mask.size} entries under that name"
            raise EnvFaultError(
                f"ActionMask looks for '{self._key}' with {self._size} entries, one per category, "
                f"but the info has {entries}: set key to the name of the mask in the info of each "
                "reset and step."
            )
        observed = observation if self._is_dict else {"observation": observation}
        return {**observed, MASK: (mask != 0).astype(np.int8)}
