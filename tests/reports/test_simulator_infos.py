"""What a simulator of tensors says of a step is passed on, or refused; it is never dropped."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lightning_rl import PPO, ActorCritic, RLDataModule, TensorSimulator
from tests.helpers import fit_in
from tests.messages import refused
from tests.variants import variant

N = 3


class Simulator:
    """Counts; env 0 fails at step 2, env 1 succeeds at step 3, and time cuts the others after 4 steps."""

    single_action_space, device, max_episode_length = Box(-1, 1, (1,), np.float32), "cpu", 4
    style = "by_itself"

    def __init__(self, num_envs, **changes):
        self.num_envs, self.unwrapped, self.changes = num_envs, self, changes
        self.steps = torch.zeros(num_envs)
        self.late = torch.zeros(num_envs, dtype=torch.bool)

    def seen(self):
        return self.steps[:, None].clone()

    def reset(self, *, seed=None, options=None):
        self.steps[(options or {}).get("env_idx", slice(None))] = 0
        return self.seen(), {}

    def said(self):
        rows = torch.arange(self.num_envs)
        return {
            "success": (rows == 1) & (self.steps >= 3),
            "fail": (rows == 0) & (self.steps >= 2),
            "rewards": {"alive": self.steps.clone()},
            "metrics": {"height": 10 * self.steps.double()},
        }

    def step(self, action):
        late = self.late
        self.steps = torch.where(late, 0.0, self.steps + 1)
        info, rows = self.said(), torch.arange(self.num_envs)
        terminated, truncated = (rows == 1) & (self.steps >= 3), self.steps >= 4
        if self.style == "by_itself":
            terminated = terminated | info["fail"]
        final, done = self.seen(), terminated | truncated
        reward = torch.ones(self.num_envs)
        if self.style == "by_itself" and done.any():
            self.steps = torch.where(done, 0.0, self.steps)
            info = self.said() | {"final_info": info, "final_obs": final}
        if self.style == "a_step_late":
            self.late = done & ~late
        result = {"reward": reward, "terminated": terminated, "truncated": truncated, "info": info}
        for key, value in self.changes.items():
            tree = result if key in result else info
            tree[key] = value
        return self.seen(), result["reward"], result["terminated"], result["truncated"], info

    def close(self):
        pass


LATE = variant(Simulator, "Late", style="a_step_late")


MANUAL = variant(Simulator, "Manual", style="by_index")


def make(cls=Simulator, **changes):
    return TensorSimulator(N, partial(cls, **changes), resets=cls.style)


def steps_of(env, count):
    env.reset()
    return [env.step(torch.zeros(N, 1)) for _ in range(count)]


@pytest.mark.parametrize("cls", [Simulator, LATE, MANUAL])
def test_terms_metrics_success_and_failure_are_of_the_step_from_before_a_reset(cls):
    steps = steps_of(make(cls), 4)
    infos = [info for *_, info in steps]
    if cls is not LATE:
        heights = [[10, 10, 10], [20, 20, 20], [10, 30, 30], [20, 10, 40]]
    else:  # nobody ends env 0 for its failure, and a late reset says nothing
        heights = [[10, 10, 10], [20, 20, 20], [30, 30, 30], [40, torch.nan, 40]]
    for info, height in zip(infos, heights, strict=True):
        expected = torch.tensor(height, dtype=torch.float32)
        torch.testing.assert_close(info["metrics"]["height"], expected, equal_nan=True)
        torch.testing.assert_close(info["rewards"]["alive"], expected / 10, equal_nan=True)
    assert infos[1]["fail"].tolist() == [True, False, False]
    assert infos[2]["success"].tolist() == [False, True, False]
    if cls is not LATE:
        assert steps[1][2].tolist() == [True, False, False], "a failure is terminal"


def test_a_failed_episode_has_no_success_and_its_end_is_no_time_limit():
    everyone = torch.ones(N, dtype=torch.bool)
    (_, _, terminated, _, info), *_ = steps_of(
        make(
            LATE,
            success=everyone,
            fail=torch.tensor([True, True, False]),
            truncated=torch.tensor([True, False, False]),
        ),
        1,
    )
    assert info["success"].tolist() == [False, False, True]
    assert terminated.tolist() == [True, False, False]


def test_they_are_charted_and_evaluated(tmp_path):
    data = RLDataModule(
        partial(TensorSimulator, make=Simulator),
        num_envs=N,
        buffer_size=8,
        total_env_steps=N * 8,
        num_eval_episodes=N,
        iterations_per_epoch=1,
    )
    module = PPO(
        ActorCritic(data.observation_space, data.action_space, (8,)),
        batch_size=8,
        n_epochs=1,
        compile=False,
    )
    fit_in(tmp_path, module, data)
    assert module.evaluation["success_rate"] == pytest.approx(1 / N)
    assert module.evaluation["metrics"]["height"] == pytest.approx((20 + 30 + 40) / N)
    header, row = (tmp_path / "logs" / "metrics.csv").read_text().splitlines()[:2]
    charts = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(charts["rewards/alive"]) > 1
    assert float(charts["metrics/height"]) == pytest.approx(10 * float(charts["rewards/alive"]))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward": "1.0"}, ("reward", "'1.0'")),
        ({"reward": np.array(["1.0"] * N)}, ("reward", "<U3")),
        ({"reward": torch.ones(N, 1)}, ("reward", "torch.float32", "[3, 1]")),
        ({"terminated": "no"}, ("terminated", "'no'")),
        ({"terminated": torch.full((N,), 0.3)}, ("terminated", "torch.float32")),
        ({"truncated": ["no"] * N}, ("truncated", "'no'")),
        ({"success": "yes"}, ("success", "'yes'")),
        ({"rewards": {"alive": "1.0"}}, ("rewards", "alive", "'1.0'")),
        ({"metrics": {"height": torch.ones(N, 1)}}, ("height", "torch.float32", "[3, 1]")),
    ],
)
def test_texts_and_other_shapes_are_refused_by_name(changes, told):
    with refused(names=("Simulator", *told, "[3]")):
        steps_of(make(**changes), 1)
