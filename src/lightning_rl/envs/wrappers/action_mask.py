"""Observe what an env's infos say of the actions that are allowed."""

from typing import Any

import gymnasium
import numpy as np

from lightning_rl.rollout.contract import MASK
from lightning_rl.rollout.structured_actions import choices_of, flat_actions
from lightning_rl.system.errors import ConfigurationError, EnvFaultError


class ActionMask(gymnasium.Wrapper):
    """An env whose observation has `action_mask` [C], which its infos say at each reset and step.

    The C categories are those of all choices of an action in their order: n of a Discrete, the sum
    of nvec of a MultiDiscrete. Observations become a Dict, of `observation` and `action_mask`,
    where they were none. What an info leaves out at the end of an episode, where nothing is chosen
    any more, counts as all allowed.

    Args:
        env: whose infos hold the masks.
        key: under which name; an array [C], or one array for each choice.

    Raises:
        ConfigurationError: where actions have no choices, or observations a mask already.
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
                f"the observation has '{MASK}' already: leave the wrapper out"
                if MASK in keys
                else f"the action space {env.action_space} has no choices: it is continuous"
            )
            raise ConfigurationError(f"ActionMask has nothing to do, as {amiss}.")
        keys = keys or {"observation": space}
        self.observation_space = gymnasium.spaces.Dict(
            {**keys, MASK: gymnasium.spaces.MultiBinary(self._size)}
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        Raises:
            EnvFaultError: where the info has no mask, or one of another size.
        """
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info, False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step.

        Raises:
            EnvFaultError: where the info has no mask, or one of another size.
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        observed = self._with_mask(observation, info, bool(terminated or truncated))
        return observed, reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any], ended: bool) -> dict[str, Any]:
        said = info.get(self._key)
        if said is None and ended:
            said = np.ones(self._size, np.int8)
        choices = said if isinstance(said, tuple | list) else (said,)
        mask = np.concatenate([np.ravel(choice) for choice in choices])
        if said is None or mask.shape != (self._size,):
            there = ", ".join(map(repr, info)) or "nothing"
            what = f"has {there}" if said is None else f"has {mask.size} entries under that name"
            raise EnvFaultError(
                f"ActionMask looks for '{self._key}' with {self._size} entries, one per category, "
                f"and the info {what}: give the name under which the env says it at each reset and "
                "step (key: ...)."
            )
        observed = observation if self._is_dict else {"observation": observation}
        return {**observed, MASK: (mask != 0).astype(np.int8)}
