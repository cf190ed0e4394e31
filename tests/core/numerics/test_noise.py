"""Noise that is correlated from one action to the next has the density of a step by itself, and begins with an episode."""

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from lightning_rl import (
    ActorCritic,
    DeterministicActorCritic,
    SquashedActorCritic,
)
from tests.messages import refused

STATE, ARM = Box(-1.0, 1.0, (3,)), Box(-2.0, 2.0, (2,))
CORRELATION = 0.8

FAMILIES = {
    "rescaled": ({}, ActorCritic, "unit_action"),
    "squashed": ({"squash": True}, ActorCritic, "unsquashed_action"),
    "SAC": ({}, SquashedActorCritic, "unsquashed_action"),
    "TD3": ({"exploration_std": 0.1}, DeterministicActorCritic, None),
}


def make(name, correlation=CORRELATION, space=ARM):
    settings, cls, key = FAMILIES[name]
    return cls(STATE, space, (8,), noise_correlation=correlation, **settings), key


def noise_of(policy, key, td):
    """The standard normal numbers behind the actions of a TensorDict."""
    if key is None:
        best = policy.best_unit(td)
        return (policy.unit(td["action"]) - best) / policy.distribution.exploration_std
    output = policy.action_output(td, policy.actor_features(td))
    if isinstance(policy, SquashedActorCritic):
        mean, log_std = policy.distribution.split(output)
        return (td[key] - mean) / log_std.exp()
    return (td[key] - output) / policy.distribution.clamped_log_std().exp()


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_each_step_finds_it_standard_normal_and_the_next_one_remembers(name):
    policy, key = make(name)
    generator = torch.Generator().manual_seed(0)
    state = policy.first_state(20_000)["state"]
    noise = []
    for _ in range(3):
        td = TensorDict({"observation": torch.zeros(20_000, 3), "state": state}, [20_000])
        td = policy(td, generator=generator)
        noise.append(noise_of(policy, key, td))
        state = td["next_state"]
    for one in noise:  # the first one of an episode too
        assert one.mean(0).tolist() == pytest.approx([0, 0], abs=0.03)
        assert one.var(0).tolist() == pytest.approx([1, 1], abs=0.04)
    for lag in (1, 2):
        found = (noise[0] * noise[lag]).mean(0)
        assert found.tolist() == pytest.approx([CORRELATION**lag] * 2, abs=0.03)
    assert (noise[0][:, 0] * noise[1][:, 1]).mean().item() == pytest.approx(0, abs=0.03)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_the_log_prob_is_that_of_the_observation_alone(name):
    policy, _ = make(name)
    plain, _ = make(name, 0.0)
    plain.load_state_dict(policy.state_dict())
    observation = torch.randn(50, 3)
    state = torch.randn(50, 3)
    state[:, 2] = 1
    drawn = policy(TensorDict({"observation": observation, "state": state}, [50]))
    expected = plain.evaluate_actions(drawn)["sample_log_prob"]
    torch.testing.assert_close(drawn["sample_log_prob"], expected, rtol=1e-4, atol=1e-4)
    assert "state" not in plain.extra_fields


@pytest.mark.parametrize(
    ("space", "correlation", "message"),
    [
        (ARM, 1.0, ("noise_correlation", "at least 0", "1.0")),
        (ARM, -0.1, ("noise_correlation", "at least 0", "-0.1")),
        (Discrete(3), 0.5, ("noise_correlation=0.5", "Discrete(3)")),
    ],
)
def test_what_it_cannot_be_is_refused(space, correlation, message):
    with refused(names=message):
        ActorCritic(STATE, space, noise_correlation=correlation)


def test_without_its_state_it_says_what_is_missing():
    policy, _ = make("SAC")
    with refused(ValueError, names=("`state`", "policy.first_state(num_envs)")):
        policy(TensorDict({"observation": torch.zeros(4, 3)}, [4]))
