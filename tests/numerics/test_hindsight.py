"""Samples with other goals are those of the definition, whatever the ring has overwritten, summed or restored."""

from functools import partial
from operator import itemgetter

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import (
    GRU,
    SAC,
    TD3,
    ActionChunk,
    BehaviorCloning,
    ConfigurationError,
    DatasetCollector,
    GymnasiumEnv,
    HindsightReplay,
    MixedReplay,
    ValueAtoms,
)
from lightning_rl.buffers import replay_buffer
from lightning_rl.envs.gymnasium.goals import goal_function
from lightning_rl.extensions.tasks.probes import TwoDoors
from lightning_rl.rollout.contract import final_storage, map_tree, next_observations
from tests.core.numerics.test_replay import ACTION, SlowReplay, Stream
from tests.goal_envs import GoalProbe, Point
from tests.helpers import train
from tests.messages import refused
from tests.variants import after, variant

GOAL = Box(-9.0, 9.0, (2,))
SPACE = Dict(achieved_goal=GOAL, desired_goal=GOAL, observation=Box(-1.0, 1.0, (3,)))


def judge(achieved, desired):
    """A reward that names both goals; an exact hit ends the episode."""
    difference = achieved - desired
    return difference[..., 0] + 2.0 * difference[..., 1], (difference == 0).all(-1)


class GoalStream(Stream):
    """Rollouts whose rewards are those of `judge`; an episode keeps its goal, and may reach it."""

    def next(self, steps, continues=True):
        rollout = super().next(steps, continues)
        with_goal = rollout["observation", "desired_goal"]
        for t in range(1, steps + 1):
            begins = rollout["done"][:, t - 1 : t]
            with_goal[:, t] = torch.where(begins, with_goal[:, t], with_goal[:, t - 1])
        self.following["desired_goal"] = with_goal[:, -1].clone()
        finals = final_storage(rollout).rows
        envs, times = (rollout["done"][:, :-1]).nonzero(as_tuple=True)
        rows = rollout["final_index"][envs, times]
        finals["desired_goal"][rows] = with_goal[envs, times]
        reached = self.chance(0.5, len(rows)) & rollout["terminated"][envs, times]
        finals["achieved_goal"][rows[reached]] = with_goal[envs, times][reached]
        after = next_observations(rollout)
        rollout["reward"][:, :-1] = judge(after["achieved_goal"], after["desired_goal"])[0]
        return rollout


def definition(stream, t, goal, n_steps, gamma):
    """A sample of one stream with a goal, in float64: its reward, its discount, and what follows it."""
    total, discount = 0.0, 1.0
    for one in stream[t : t + n_steps]:
        achieved = one["next"]["achieved_goal"].astype(float)
        difference = achieved - goal.astype(float)
        total += discount * (difference[0] + 2.0 * difference[1])
        discount *= gamma
        by_own = (one["next"]["achieved_goal"] == one["next"]["desired_goal"]).all()
        ended = (one["next"]["achieved_goal"] == goal).all() or (one["terminated"] and not by_own)
        if ended or not one["goes_on"]:
            break
    return total, 0.0 if ended else discount, one["next"]


def allowed(strategy, stream, t):
    """The steps of the stored part of an episode whose places may be the goal of a sample."""
    first, last = t, t
    while first > 0 and stream[first - 1]["goes_on"]:
        first -= 1
    while last + 1 < len(stream) and stream[last]["goes_on"]:
        last += 1
    steps = {"future": range(t, last + 1), "final": [last], "episode": range(first, last + 1)}
    return steps[strategy]


@pytest.mark.parametrize(
    ("strategy", "num_envs", "capacity", "lengths"),
    [
        ("future", 1, 17, [1] * 30),
        ("future", 2, 13, [3, 11, 2, 5]),  # rollouts larger than the ring
        ("final", 3, 40, [4, 1, 7, 3, 4, 4, 2, 9]),  # it wraps around
        ("episode", 1, 17, [1] * 30),
        ("episode", 3, 40, [4, 1, 7, 3, 4, 4, 2, 9]),
    ],
)
def test_each_sample_is_that_of_the_definition(
    strategy, num_envs, capacity, lengths, tmp_path, monkeypatch
):
    monkeypatch.setattr(replay_buffer, "GATHER_BYTES", 2**12)  # several groups
    make = partial(HindsightReplay, SPACE, ACTION, num_envs, "cpu", goals=judge, capacity=capacity)
    replay, slow = make(5, strategy=strategy), SlowReplay(num_envs, capacity)
    rollouts = GoalStream(SPACE, num_envs, seed=3, end=0.1)
    new, count, chosen = 0, 0, []
    for i, steps in enumerate(lengths):
        rollout = rollouts.next(steps, continues=i % 4 != 2)
        for one in (replay, slow):
            one.extend(rollout)
        if i == len(lengths) // 2:  # a resumed run
            state, replay = replay.state_dict(tmp_path), make(0, strategy=strategy)
            replay.load_state_dict(state, tmp_path)
        n_steps, size = 1 + i % 3, 250 if i + 1 == len(lengths) else 20
        (batch,) = replay.batches(1, size, n_steps=n_steps, gamma=0.9)
        batch = batch.numpy()
        places = {  # of the observations, all of which differ
            step["observation"]["observation"].tobytes(): (env, t)
            for env, stream in enumerate(slow.streams)
            for t, step in enumerate(stream)
        }
        for row in range(size):
            seen, after = (
                map_tree(itemgetter(row), batch[key]) for key in ("observation", "next_observation")
            )
            env, t = places[seen["observation"].tobytes()]
            stream, goal = slow.streams[env], seen["desired_goal"]
            count += 1
            if (goal == stream[t]["observation"]["desired_goal"]).all():
                wanted = slow.sample(env, t, n_steps, 0.9)
                reward, discount = wanted["reward"], wanted["discount"]
                following = wanted["next_observation"]
            else:
                steps_of = allowed(strategy, stream, t)
                (u,) = [u for u in steps_of if (stream[u]["next"]["achieved_goal"] == goal).all()]
                new += 1
                if len(steps_of) > 1:
                    chosen.append((u - steps_of[0]) / (len(steps_of) - 1))
                reward, discount, following = definition(stream, t, goal, n_steps, 0.9)
                following = {**following, "desired_goal": goal}
            map_tree(np.testing.assert_array_equal, after, following)
            assert batch["reward"][row] == pytest.approx(reward, rel=1e-5, abs=1e-5)
            assert batch["discount"][row] == pytest.approx(discount)
    assert 0.65 < new / count < 0.86  # a goal that its own episode reached is no other one
    if strategy != "final":  # each of them, as often as the others
        assert min(chosen) == 0.0
        assert max(chosen) == 1.0
        assert abs(np.mean(chosen) - 0.5) < 0.1


point = partial(GymnasiumEnv, id="tests/Point-v0")


def test_a_gymnasium_env_judges_goals_by_its_own_functions():
    """One by one, where a function answers for one goal alone."""
    env = point(2)
    a = torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.0, 0.2]])
    reward, ended = env.goals(a, torch.zeros(3, 2))
    assert reward.tolist() == [0.0, -1.0, 0.0]
    assert ended.tolist() == [True, False, True]
    flat = point(1, wrappers=[gymnasium.wrappers.FlattenObservation])
    assert flat.goals is None
    alone = partial(
        gymnasium.wrappers.FilterObservation, filter_keys=["achieved_goal", "desired_goal"]
    )
    assert point(1, wrappers=[alone]).goals is not None
    env.close()


def test_a_function_of_one_goal_judges_many_and_one_that_needs_infos_is_named():
    """NumPy refuses the truth of an array of many goals."""
    place = torch.tensor([[0.0, 0.0], [0.5, 0.5]])

    def close(env, achieved, desired, info):
        return 0.0 if abs(achieved[0] - desired[0]) < 0.1 and achieved[1] < 0.1 else -1.0

    env = variant(Point, compute_reward=close)()
    assert goal_function(env)(place, torch.zeros(2, 2))[0].tolist() == [0.0, -1.0]
    weighted = variant(Point, compute_reward=lambda env, achieved, desired, info: info["weight"])()
    with refused(names=("compute_reward", "KeyError", "'weight'", "info")):
        goal_function(weighted)(place, place)


def run(data=None, model=None, **settings):
    replay = {"replay": partial(HindsightReplay, capacity=60)}
    counts = {"buffer_size": 8, "total_env_steps": 128, "num_eval_episodes": 1}
    algorithm = {"algorithm": SAC, "updates_per_env_step": 0.1}
    data, model = replay | counts | (data or {}), algorithm | (model or {})
    return {"env": point, "data": data, "model": model} | settings


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"env": "Pendulum-v1"}, ("HindsightReplay", "Gymnasium-Robotics")),
        ({"data": {"replay": partial(HindsightReplay, share=1.5)}}, "data.replay.share"),
        ({"data": {"replay": partial(HindsightReplay, strategy="nearest")}}, ("nearest", "'future', 'final', 'episode'")),
        ({"env": lambda n: ActionChunk(n, point, 3)}, ("compute_reward", "ActionChunk")),
        ({"policy": {"memory": partial(GRU, size=4)}, "model": {"sequence_length": 2}}, "memory"),
        (
            {"env": partial(point, wrappers=[partial(gymnasium.wrappers.TransformReward, func=lambda r: r - 3)])},
            ("env", "compute_reward"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_relabelled_is_refused(changed, message, tmp_path):
    with refused(names=message):
        train(tmp_path, **run(**changed))


def mixed(*args, **kwargs):
    parts = {"online": partial(HindsightReplay, capacity=60), "offline": HindsightReplay}
    return MixedReplay(*args, **parts, **kwargs)


@pytest.mark.parametrize("replay", [partial(HindsightReplay, capacity=60), mixed])
@pytest.mark.parametrize("ends", [True, False])
def test_returns_of_new_goals_fit_the_limit_before_the_first_success(ends, replay, tmp_path):
    def judge(env, achieved, desired):
        reached = (achieved == desired).all(-1)
        return 10.0 * reached, reached & ends

    changed = run(model={"normalize_reward": True, "gamma": 0.75}, data={"replay": replay})
    changed |= {"policy": {"value_atoms": ValueAtoms(limit=5.0)}}
    module, *_ = train(tmp_path, **changed | {"env": variant(GoalProbe, judge=judge)})
    largest = 10.0 if ends else 10.0 / (1 - 0.75)
    assert module.normalized_reward(torch.tensor([largest])).tolist() == [5.0]


KEPT = {"moved": [], "force": [3]}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_entries_of_infos_reach_the_minibatches_of_their_steps(vectorization, tmp_path):
    data = {"extra_fields": KEPT, "num_envs": 2, "total_env_steps": 64, "num_eval_episodes": 1}
    batches = []

    def keep(module, minibatches, rollout):
        assert rollout["info/force"].shape == (*rollout.batch_size, 3)
        minibatches = list(minibatches)
        batches.extend(minibatches)
        return minibatches

    env, model = (
        partial(point, vectorization=vectorization),
        {"algorithm": after(TD3, minibatches=keep)},
    )
    _, datamodule, _ = train(tmp_path, **run(data, model, env=env))
    assert datamodule.settings()["extra_fields"] == KEPT
    for batch in batches:
        torch.testing.assert_close(batch["info/moved"], batch["action"].abs().sum(-1))
        torch.testing.assert_close(batch["info/force"][:, 2], batch["action"][:, 0])
    assert len(batches) > 2


def telling(axis):
    """A batched env that tells how far it moved, or something of another shape."""

    def tell(env, result, state, action):
        return *result[:-1], {**result[-1], "moved": action.abs().sum(axis)}

    return after(GoalProbe, transition=tell)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"env": point, "extra_fields": {"speed": []}}, ("'speed'", "'tests/Point-v0'", "'moved', 'force'")),
        ({"env": point, "extra_fields": {"force": [2]}}, ("info force", "[3]", "[2]")),
        ({"env": GoalProbe, "extra_fields": {"moved": []}}, ("GoalProbe", "info['moved']")),
        ({"env": telling(0), "extra_fields": {"moved": []}}, ("info moved", "[2]", "[4]")),
        ({"env": lambda n: ActionChunk(n, point, 3), "extra_fields": KEPT}, "ActionChunk"),
        ({"env": point, "extra_fields": KEPT, "replay": mixed}, "MixedReplay"),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_kept_are_refused(changed, message, tmp_path):
    env = changed.pop("env")
    with refused((ConfigurationError, RuntimeError), names=message):
        train(tmp_path, **run(env=env, data=changed))


def test_demonstrations_have_no_infos(tmp_path):
    data = {"collector": partial(DatasetCollector, episodes=2), "extra_fields": {"moved": []}}
    with refused(names=("data.extra_fields", "moved")):
        train(tmp_path, env=TwoDoors, data=data, model={"algorithm": BehaviorCloning})


def test_a_resumed_run_keeps_the_same_entries(tmp_path):
    data = {"extra_fields": {"moved": []}, "total_env_steps": 64}
    train(tmp_path, **run(env=telling(1), data=data))
    more = {"data": {"total_env_steps": 128, "extra_fields": {}}, "env": telling(1)}
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    with refused(names=("info/moved", "data.extra_fields", "--restore_replay false")):
        train(tmp_path, ckpt_path=checkpoint, **run(**more))
    more["data"]["extra_fields"] = {"moved": []}
    module, *_ = train(tmp_path, ckpt_path=checkpoint, **run(**more))
    assert module.env_steps == 128
