"""Acting in NumPy is acting with the policy, and the short way into an env is the env."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.nn.utils import prune

from lightning_rl import ActorCritic
from lightning_rl.envs.gymnasium.inline import InlineVectorEnv
from lightning_rl.envs.gymnasium.replay import ReplayableEpisode
from lightning_rl.policies.acting import NumpyActor
from lightning_rl.policies.actors import StepwiseActor
from lightning_rl.rollout.allocation import allocate_rollout

N, T = 6, 40
OBSERVATIONS = Box(-np.inf, np.inf, (5,))
BOX = Box(np.array([-2, 0, -1], np.float32), np.array([1, 3, 1], np.float32))
CASES = [
    (Discrete(4), {}),
    (MultiDiscrete([3, 3]), {"activation": "relu"}),
    (BOX, {"activation": "elu", "normalize_observation": True}),
    (BOX, {"rescale_action": False}),
    (Box(-3, 5, (2, 2), np.float64), {}),
    (Box(-1, 1, (2, 2)), {"log_std_init": -1.0}),
    (BOX, {"squash": True, "normalize_observation": True}),
    *((BOX, {"log_std": "state_dependent", **more}) for more in ({}, {"squash": True})),
]


def make(action_space, **kwargs):
    torch.manual_seed(5)
    policy = ActorCritic(OBSERVATIONS, action_space, (16, 8), **kwargs)
    with torch.no_grad():
        policy.actor[-1].weight.mul_(100)  # make it care about what it sees
    rollout = allocate_rollout(OBSERVATIONS, action_space, N, T, extra_fields=policy.extra_fields)
    rollout["observation"].copy_(4 * torch.randn(rollout["observation"].shape))
    if policy.normalizer is not None:
        policy.normalizer.update(3 + 2 * torch.randn(50, 5))
    return policy, rollout


def act(actor, noise=True):
    actor.begin(torch.Generator().manual_seed(11))
    if not noise:
        for one in actor._noise:
            one[:] = 0
    for t in range(T):
        actor.act(t)
    actor.finish(0, T)


def no_change(*args):
    """Be a hook."""


HOOKS = {
    "of a pruned layer": lambda policy: prune.identity(policy.actor[0], "weight"),
    "of a layer": lambda policy: policy.actor[2].register_forward_hook(no_change),
    "of the actor": lambda policy: policy.actor.register_forward_hook(no_change),
    "of the policy": lambda policy: policy.register_forward_pre_hook(no_change),
}


@pytest.mark.parametrize("name", HOOKS)
def test_torch_acts_where_hooks_are_to_be_called(name):
    policy, rollout = make(Discrete(4))
    HOOKS[name](policy)
    assert isinstance(policy.rollout_actor(rollout), StepwiseActor)


@pytest.mark.parametrize(("space", "kwargs"), CASES)
def test_without_noise_numpy_takes_the_mode_of_the_policy(space, kwargs):
    policy, rollout = make(space, **kwargs)
    actor = policy.rollout_actor(rollout)
    assert isinstance(actor, NumpyActor)
    act(actor, noise=False)
    transitions = rollout[:, :-1].reshape(-1)
    expected = policy.get_action(transitions.select("observation"), deterministic=True)
    torch.testing.assert_close(transitions["action"], expected["action"], rtol=1e-5, atol=1e-5)
    assert transitions["action"].float().std() > 0.1


@pytest.mark.parametrize(("space", "kwargs"), CASES)
def test_the_log_probs_are_those_of_the_actions_taken(space, kwargs):
    policy, rollout = make(space, **kwargs)
    act(policy.rollout_actor(rollout))
    transitions = rollout[:, :-1].reshape(-1)
    with torch.no_grad():
        expected = policy.evaluate_actions(transitions)["sample_log_prob"]
    torch.testing.assert_close(transitions["sample_log_prob"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("index", "layer"),
    [
        (1, nn.Sequential(nn.Tanh(), nn.LayerNorm(16))),
        (1, nn.ELU(alpha=0.5)),
        (2, nn.Linear(16, 8, bias=False)),
    ],
)
def test_a_layer_of_the_users_acts_in_torch(index, layer):
    policy, rollout = make(Discrete(4))
    policy.actor[index] = layer
    assert isinstance(policy.rollout_actor(rollout), StepwiseActor)


def make_one(id, wrapper=None, **kwargs):
    env = gymnasium.make(id, disable_env_checker=True, **kwargs)
    return ReplayableEpisode(env if wrapper is None else wrapper(env))


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"max_episode_steps": 15}),
        ("Pendulum-v1", {"max_episode_steps": 30}),
        ("Pendulum-v1", {"wrapper": partial(gymnasium.wrappers.TimeLimit, max_episode_steps=7)}),
        ("CartPole-v1", {"wrapper": gymnasium.wrappers.RecordEpisodeStatistics}),
    ],
)
def test_the_short_way_into_an_env_gives_what_gymnasiums_gives(id, kwargs):
    factories = [partial(make_one, id, **kwargs)] * 3
    ours = InlineVectorEnv(factories)
    theirs = gymnasium.vector.SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP)
    assert np.array_equal(ours.reset(seed=4)[0], theirs.reset(seed=4)[0])
    ours.action_space.seed(0)
    ends = 0
    for _ in range(300):
        action = ours.action_space.sample()
        mine, reference = ours.step(action), theirs.step(action)
        for a, b in zip(mine[:4], reference[:4], strict=True):
            assert np.array_equal(a, b)
        assert ("final_obs" in mine[4]) == ("final_obs" in reference[4])
        for a, b in zip(
            mine[4].get("final_obs", []), reference[4].get("final_obs", []), strict=True
        ):
            assert np.array_equal(a, b)
            ends += a is not None
    assert ends > 10
