"""From env to learner: what is collected, counted, handed out once, and evaluated."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict
from torch import nn

from lightning_rl import ActorCritic
from lightning_rl.buffers.segments import rollout_from, rollout_state
from lightning_rl.collectors import SyncCollector
from lightning_rl.collectors.evaluation import (
    EpisodeSeeds,
    bootstrap_interval,
    run_episodes,
    summarize,
)
from lightning_rl.collectors.statistics import EpisodeStatistics
from lightning_rl.envs import GymnasiumEnv
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import next_observations, validate
from lightning_rl.training.data import RolloutDataset
from tests.envs import ScriptedEnv, draw
from tests.helpers import assert_same, collect_into, make_collector
from tests.messages import refused
from tests.probes import ValueProbe
from tests.variants import after

ENVS = {
    "CartPole": lambda: GymnasiumEnv(4, "CartPole-v1"),
    "Timed": lambda: GymnasiumEnv(4, "tests/Timed-v0"),
    "Pendulum": lambda: GymnasiumEnv(2, "Pendulum-v1", env_kwargs={"max_episode_steps": 7}),
    "torch": lambda: ValueProbe(5, delay=3),
}


def timed():
    """Observe [noise, steps so far]; last as many steps as the seed decides, pay 1 for each, and succeed if even."""

    def begin(env):
        env.length = int(40 ** env.np_random.random())

    return ScriptedEnv(
        Dict({"noise": Box(-9, 9, (1,)), "steps": Box(0, 99, (1,))}),
        begin=begin,
        observe=lambda env: draw(env) | {"steps": np.float32([env.age])},
        reward=1.0,
        terminated=lambda env: env.age == env.length and env.length % 3 > 0,
        truncated=lambda env: env.age == env.length and env.length % 3 == 0,
        info=lambda env: {"success": env.length % 2 == 0} if env.age == env.length else {},
    )


gymnasium.register("tests/Timed-v0", timed)


def make_policy(env, seed=0, cls=ActorCritic, **kwargs):
    torch.manual_seed(seed)
    policy = cls(env.single_observation_space, env.single_action_space, (8,), **kwargs)
    with torch.no_grad():  # actions that depend on the observation
        policy.actor[-1].weight.mul_(100)
    return policy


def collector_of(env, num_steps=16, seed=3, **kwargs):
    env = GymnasiumEnv(4, env) if isinstance(env, str) else env
    return make_collector(SyncCollector, env, make_policy(env, **kwargs), num_steps, seed)


def collected(collector, count):
    return [rollout_state(collector.collect()) for _ in range(count)]


def transitions_of(rollouts, key="action"):
    return torch.cat([rollout[key][:, :-1] for rollout in rollouts], dim=1)


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
def test_a_rollout_is_what_plain_envs_give_for_its_actions(id):
    kwargs = {"max_episode_steps": 30}
    env = GymnasiumEnv(3, id, env_kwargs=kwargs)
    collector = collector_of(
        env, num_steps=25, seed=11, **({} if "Cart" in id else {"log_std_init": 1.0})
    )
    rollouts = collected(collector, 5)
    keys = ("observation", "action", "reward", "terminated", "truncated")
    data = {key: transitions_of(rollouts, key) for key in keys}
    after = torch.cat([next_observations(rollout_from(state)) for state in rollouts], dim=1)
    endings = 0
    for n in range(3):
        plain = gymnasium.make(id, **kwargs)
        observation, _ = plain.reset(seed=11 + n)
        for t in range(125):
            np.testing.assert_array_equal(data["observation"][n, t], observation)
            action = data["action"][n, t].numpy()
            if isinstance(plain.action_space, Box):
                action = action.clip(plain.action_space.low, plain.action_space.high)
            observation, reward, terminated, truncated, _ = plain.step(action)
            assert float(data["reward"][n, t]) == np.float32(reward)
            assert bool(data["terminated"][n, t]) == terminated
            assert bool(data["truncated"][n, t]) == truncated
            np.testing.assert_array_equal(after[n, t], observation)
            if terminated or truncated:
                observation, _ = plain.reset()
                endings += 1
    assert endings >= 12


@pytest.mark.parametrize("name", ENVS)
def test_the_stored_log_prob_is_that_of_the_stored_action(name):
    collector = collector_of(ENVS[name]())
    for _ in range(2):
        transitions = collector.collect()[:, :-1].reshape(-1)
        log_prob = collector.policy.evaluate_actions(transitions)["sample_log_prob"]
        torch.testing.assert_close(log_prob, transitions["sample_log_prob"], rtol=0, atol=1e-5)
        assert transitions["sample_log_prob"].unique().numel() > 1


def add_dropout(policy, result, *args, **kwargs):
    policy.actor = nn.Sequential(nn.Dropout(0.5), *policy.actor)


WITH_DROPOUT = after(ActorCritic, __init__=add_dropout)


def test_a_policy_with_dropout_acts_in_eval_mode():
    collector = collector_of("CartPole-v1", cls=WITH_DROPOUT)
    collector.policy.train()
    transitions = collector.collect()[:, :-1].reshape(-1)
    assert not collector.policy.training
    exact = collector.policy.evaluate_actions(transitions)["sample_log_prob"]
    torch.testing.assert_close(exact, transitions["sample_log_prob"], rtol=0, atol=1e-5)
    collector.policy.train()  # negative control
    dropped = collector.policy.evaluate_actions(transitions)["sample_log_prob"]
    assert (dropped - transitions["sample_log_prob"]).abs().max() > 0.01


@pytest.mark.parametrize(
    "make", [lambda: "CartPole-v1", lambda: "tests/Timed-v0", lambda: ValueProbe(5, delay=3)]
)
def test_the_seed_decides_everything(make):
    one, same, other = (collected(collector_of(make(), seed=s), 3) for s in (3, 3, 4))
    assert_same(one, same)
    assert not torch.equal(transitions_of(one), transitions_of(other))


def test_a_rollout_does_not_depend_on_what_was_done_with_the_last_one():
    """The algorithm adds fields, and writes values; none of it shows in the next rollout."""
    one, other = collector_of("CartPole-v1"), collector_of("CartPole-v1")
    for _ in range(3):
        a, b = one.collect(), other.collect()
        assert_same(rollout_state(a), rollout_state(b))
        b["advantage"] = torch.ones(4, 17)
        b["tree"] = TensorDict({"x": torch.zeros(4, 17)}, [4, 17])


@pytest.mark.parametrize("name", ENVS)
def test_evaluation_in_between_changes_nothing(name):
    def run(evaluate):
        env = ENVS[name]()
        collector, result = collector_of(env), []
        for _ in range(4):
            result.append(rollout_state(collector.collect()))
            if evaluate:
                run_episodes(collector.policy, ENVS[name](), [1, 2])
        return result, collector.state_dict()

    assert_same(run(True), run(False))


@pytest.mark.parametrize(
    "make", [lambda n: GymnasiumEnv(n, "CartPole-v1"), lambda n: ValueProbe(n, delay=3)]
)
def test_another_number_of_envs_restarts_the_episodes_with_a_warning(make):
    begun, resumed = collector_of(make(3)), collector_of(make(2))
    collected(begun, 2)
    with refused(UserWarning, names=("3 envs", "2")):
        resumed.load_state_dict(begun.state_dict())
    validate(resumed.collect())
    assert resumed.env_steps == 2 * 3 * 16 + 2 * 16


def episodes_by_hand(reward, done):
    """(return, length) of every finished episode, in order of time and then env."""
    running = [[] for _ in reward]
    result = []
    for t in range(reward.shape[1]):
        for n in range(reward.shape[0]):
            running[n].append(float(reward[n, t]))
            if done[n, t]:
                result.append((sum(running[n]), len(running[n])))
                running[n] = []
    return result


@pytest.mark.parametrize("chance", [0.02, 0.15, 1.0])
@pytest.mark.parametrize("lengths", [[120], [1] * 120, [7, 50, 3, 60]])
def test_statistics_are_those_of_the_episodes(chance, lengths):
    rng, statistics = np.random.default_rng(0), EpisodeStatistics(5)
    reward, done = rng.normal(size=(5, 120)), rng.random((5, 120)) < chance
    steps = torch.from_numpy(reward).float(), torch.from_numpy(done)
    for part in zip(*(values.split(lengths, 1) for values in steps), strict=True):
        collect_into(statistics, *part)
    expected = episodes_by_hand(reward, done)
    assert statistics.episodes == len(expected)
    np.testing.assert_allclose(list(statistics.returns), [e[0] for e in expected[-100:]], atol=1e-5)
    assert list(statistics.lengths) == [e[1] for e in expected[-100:]]
    if expected:
        averages = statistics.averages()
        last = np.array(expected[-100:])
        assert averages["charts/episode_reward_avg_100"] == pytest.approx(
            last[:, 0].mean(), abs=1e-5
        )
        assert averages["charts/episode_length_avg_100"] == pytest.approx(last[:, 1].mean())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rollout: rollout.reshape(-1), "steps + 1"),
        (lambda rollout: rollout.exclude("done"), "'done'"),
    ],
)
def test_the_dataset_refuses_what_is_no_rollout(change, message):
    rollout = allocate_rollout(Box(-1, 1, (2,)), Discrete(2), 2, 3)
    collector = SimpleNamespace(collect=lambda: change(rollout))
    with refused(ValueError, names=message):
        next(iter(RolloutDataset(collector, 1)))


def play_alone(policy, env, seed):
    """One episode in a plain env, by the mode of the policy: (return, length, terminated)."""
    observation, _ = env.reset(seed=seed)
    total, steps = 0.0, 0
    while True:
        td = TensorDict({"observation": torch.from_numpy(observation)[None]}, [1])
        action = policy.get_action(td, deterministic=True)["action"][0].numpy()
        observation, reward, terminated, truncated, _ = env.step(action)
        total, steps = total + float(reward), steps + 1
        if terminated or truncated:
            return total, steps, bool(terminated)


@pytest.mark.parametrize("num_envs", [1, 3, 6, 10])
def test_one_episode_per_seed_however_long(num_envs):
    """Every way to share the episodes out among envs gives the same ones, and no short one comes twice."""
    env = GymnasiumEnv(num_envs, "tests/Timed-v0")
    policy = make_policy(env)
    episodes = [
        e for batch in EpisodeSeeds(0, 10, num_envs) for e in run_episodes(policy, env, batch)
    ]
    lengths = [int(40 ** np.random.default_rng(seed).random()) for seed in range(10)]
    assert [e["seed"] for e in episodes] == list(range(10))
    assert [e["length"] for e in episodes] == lengths
    assert [e["return"] for e in episodes] == [float(length) for length in lengths]
    assert [e["terminated"] for e in episodes] == [length % 3 > 0 for length in lengths]
    assert [e["success"] for e in episodes] == [length % 2 == 0 for length in lengths]


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("num_envs", [2, 4])
def test_episodes_are_those_of_plain_envs(id, num_envs):
    env = GymnasiumEnv(num_envs, id, env_kwargs={"max_episode_steps": 120})
    policy = make_policy(env, seed=2)
    seeds = EpisodeSeeds(20, 4, num_envs)
    episodes = [e for batch in seeds for e in run_episodes(policy, env, batch)]
    for episode in episodes:
        alone = play_alone(policy, gymnasium.make(id, max_episode_steps=120), episode["seed"])
        assert episode["return"] == pytest.approx(alone[0], abs=1e-3)
        assert (episode["length"], episode["terminated"]) == alone[1:]
        assert episode["success"] is None
    assert len({episode["return"] for episode in episodes}) > 1


def test_evaluation_plays_the_mode_without_dropout():
    env = GymnasiumEnv(3, "CartPole-v1")
    policy = make_policy(env, cls=WITH_DROPOUT)
    expected = [
        play_alone(policy.eval(), gymnasium.make("CartPole-v1"), seed)[1] for seed in (1, 2, 3)
    ]
    policy.train()
    assert [e["length"] for e in run_episodes(policy, env, [1, 2, 3])] == expected


def episode(total, length, terminated=True, success=None, seed=0):
    return {
        "seed": seed,
        "return": total,
        "length": length,
        "terminated": terminated,
        "cut": False,
        "success": success,
        "intervened": None,
        "metrics": {"speed": total},
    }


def test_a_summary_says_what_was_played():
    episodes = [
        episode(1.0, 10, True, True, 5),
        episode(2.0, 20, False, False, 6),
        episode(6.0, 60, False, True, 7),
    ]
    summary = summarize(episodes)
    low, high = summary.pop("ci95")
    assert 1.0 <= low < 3.0 < high <= 6.0
    assert summary.pop("std_reward") == pytest.approx(np.sqrt(14 / 3))
    assert summary.pop("success_rate") == pytest.approx(2 / 3)
    low, high = summary.pop("success_ci95")
    assert 0 < low < 2 / 3 < high < 1
    assert summary == {
        "episodes": 3,
        "avg_reward": 3.0,
        "avg_length": 30.0,
        "terminations": 1,
        "truncations": 2,
        "cut": 0,
        "intervened_steps": None,
        "metrics": {"speed": 3.0},
        "returns": [1.0, 2.0, 6.0],
        "lengths": [10, 20, 60],
        "seeds": [5, 6, 7],
    }


def test_the_interval_is_that_of_a_normal_mean_for_many_values():
    values = np.random.default_rng(1).normal(10.0, 3.0, size=400)
    low, high = bootstrap_interval(values)
    margin = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - margin, abs=0.03)
    assert high == pytest.approx(values.mean() + margin, abs=0.03)
    assert bootstrap_interval(values) == [low, high]
