"""Numbers that a loss or an env reports: floats and tensors are charted, anything else is refused by name."""

from functools import partial

import numpy as np
import pytest
import torch

from lightning_rl import PPO, SAC, ReplayBuffer, TensorSimulator
from lightning_rl.extensions.simulators.rsl_rl_env import RslRlVecEnv
from tests.helpers import scalars, train, uncompiled_traces
from tests.messages import refused
from tests.reports.test_simulator_infos import Simulator
from tests.variants import variant

NUMBERS = {"float": 0.25, "int": 2, "flag": True, "numpy": np.float32(0.5), "row": torch.ones(1)}


class Reporting(PPO):
    def training_step(self, rollout, batch_idx):
        self.level = 1.5 * (1 + self.iterations_done)
        self.statistics.set("iteration", self.iterations_done)
        super().training_step(rollout, batch_idx)

    def loss(self, minibatch):
        loss, reported = super().loss(minibatch)
        return loss, reported | NUMBERS | {"level": self.level}


@pytest.mark.parametrize("compile", [False, True])
def test_numbers_of_a_loss_are_charted(compile, tmp_path):
    with uncompiled_traces():
        train(
            tmp_path,
            model={"algorithm": Reporting, "compile": compile},
            data={"total_env_steps": 128},
        )
    curves = scalars(tmp_path)
    for name, value in NUMBERS.items():
        assert [x for _, x in curves[f"train/{name}"]] == [float(value)] * 2
    assert [x for _, x in curves["train/level"]] == [1.5, 3.0]
    assert [x for _, x in curves["train/iteration"]] == [0.0, 1.0]


class OffPolicy(SAC):
    def actor_loss(self, minibatch):
        loss, reported = super().actor_loss(minibatch)
        return loss, reported | {"share": 0.75}


def test_a_float_of_one_of_several_losses_is_charted(tmp_path):
    train(
        tmp_path,
        env="Pendulum-v1",
        model={"algorithm": OffPolicy, "compile": False},
        data={"total_env_steps": 128, "replay": partial(ReplayBuffer, capacity=500)},
    )
    assert [x for _, x in scalars(tmp_path)["train/share"]][-1] == 0.75


@pytest.mark.parametrize("value", ["high", torch.ones(3), None])
def test_what_is_no_number_is_refused_by_name(value, tmp_path):
    class Odd(PPO):
        def loss(self, minibatch):
            loss, reported = super().loss(minibatch)
            return loss, reported | {"odd": value}

    with refused(names=("odd", "one number", "mean")):
        train(tmp_path, model={"algorithm": Odd, "compile": False})


LOG = {"Episode_Reward/alive": torch.tensor(3.0), "Curriculum/level": 2, "height": torch.ones(3)}


class Logging(Simulator):
    """As in Isaac Lab: the log is of the last reset, and stays in the info."""

    def said(self):
        return super().said() | {"log": {**LOG, "step": float(self.steps.max())}}


class OfRslRl:
    log_key = "log"
    num_envs, num_actions, device, max_episode_length = 3, 1, "cpu", 4

    def __init__(self, num_envs):
        self.simulator = Logging(num_envs)

    def reset(self):
        return self.simulator.reset()

    def step(self, action):
        seen, reward, terminated, truncated, info = self.simulator.step(action)
        extras = {"time_outs": truncated, self.log_key: info["log"]}
        return seen, reward, terminated | truncated, extras


def report(simulator, info):
    return {
        "metrics": {"load": 0.5, "mass": torch.tensor(4.0)},
        "rewards": {"bonus": np.float64(2)},
    }


@pytest.mark.parametrize(
    "make",
    [
        Logging,
        lambda n: RslRlVecEnv(OfRslRl(n), 1.0),
        lambda n: RslRlVecEnv(variant(OfRslRl, log_key="episode")(n), 1.0),
    ],
    ids=["isaac_lab", "rsl_rl", "genesis"],
)
def test_the_log_of_an_env_is_charted_under_its_own_names(make, tmp_path):
    env = partial(TensorSimulator, make=make, missing_final="last_observation", report=report)
    settings = {"num_envs": 3, "buffer_size": 8, "total_env_steps": 24, "num_eval_episodes": 3}
    train(
        tmp_path, env=env, data=settings, model={"batch_size": 8, "n_epochs": 1, "compile": False}
    )
    charts = {name: rows[0][1] for name, rows in scalars(tmp_path).items()}
    assert charts["Episode_Reward/alive"] == 3.0
    assert charts["Curriculum/level"] == 2.0
    assert charts["Episode/height"] == 1.0
    assert 1.0 <= charts["Episode/step"] < 4.0, "the mean over the steps"
    assert (charts["metrics/load"], charts["metrics/mass"], charts["rewards/bonus"]) == (0.5, 4, 2)


@pytest.mark.parametrize("value", ["high", torch.ones(3, dtype=torch.complex64), None])
def test_an_entry_of_a_log_that_is_no_number_is_refused_by_name(value):
    env = TensorSimulator(3, partial(Simulator, log={"odd": value}))
    env.reset()
    with refused(names=("log", "odd", "number")):
        env.step(torch.zeros(3, 1))
