"""Adapt a `VecEnv` of rsl_rl to the interface that `TensorSimulator` steps."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.envs import check_vector
from lightning_rl.extend.errors import EnvFaultError, closest

PRIVILEGED = (
    "In rsl_rl 1, privileged observations are a value of their own (obs, privileged_obs, rew, "
    "done, extras): return them in extras['observations']['critic'], with obs, rew, done, extras "
    "from step and obs, extras from reset."
)
"""How an env for rsl_rl 1 is changed."""


class RslRlVecEnv:
    """Adapter for `TensorSimulator` of envs that return `obs, rew, done, extras["time_outs"]`.

    `time_outs` [N] marks finished episodes that were truncated (default: none). These envs reset
    within the step without a final observation: set `missing_final: last_observation`, as rsl_rl
    does. They take no seed: seed the simulator at its construction. Observations are a tensor, a
    dict of groups or a TensorDict; with further groups in `extras["observations"]`, such as
    `critic`, they become a dict with the key `policy`. Other `extras` are the info;
    `episode` is charted as the `log`, if there is none.

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
        observation = None if returned is None else self._read(returned)[0]
        # Some simulators return nothing from reset, or no groups.
        if observation is None or isinstance(observation, Tensor):
            current = self.current_observation()
            observation = observation if current is None else current
        return observation, {}

    def current_observation(self) -> Any:
        """Return the observation of the current state; None if the env cannot."""
        if not hasattr(self.env, "get_observations"):
            return None
        return self._read(self.env.get_observations())[0]

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step by actions [N, A].

        Raises:
            EnvFaultError: the env returned other values than obs, rew, done and extras.
        """
        name, result = type(self.env).__name__, self.env.step(action)
        if not (isinstance(result, tuple) and len(result) == 4):
            count = len(result) if isinstance(result, tuple) else 1
            raise EnvFaultError(
                f"{name} returned {count} values from step, not obs, rew, done and extras. "
                f"{PRIVILEGED} An env that returns terminated and truncated needs no RslRlVecEnv, "
                "only TensorSimulator."
            )
        seen, reward, done, extras = result
        observation, extras = self._read((seen, extras))
        done = check_vector(name, "done", done, self.num_envs).bool()
        time_outs = extras.get("time_outs", torch.zeros_like(done))
        field = "extras['time_outs']"
        timed_out = done & check_vector(name, field, time_outs, self.num_envs).bool()
        # rsl_rl reports truncations in the extras, not as a value of their own.
        info = {key: value for key, value in extras.items() if key != "time_outs"}
        if "episode" in extras:  # as legged_gym and Genesis name the log
            info.setdefault("log", extras["episode"])
        return observation, reward, done & ~timed_out, timed_out, info

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

    def _read(self, returned: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return an observation with its groups, and the extras, of `obs` or of `obs, extras`."""
        observation, extras = returned if isinstance(returned, tuple) else (returned, None)
        extras = {} if extras is None else extras
        if not isinstance(extras, Mapping):
            raise EnvFaultError(
                f"{type(self.env).__name__} returned {type(extras).__name__} as extras, not a "
                f"dict. {PRIVILEGED}"
            )
        if not isinstance(observation, Tensor):
            return observation, extras
        groups = extras.get("observations", {}).items()
        groups = {name: group for name, group in groups if group is not None}
        return {"policy": observation, **groups} if groups else observation, extras
