"""Give a `VecEnv` as rsl_rl trains on it the interface that `TensorSimulator` steps."""

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.system.errors import ConfigurationError, EnvFaultError, closest


class RslRlVecEnv:
    """An env of rsl_rl's kind, `obs, rew, done, extras["time_outs"]`, for `TensorSimulator`.

    `time_outs` [N] says which of the finished episodes time has cut; an env that gives none has
    none. Such envs reset within the step and keep the final observation to themselves: set
    `missing_final: last_observation`, as rsl_rl does. They take no seed: seed the simulator where
    it is made. Observations may be a tensor, a dict of groups or a TensorDict; a second group in
    `extras["observations"]`, such as `critic`, makes them a dict with `policy` beside it. What else
    stands in `extras` is the info.

    Source: rsl_rl 2 and 3 (`rsl_rl/env/vec_env.py`), whose interface this follows. Tested on a
    stand-in.

    Args:
        env: has `num_envs`, `num_actions`, `device`, `get_observations` or `reset`, and `step`.
        action_bound: the greatest absolute value of an action; none where not given.

    Raises:
        ConfigurationError: where something is missing.
    """

    def __init__(self, env: Any, action_bound: float | None = None) -> None:
        for name in ("num_envs", "num_actions", "device", "step"):
            if not hasattr(env, name):
                raise ConfigurationError(
                    f"{type(env).__name__} is no VecEnv as rsl_rl has it: there is no {name}"
                    f"{closest(name, dir(env))}."
                )
        self.env = self.unwrapped = env
        self.num_envs, self.device = int(env.num_envs), torch.device(env.device)
        self.max_episode_length = getattr(env, "max_episode_length", None)
        bound = np.inf if action_bound is None else action_bound
        shape = (int(env.num_actions),)
        self.single_action_space = gymnasium.spaces.Box(-bound, bound, shape, np.float32)

    def reset(self, **ignored: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every env; the seed and the options have no place to go."""
        returned = self.env.reset() if hasattr(self.env, "reset") else self.env.get_observations()
        if returned is None:  # of some simulators, whose reset only resets
            returned = self.env.get_observations()
        observation, extras = returned if isinstance(returned, tuple) else (returned, {})
        return _grouped(observation, extras or {}), {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step by actions [N, A]."""
        observation, reward, done, extras = self._four(self.env.step(action))
        done = done.bool()
        cut = done & extras.get("time_outs", torch.zeros_like(done)).bool()
        info = {key: value for key, value in extras.items() if key != "time_outs"}
        return _grouped(observation, extras), reward, done & ~cut, cut, info

    def close(self) -> None:
        """Close the env, where it can be."""
        getattr(self.env, "close", lambda: None)()

    def _four(self, result: Any) -> Any:
        if not (isinstance(result, tuple) and len(result) == 4):
            count = len(result) if isinstance(result, tuple) else 1
            raise EnvFaultError(
                f"{type(self.env).__name__} returned {count} things from step, not obs, rew, done "
                "and extras: TensorSimulator takes an env that returns five as it is."
            )
        return result


def _grouped(observation: Any, extras: dict[str, Any]) -> Any:
    """Return the observation, with the other groups that `extras` has beside it."""
    groups = extras.get("observations", {})
    if not isinstance(observation, Tensor) or not groups:
        return observation
    return {"policy": observation, **groups}
