"""Step several HalfCheetahs, Hoppers or Walkers of Gymnasium (v5) together.

A quarter of their step is NumPy's overhead for a few numbers. Here MuJoCo steps one env after the
other, and NumPy computes the rewards and observations of all of them, with the same bits.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.envs.mujoco.walker2d_v5 import Walker2dEnv

KINDS = (HalfCheetahEnv, HopperEnv, Walker2dEnv)
"""Classes of the envs that are stepped together."""

SETTINGS = (
    "frame_skip",
    "_forward_reward_weight",
    "_ctrl_cost_weight",
    "_exclude_current_positions_from_observation",
    "_healthy_reward",
    "_terminate_when_unhealthy",
    "_healthy_state_range",
    "_healthy_z_range",
    "_healthy_angle_range",
)
"""Attributes of an env that its reward, observation and end depend on; some kinds lack some."""

Step = Callable[[np.ndarray], Iterable[tuple[Any, ...]]]
"""Steps N envs by actions [N, A]; returns what the `step` of each env would."""


def step_together(envs: Sequence[gymnasium.Env[Any, Any]]) -> Step | None:
    """Return a function that steps envs faster than one after the other, if there is one.

    There is one for envs without wrappers of one kind, by exact type, and with equal settings. The
    infos that it returns are empty. Settings that change afterwards have no effect.
    """
    kinds = {type(env) for env in envs}
    if len(envs) == 1 or len(kinds) > 1 or kinds.isdisjoint(KINDS):
        return None
    robots: Sequence[Any] = envs
    settings = [{name: vars(env).get(name) for name in SETTINGS} | {"dt": env.dt} for env in robots]
    has_window = any(env.render_mode == "human" for env in envs)
    if has_window or any(other != settings[0] for other in settings):
        return None
    return _PlanarRobots(envs, settings[0]).step


class _PlanarRobots:
    """Robots whose first two positions are x and z, and whose first angle is the torso's."""

    def __init__(self, envs: Sequence[Any], settings: dict[str, Any]) -> None:
        self._kind, self._settings = type(envs[0]), settings
        self._qpos = np.zeros((len(envs), envs[0].model.nq))
        self._qvel = np.zeros((len(envs), envs[0].model.nv))
        # The views of each env's arrays are made here, because making them takes a microsecond.
        simulations = [(env.model, env.data, env.data.ctrl) for env in envs]
        states = [(env.data.qpos, env.data.qvel) for env in envs]
        self._rows = list(zip(simulations, states, self._qpos, self._qvel, strict=True))

    def step(self, actions: np.ndarray) -> Iterable[tuple[Any, ...]]:
        settings, qpos, velocity = self._settings, self._qpos, self._qvel
        x = np.array([state[0][0] for _, state, _, _ in self._rows])
        for ((model, data, ctrl), state, *rows), action in zip(self._rows, actions, strict=True):
            ctrl[:] = action
            mujoco.mj_step(model, data, settings["frame_skip"])
            mujoco.mj_rnePostConstraint(model, data)
            rows[0][:], rows[1][:] = state
        reward = settings["_forward_reward_weight"] * ((qpos[:, 0] - x) / settings["dt"])
        terminated = np.zeros(len(actions), np.bool_)
        if self._kind is not HalfCheetahEnv:
            healthy, velocity = self._are_healthy(), np.clip(velocity, -10, 10)
            reward = reward + healthy * settings["_healthy_reward"]
            terminated = ~healthy & settings["_terminate_when_unhealthy"]
        reward = reward - settings["_ctrl_cost_weight"] * np.sum(np.square(actions), axis=1)
        skipped = int(settings["_exclude_current_positions_from_observation"])
        observations = np.concatenate((qpos[:, skipped:], velocity), axis=1)
        infos: list[dict[str, Any]] = [{} for _ in actions]
        truncated = [False] * len(actions)
        return zip(
            observations, reward.tolist(), terminated.tolist(), truncated, infos, strict=True
        )

    def _are_healthy(self) -> np.ndarray:
        """Return whether the torso of each robot is upright, and a Hopper's state in range, [N]."""
        z, angle = self._qpos[:, 1:3].T
        low_z, high_z = self._settings["_healthy_z_range"]
        low_angle, high_angle = self._settings["_healthy_angle_range"]
        healthy: np.ndarray = (
            (low_z < z) & (z < high_z) & (low_angle < angle) & (angle < high_angle)
        )
        if self._kind is HopperEnv:
            low, high = self._settings["_healthy_state_range"]
            state = np.concatenate((self._qpos[:, 2:], self._qvel), axis=1)
            healthy &= ((low < state) & (state < high)).all(axis=1)
        return healthy
