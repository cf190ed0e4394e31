"""What envs say of a step beside what they return is read at every step, from every kind of env."""

import sys
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl import ActionChunk, ActorCritic, EnvPoolEnv, GymnasiumEnv, SyncCollector
from lightning_rl.collectors.evaluation import run_episodes, summarize
from lightning_rl.collectors.statistics import EnvReports
from tests.envs import UNIT, ScriptedEnv, ScriptedVector
from tests.helpers import make_collector

KINDS = ("sync", "async", "vector_entry_point")


LENGTH = 6


def told(i, age):
    """What env i says of its step `age`: env 0 all of it, env 1 only at odd steps, env 2 nothing."""
    if i == 2 or (i == 1 and age % 2 == 0):
        return {}
    # The integer comes first: an array of its type would cut the others' numbers down.
    height = age if i == 0 else age + 0.5
    return {
        "rewards": {"reach": 0.1 * age, "step": -1.0},
        "metrics": {"height": height, "name": "x", "path": np.ones(2)},
        "is_success": np.bool_(age == LENGTH),
    }


def talker():
    """Say what `told` has for the env whose seed is i; end after 6 steps."""

    def begin(env):
        env.i = env.i if env.seed is None else env.seed
        # What a reset says is not of a step.
        return {"metrics": {"height": 1000.0}, "success": True}

    return ScriptedEnv(
        Box(-9, 9, (2,)),
        begin=begin,
        observe=lambda env: np.array([env.i, env.age], np.float32),
        reward=1.0,
        terminated=lambda env: env.age == LENGTH,
        info=lambda env: told(env.i, env.age),
    )


def batched(num_envs):
    """Three of them at once, by Gymnasium's own rules; beside an end stands what the reset said."""

    def change(env, results):
        if results[2].any():
            results[-1].update(metrics={"height": np.full(3, 1000.0)}, success=np.ones(3, bool))
        return results

    env = ScriptedVector(num_envs, talker, change=change)
    for i, single in enumerate(env.envs):
        single.i = i
    return env


gymnasium.register("tests/Talker-v0", talker, vector_entry_point=batched)


def number(i, age, kind, name):
    return told(i, age).get(kind, {}).get(name, np.nan)


@pytest.mark.parametrize("kind", ["sync", "async", "vector_entry_point"])
def test_a_gymnasium_env_is_heard_at_every_step(kind):
    env = GymnasiumEnv(3, "tests/Talker-v0", vectorization=kind)
    env.reset(seed=0)
    for t in range(2 * LENGTH + 1):
        age = t % LENGTH + 1
        *_, info = env.step(torch.zeros(3, dtype=torch.int64))
        assert set(info) == {"rewards", "metrics", "success"} | (
            {"final_obs"} if age == LENGTH else set()
        )
        for key, names in {"rewards": {"reach", "step"}, "metrics": {"height"}}.items():
            assert set(info[key]) == names
            for name, values in info[key].items():
                expected = [number(i, age, key, name) for i in range(3)]
                np.testing.assert_allclose(values.numpy(), expected, err_msg=f"{key}/{name}")
        assert info["success"].tolist() == [age == LENGTH, False, False]
        assert info["success"].dtype == torch.bool
    env.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_last_step_is_heard_of_an_env_that_clears_its_info_at_a_reset(kind):
    """A worker sent what the reset had left of it."""
    info = {"metrics": {"height": 0.0}, "executed_action": np.zeros(1), "intervened": True}

    def write(env):
        info["metrics"]["height"] = info["executed_action"][:] = 0.5 * env.age

    told = {"act": write, "begin": write, "info": info, "length": 2}
    make = partial(ScriptedEnv, action_space=UNIT, metadata={"reports_interventions": True}, **told)
    gymnasium.register("Reused-v0", make)
    env = GymnasiumEnv(1, "Reused-v0", vectorization=kind)
    env.reset(seed=0)
    for age in (1, 2, 1):
        *_, heard = env.step(torch.zeros(1, 1))
        assert heard["metrics"]["height"].item() == heard["executed_action"].item() == 0.5 * age
    env.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_charts_are_averages_over_the_envs_and_steps_that_say_something(kind):
    env = GymnasiumEnv(3, "tests/Talker-v0", vectorization=kind)
    policy = ActorCritic(env.single_observation_space, env.single_action_space, (8,))
    collector = make_collector(SyncCollector, env, policy, 2 * LENGTH, seed=0)
    rollout = collector.collect()
    by_hand = {
        f"{key}/{name}": np.nanmean(
            [number(i, age + 1, key, name) for i in range(3) for age in range(LENGTH)]
        )
        for key, name in (("rewards", "reach"), ("rewards", "step"), ("metrics", "height"))
    }
    assert collector.reports == pytest.approx(by_hand)
    assert rollout["success"][:, :-1].sum(1).tolist() == [2, 0, 0]
    assert collector.metrics()["charts/success_rate_avg_100"] == pytest.approx(1 / 3)
    episodes = run_episodes(policy, env, [0, 1, 2])
    assert [e["success"] for e in episodes] == [True, False, False]
    # Of the last step, which is even: env 1 says nothing then.
    assert [e["metrics"] for e in episodes] == [{"height": 6.0}, {}, {}]
    assert summarize(episodes)["metrics"] == {"height": 6.0}
    env.close()


def test_a_chunk_sums_the_reward_terms_of_its_actions():
    env = ActionChunk(3, partial(GymnasiumEnv, id="tests/Talker-v0"), 4)
    env.reset(seed=0)
    for ages in ((1, 2, 3, 4), (5, 6)):
        *_, info = env.step(torch.zeros(3, 4, dtype=torch.int64))
        for name in ("reach", "step"):
            sums = [np.nansum([number(i, a, "rewards", name) for a in ages]) for i in (0, 1)]
            np.testing.assert_allclose(info["rewards"][name][:2], sums, rtol=1e-6)
            assert info["rewards"][name][2].isnan()
        assert info["metrics"]["height"][0] == ages[-1]
    assert info["success"].tolist() == [True, False, False]
    env.close()


def test_an_env_of_envpool_is_heard_at_every_step(monkeypatch):
    """By a stand-in for the part of a pool that is used, which says things without masks."""
    ages = np.zeros(2, np.int64)

    def reset(rows=slice(None)):
        ages[rows] = 0
        return np.stack([ages, ages], 1).astype(np.float32), {}

    def step(actions):
        ages[:] += 1
        done = ages == LENGTH
        info = {"metrics": {"height": ages + 0.5}, "success": done.copy(), "env_id": ages}
        observation = np.stack([ages, ages], 1).astype(np.float32)
        return observation, np.ones(2), done, np.zeros_like(done), info

    spec = SimpleNamespace(
        gymnasium_observation_space=Box(-9, 9, (2,)),
        gymnasium_action_space=Discrete(2),
        config=SimpleNamespace(max_num_players=1, max_episode_steps=9),
    )
    package = SimpleNamespace(
        list_all_envs=lambda: ["Fake-v0"],
        make_spec=lambda id, **settings: spec,
        make_gymnasium=lambda *args, **settings: SimpleNamespace(reset=reset, step=step),
    )
    monkeypatch.setitem(sys.modules, "envpool", package)
    env = EnvPoolEnv(2, "Fake-v0")
    env.reset(seed=0)
    for t in range(2 * LENGTH):
        age = t % LENGTH + 1
        *_, info = env.step(torch.zeros(2, dtype=torch.int64))
        assert info["metrics"]["height"].tolist() == [age + 0.5] * 2
        assert info["success"].tolist() == [age == LENGTH] * 2
        assert ("final_obs" in info) == (age == LENGTH)
        assert "env_id" not in info


def test_what_an_env_says_at_its_ends_alone_is_averaged_over_the_ends():
    reports = EnvReports()
    nan = float("nan")
    for step in range(10):
        ended = {"metrics": {"score": torch.tensor([3.0, nan])}} if step == 4 else {}
        reports.add(ended)
    reports.add({"metrics": {"score": torch.tensor([nan, 5.0]), "vector": torch.ones(2, 3)}})
    reports.add({"metrics": {"score": torch.tensor([nan, nan])}, "rewards": {}})
    assert reports.close_rollout() == {"metrics/score": 4.0}
    assert reports.close_rollout() == {}
