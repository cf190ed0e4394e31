"""MuJoCo's profiler is off, and nothing else about MuJoCo has changed."""

import gymnasium
import numpy as np
import pytest
import torch

from lightning_rl import GymnasiumEnv
from lightning_rl.envs.gymnasium.mujoco_profiler import stop_mujoco_profiler

mujoco = pytest.importorskip("mujoco")


@pytest.fixture(autouse=True)
def _clock_of_the_bindings():
    """MuJoCo's callbacks are the process's."""
    mujoco.set_mjcb_time(None)
    yield
    mujoco.set_mjcb_time(None)
    stop_mujoco_profiler()


def rollout(env, steps=20):
    rows = [env.reset(seed=3)[0]]
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, 6)).astype(np.float32)
    for action in actions:
        observation, reward, *_ = env.step(action)
        rows.append(np.append(observation, reward))
    return np.concatenate(rows), env.unwrapped.data.timer[0].duration


def test_physics_is_the_same_bit_for_bit_without_it():
    env = gymnasium.make("HalfCheetah-v5")
    with_profiler, seconds = rollout(env)
    assert seconds > 0
    assert stop_mujoco_profiler()
    without, after = rollout(env)
    assert after == 0 or after == seconds, "the timer stands still"
    assert np.array_equal(with_profiler, without)


class Timed(gymnasium.Wrapper):
    @property
    def seconds_timed(self):
        return self.unwrapped.data.timer[0].duration


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_envs_are_made_without_it(vectorization):
    env = GymnasiumEnv(2, id="HalfCheetah-v5", vectorization=vectorization)
    try:
        env.wrap_each(Timed)
        env.reset(seed=1)
        for _ in range(3):
            env.step(torch.zeros(2, 6))
        assert list(env._env.get_attr("seconds_timed")) == [0, 0]
    finally:
        env.close()


def test_a_clock_of_the_users_goes_on():
    calls = []
    mujoco.set_mjcb_time(lambda: calls.append(0) or 1.0)
    assert not stop_mujoco_profiler()
    rollout(gymnasium.make("HalfCheetah-v5"), steps=1)
    assert calls
