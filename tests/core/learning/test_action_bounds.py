"""Actions of a bounded Box are learnt in [-1, 1] and scaled to the bounds, wherever they go."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict

from lightning_rl import GRPO, ActorCritic
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.policies.distributions.gaussians import (
    DiagonalGaussian,
    distribution_for,
)
from tests.core.learning.test_probes import learn
from tests.messages import refused
from tests.probes import ActionProbe

LOW, HIGH = (0.0, -2.0), (512.0, -1.0)


class BoundedProbe(ActionProbe):
    """`ActionProbe` for each of some entries, whose bounds stand for -1 and 1; clips, as envs do."""

    def __init__(self, num_envs):
        super().__init__(num_envs, continuous=True)
        self.single_action_space = Box(np.float32(LOW), np.float32(HIGH))

    def transition(self, state, action):
        low, high = torch.tensor(LOW), torch.tensor(HIGH)
        share = (action.clamp(low, high) - low) / (high - low)
        results = [super(BoundedProbe, self).transition(state, unit) for unit in (2 * share - 1).T]
        reward = torch.stack([result[1] for result in results]).mean(0)
        return results[0][0], reward, results[0][2], {}


def test_grpo_learns_them(tmp_path):
    model = {"algorithm": GRPO, "group_size": 8, "reset_every_rollout": True, "learning_rate": 1e-2}
    data = {"buffer_size": 2, "num_envs": 256}
    module = learn(tmp_path, BoundedProbe, 25, {"log_std_init": -1.0}, data, **model)
    episodes = run_episodes(module.policy, BoundedProbe(64), range(64))
    assert np.mean([episode["return"] for episode in episodes]) > 0.95


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        ([0, -1], [512, np.inf], ("entry [0]", "[0, 512]")),
        ([-1, 0], [1, np.inf], ("entry [1]", "[0, inf]")),
        ([-3, 2], [3, 2], ("entry [0]", "[-3, 3]")),
    ],
)
def test_a_box_bounded_in_part_keeps_it_with_a_warning(low, high, words):
    space = Box(np.float32(low), np.float32(high))
    make = partial(distribution_for, squash=False, log_std_init=0.0, log_std_bounds=(-5.0, 2.0))
    with refused(UserWarning, names=(*words, "rescale_action: false")):
        distribution = make(space)
    assert type(distribution) is DiagonalGaussian
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(space, rescale=False)


def test_demonstrated_actions_are_taken_in_units_of_the_bounds():
    policy = ActorCritic(Box(-1.0, 1.0, (2,)), Box(np.float32(LOW), np.float32(HIGH)))
    observation = torch.randn(50, 2)
    action = torch.rand(50, 2) * torch.tensor([512.0, 1.0]) + torch.tensor(LOW)
    td = TensorDict(
        {"observation": observation, "action": action, **policy.fields_of(action)}, [50]
    )
    result = policy.evaluate_actions(td)
    mean = policy.get_action(td.select("observation"), deterministic=True)["action"].double()
    deviation = torch.tensor([256.0, 0.5]).double()
    expected = torch.distributions.Normal(mean, deviation)
    torch.testing.assert_close(
        result["sample_log_prob"].double(), expected.log_prob(action.double()).sum(-1)
    )
    torch.testing.assert_close(result["entropy"].double(), expected.entropy().sum(-1))
    plain = ActorCritic(Box(-1.0, 1.0, (2,)), Box(-1.0, 1.0, (2,)))
    assert plain.fields_of(action) == {}
    squashed = ActorCritic(Box(-1.0, 1.0, (2,)), Box(-1.0, 1.0, (2,)), squash=True)
    with refused(ValueError, names=("ActorCritic", "fields_of(action)")):
        squashed.fields_of(action)
