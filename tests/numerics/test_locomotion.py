"""Gymnasium's planar robots, stepped together as Gymnasium steps each of them."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.vector import AutoresetMode

from lightning_rl import GymnasiumEnv
from lightning_rl.envs.gymnasium.inline import InlineVectorEnv
from lightning_rl.extensions.mujoco.locomotion import step_together
from tests.variants import variant


def make_one(id, **kwargs):
    return gymnasium.make(id, disable_env_checker=True, **kwargs)


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [
        ("HalfCheetah-v5", {"max_episode_steps": 40}),
        ("HalfCheetah-v5", {"max_episode_steps": 40, "forward_reward_weight": 0.7}),
        ("Hopper-v5", {}),
        ("Hopper-v5", {"healthy_state_range": (-3.0, 3.0), "healthy_reward": 0.3}),
        ("Hopper-v5", {"terminate_when_unhealthy": False, "max_episode_steps": 60}),
        ("Walker2d-v5", {"ctrl_cost_weight": 0.2, "frame_skip": 2}),
        ("Walker2d-v5", {"exclude_current_positions_from_observation": False}),
    ],
)
def test_robots_stepped_together_have_the_bits_of_gymnasiums(id, kwargs):
    factories = [partial(make_one, id, **kwargs)] * 3
    ours = InlineVectorEnv(factories)
    theirs = gymnasium.vector.SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP)
    assert ours._step_together is not None
    assert np.array_equal(ours.reset(seed=4)[0], theirs.reset(seed=4)[0])
    ours.action_space.seed(0)
    ends = 0
    for _ in range(200):
        action = ours.action_space.sample()
        mine, reference = ours.step(action), theirs.step(action)
        for a, b in zip(mine[:4], reference[:4], strict=True):
            assert np.array_equal(a, b)
        finals = [infos.get("final_obs", []) for infos in (mine[4], reference[4])]
        for a, b in zip(*finals, strict=True):
            assert np.array_equal(a, b)
            ends += a is not None
    assert ends > 5
    for env, reference in zip(ours.envs, theirs.envs, strict=True):  # what a film shows
        ours_data, their_data = env.unwrapped.data, reference.unwrapped.data
        for name in ("qpos", "qvel", "ctrl", "cfrc_ext", "qacc_warmstart"):
            assert np.array_equal(getattr(ours_data, name), getattr(their_data, name))


def test_robots_stepped_together_are_restored_bit_for_bit(recwarn):
    """A replay steps each env alone: a difference would be warned of."""
    env, restored = (GymnasiumEnv(3, id="Hopper-v5") for _ in range(2))
    env.reset(seed=0)
    for action in torch.rand(41, 3, 3) * 2 - 1:
        env.step(action)
    restored.reset(seed=9)
    restored.load_state_dict(env.state_dict())
    for mine, theirs in zip(env.step(action)[:2], restored.step(action)[:2], strict=True):
        assert torch.equal(mine, theirs)
    assert not [warning for warning in recwarn if "Replaying" in str(warning.message)]


@pytest.mark.parametrize(
    "envs",
    [
        [variant(HopperEnv)()] * 2,  # a subclass may have another reward
        [make_one("Hopper-v5").unwrapped],
        [make_one("Ant-v5").unwrapped] * 2,
        [make_one("Hopper-v5"), make_one("Hopper-v5")],  # with wrappers
        [make_one("Hopper-v5", healthy_reward=reward).unwrapped for reward in (1.0, 2.0)],
        [make_one(f"{name}-v5").unwrapped for name in ("Hopper", "Walker2d")],
    ],
)
def test_other_envs_step_one_after_the_other(envs):
    assert step_together(envs) is None
