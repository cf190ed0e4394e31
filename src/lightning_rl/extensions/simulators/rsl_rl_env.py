"""Adapt a `VecEnv` of rsl_rl to the interface that `TensorSimulator` steps."""

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import EnvFaultError, closest


class RslRlVecEnv:
    """Adapter for `TensorSimulator` of envs that return `obs, rew, done, extras["time_outs"]`.

    `time_outs` [N] marks finished episodes that were truncated (default: none). These envs reset
    within the step without a final observation: set `missing_final: last_observation`, as rsl_rl
    does. They take no seed: seed the simulator at its construction. Observations are a tensor, a
    dict of groups or a TensorDict; with further groups in `extras["observations"]`, such as
    `critic`, they become a dict with the key `policy`. Other `extras` are the info.

    Source: interface of rsl_rl 2 and 3 (`rsl_rl/env/vec_env.py`). Tested with the wrapper of mjlab
    1.6 (rsl_rl 5.4), and with a stand-in.

    Args:
        env: has `num_envs`, `num_actions`, `device`, `get_observations` or `reset`, and `step`.
        action_bound: the maximum absolute value of an action; default: unbounded.

    Raises:
        ConfigurationError: an attribute is missing.
    """

    def __init__(self, env: Any, action_bound: float | None = None) -> None:
        for name in ("num_envs", "num_actions", "device", "step"):
            if not hasattr(env, name):
                raise ConfigurationError(
                    f"{type(env).__name__} is not a VecEnv of rsl_rl: it has no "
                    f"{name}{closest(name, dir(env))}."
                )
        # `TensorSimulator` looks for further attributes in `unwrapped`.
        self.env = self.unwrapped = env
        self.num_envs, self.device = int(env.num_envs), torch.device(env.device)
        self.max_episode_length = getattr(env, "max_episode_length", None)
        bound = np.inf if action_bound is None else action_bound
        shape = (int(env.num_actions),)
        self.single_action_space = gymnasium.spaces.Box(-bound, bound, shape, np.float32)

    def reset(self, **ignored: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every env; seed and options are ignored."""
        returned = self.env.reset() if hasattr(self.env, "reset") else None
        observation, extras = returned if isinstance(returned, tuple) else (returned, {})
        observation = _grouped(observation, extras or {})
        # Some simulators return nothing from reset, or no groups.
        if observation is None or isinstance(observation, Tensor):
            current = self.current_observation()
            observation = observation if current is None else current
        return observation, {}

    def current_observation(self) -> Any:
        """Return the observation of the current state; None if the env cannot."""
        if not hasattr(self.env, "get_observations"):
            return None
        returned = self.env.get_observations()
        observation, extras = returned if isinstance(returned, tuple) else (returned, {})
        return _grouped(observation, extras or {})

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step by actions [N, A]."""
        observation, reward, done, extras = self._four(self.env.step(action))
        done = done.bool()
        timed_out = done & extras.get("time_outs", torch.zeros_like(done)).bool()
        # rsl_rl reports truncations in the extras, not as a value of their own.
        info = {key: value for key, value in extras.items() if key != "time_outs"}
        return _grouped(observation, extras), reward, done & ~timed_out, timed_out, info

    def render(self) -> Any:
        """Return what `render` of the env draws: [N, H, W, 3], or one picture [H, W, 3] of all.

        Raises:
            ConfigurationError: the env has no `render`.
        """
        for owner in (self.env, getattr(self.env, "unwrapped", self.env)):
            if hasattr(owner, "render"):
                return owner.render()
        raise ConfigurationError(
            f"{type(self.env).__name__} has no render(), which would return pictures: add one, or "
            "turn videos off."
        )

    def close(self) -> None:
        """Close the env if it has a `close` method."""
        getattr(self.env, "close", lambda: None)()

    def _four(self, result: Any) -> Any:
        if not (isinstance(result, tuple) and len(result) == 4):
            count = len(result) if isinstance(result, tuple) else 1
            raise EnvFaultError(
                f"{type(self.env).__name__} returned {count} values from step, not obs, rew, done "
                "and extras: use TensorSimulator for an env that returns five values."
            )
        return result


def _grouped(observation: Any, extras: dict[str, Any]) -> Any:
    groups = extras.get("observations", {})
    if not isinstance(observation, Tensor) or not groups:
        return observation
    return {"policy": observation, **groups}
