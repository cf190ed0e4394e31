"""Learners find the known answers of the probe envs."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import PPO, SAC, NatureCNN, ReplayBuffer
from tests.algorithms import limit_is_failure
from tests.helpers import train
from tests.probes import ActionProbe, TimeLimitProbe, ValueProbe
from tests.variants import before

SETTINGS = {"learning_rate": 3e-3, "n_epochs": 4, "batch_size": 128, "lr_schedule": "constant"}
ALONE = {"limit_val_batches": 0, "enable_checkpointing": False, "logger": False}


def learn(tmp_path, env, iterations, policy=None, data=None, **model):
    steps = {"num_envs": 16, "buffer_size": 32, "total_env_steps": 16 * 32 * iterations}
    settings = {"data": steps | (data or {}), "model": SETTINGS | model, "policy": policy}
    return train(tmp_path, env=env, seed=3, trainer=ALONE, **settings)[0]


def observations(*values):
    return TensorDict({"observation": torch.tensor(values)[:, None]}, [len(values)])


def test_the_critic_learns_the_value_of_an_observation(tmp_path):
    module = learn(tmp_path, ValueProbe, 40, gamma=0.9)
    value = module.policy.get_value(observations(1.0, -1.0))["value"]
    assert value.tolist() == pytest.approx([1.0, -1.0], abs=0.1)


def test_the_actor_learns_which_action_is_asked_for(tmp_path):
    module = learn(tmp_path, ActionProbe, 40)
    td = module.policy.get_action(observations(1.0, -1.0), deterministic=True)
    assert td["action"].tolist() == [1, 0]
    probability = module.policy.evaluate_actions(td)["sample_log_prob"].exp()
    assert probability.min() > 0.95


def test_the_actor_learns_a_continuous_action(tmp_path):
    module = learn(
        tmp_path, lambda n: ActionProbe(n, continuous=True), 40, policy={"log_std_init": -1.0}
    )
    action = module.policy.get_action(observations(1.0, -1.0), deterministic=True)["action"]
    assert action.flatten().tolist() == pytest.approx([0.5, -0.5], abs=0.1)


class PictureProbe(ActionProbe):
    """The same, shown as a bright picture with a darker stripe on its left or its right."""

    def __init__(self, num_envs, continuous=False):
        super().__init__(num_envs, continuous)
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 1), np.uint8)

    def observe(self, state):
        picture = torch.full((len(state), 8, 8, 1), 240, dtype=torch.uint8)
        stripe = torch.where(state["sign"] > 0, 6, 1)[:, :, None, None]
        return picture.masked_fill(torch.arange(8)[None, None, :, None] == stripe, 200)


EYE = partial(NatureCNN, size=16, channels=(8, 8), kernels=(3, 3), strides=(2, 1), normalize=True)


def stripes():
    sign = torch.tensor([[1.0], [-1.0]])
    seen = PictureProbe(2).observe(TensorDict({"sign": sign}, [2]))
    return TensorDict({"observation": seen}, [2])


def test_the_actor_learns_from_pictures_which_action_is_asked_for(tmp_path):
    module = learn(tmp_path, PictureProbe, 20, policy={"encoder": EYE})
    td = module.policy.get_action(stripes(), deterministic=True)
    assert td["action"].tolist() == [1, 0]
    assert module.policy.evaluate_actions(td)["sample_log_prob"].exp().min() > 0.9


@pytest.mark.parametrize("share", [True, False])
def test_sac_learns_from_pictures_which_action_is_asked_for(share, tmp_path):
    module, *_ = train(
        tmp_path,
        env=lambda n: PictureProbe(n, continuous=True),
        data={"num_envs": 8, "buffer_size": 4, "total_env_steps": 8 * 4 * 30, "replay": partial(ReplayBuffer, capacity=2_000)},
        policy={"encoder": EYE, "share_encoder": share},
        model={"algorithm": SAC, "learning_rate": 3e-3, "batch_size": 64, "updates_per_env_step": 0.5, "init_alpha": 0.01,
               "random_env_steps": 64, "random_shift": 1, "lr_schedule": "constant"},
        trainer=ALONE,
    )  # fmt: skip
    right, left = module.policy.get_action(stripes(), deterministic=True)["action"].flatten()
    assert right > 0.2
    assert left < -0.2


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [(PPO, 10.0), (before(PPO, "LimitIsFailure", add_advantages=limit_is_failure), 2.7)],
)
def test_the_value_under_a_time_limit_is_that_of_the_endless_task(algorithm, expected, tmp_path):
    """V = 1 / (1 - gamma) = 10; with the mistake it is the mean return of 1 to 5 remaining steps."""
    gamma = 0.9
    module = learn(tmp_path, lambda n: TimeLimitProbe(n, 5), 50, gamma=gamma, algorithm=algorithm)
    if algorithm is not PPO:
        expected = sum((1 - gamma**k) / (1 - gamma) for k in range(1, 6)) / 5
    value = float(module.policy.get_value(observations(0.0))["value"].detach())
    assert value == pytest.approx(expected, rel=0.06)
