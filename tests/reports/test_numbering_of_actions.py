"""Envs whose actions begin at another number than 0 (stable-baselines3 2052): files keep it, episodes have 0."""

import json
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from lightning_rl import (
    ActorOnly,
    DatasetCollector,
    EpisodeWriter,
    GymnasiumEnv,
    TensorSimulator,
    read_episodes,
    read_replay,
    write_minari,
    write_replay,
)
from lightning_rl.extensions.datasets.record import Recorder, script_action_function
from lightning_rl.rollout.contract import map_tree
from tests.envs import ScriptedEnv, ScriptedTask
from tests.helpers import make_collector
from tests.messages import refused
from tests.numerics.test_tensor_simulator import ManiSkillLike
from tests.reports.datasets import STATE, make, numbers, pq

SINGLE = Discrete(3, start=1)
SEVERAL = MultiDiscrete([3, 2], start=[1, -4])


def counting(space):
    """Four steps; the reward is the sum of the action as the env counts."""

    def check(env):
        assert env.action_space.contains(env.action)

    return ScriptedEnv(
        STATE, space, act=check, reward=lambda env: float(np.sum(env.action)), length=4
    )


@pytest.fixture(autouse=True)
def registry_given_back():
    yield
    gymnasium.registry.pop("Counting-v0", None)


CASES = [(SINGLE, [1, 2, 2, 3]), (SEVERAL, [[1, -4], [2, -3], [3, -4], [3, -3]])]


def record(path, space, actions):
    gymnasium.register("Counting-v0", partial(counting, space))
    env = GymnasiumEnv(1, "Counting-v0")
    writer = EpisodeWriter(path, STATE, space, fps=10)
    chooser = script_action_function(lambda seen: actions[int(seen[0])], space)
    assert len(list(Recorder(env).record_episodes(writer, 1, lambda _: chooser, seed=1))) == 1
    writer.finalise()
    return env


def on_disk(path):
    (file,) = (path / "data").rglob("*.parquet")
    return pq.read_table(file).column("action").to_pylist()


@pytest.mark.parametrize(("space", "actions"), CASES, ids=["single", "several"])
def test_every_way_through_files_keeps_the_numbers_of_the_env_there_and_0_here(
    tmp_path, space, actions
):
    record(tmp_path / "recorded", space, actions)
    expected = (np.array(actions) - space.start).tolist()
    assert on_disk(tmp_path / "recorded") == actions
    assert read_episodes(tmp_path / "recorded")[0].action.tolist() == expected, "its own word"
    (tmp_path / "recorded/meta/lightning_rl.json").unlink()  # as of a stranger
    episodes = read_episodes(tmp_path / "recorded", action_space=space)
    assert episodes[0].action.tolist() == expected
    assert episodes[0].reward.tolist() == [np.sum(action) for action in actions]
    replay = read_replay(episodes, STATE, space)
    write_replay(tmp_path / "replayed", replay, STATE, space, fps=10)
    assert on_disk(tmp_path / "replayed") == actions
    copy = EpisodeWriter(tmp_path / "copied", STATE, space, 10)
    copy.write(episodes[0])
    copy.finalise()
    assert on_disk(tmp_path / "copied") == actions
    pytest.importorskip("minari", reason="needs the extra data")
    write_minari(tmp_path / "minari", episodes, STATE, space)
    again = read_episodes(tmp_path / "minari", action_space=space)
    (raw,) = again._storage.get_episodes([0])
    assert raw["actions"].tolist() == actions
    assert torch.equal(again[0].action, episodes[0].action)
    other = Discrete(3) if space is SINGLE else MultiDiscrete([3, 2])
    with refused(names="action"):
        read_episodes(tmp_path / "minari", action_space=other)


def test_a_clone_counts_as_the_policy_does(tmp_path):
    env = record(tmp_path, SINGLE, [1, 2, 2, 3])
    handed_out = make_collector(
        DatasetCollector, env, ActorOnly(STATE, SINGLE), 4, 0, path=str(tmp_path)
    )
    assert handed_out.collect()["action"][0, :4].tolist() == [0, 1, 1, 2]


def test_another_numbering_than_that_of_the_dataset_is_refused(tmp_path):
    record(tmp_path / "own", SINGLE, [1, 2, 2, 3])
    with refused(names=("number 1", "env 0")):
        read_episodes(tmp_path / "own", action_space=Discrete(4))
    described = json.loads((tmp_path / "own/meta/lightning_rl.json").read_text())
    assert described["action_start"] == 1
    make(tmp_path / "theirs", (4,), numbers(4, action=np.array([1, 2, 2, 3])))
    episodes = read_episodes(tmp_path / "theirs")
    with refused(names="read_episodes(path, action_space=...)"):
        read_replay(episodes, STATE, SINGLE)
    box = read_episodes(tmp_path / "theirs", action_space=SINGLE)
    assert box[0].action.tolist() == [0, 1, 1, 2]
    with refused(names="the action 3 at step 3"):
        read_episodes(tmp_path / "theirs", action_space=Discrete(3))[0]


PARTS = Dict({"arm": Box(-1.0, 1.0, (1,)), "mode": SINGLE})
BATCHES = [
    (SINGLE, [0, 2], [1, 3]),
    (SEVERAL, [[0, 0], [2, 1]], [[1, -4], [3, -3]]),
    (PARTS, [[0.5, 0.0], [1.0, 2.0]], {"arm": [[0.5], [1.0]], "mode": [1, 3]}),
]


@pytest.mark.parametrize(("space", "action", "taken"), BATCHES, ids=["single", "several", "parts"])
def test_torch_envs_and_simulators_get_the_parts_and_the_numbers_of_the_space(space, action, taken):
    seen = []

    class Taking(ManiSkillLike):
        single_action_space = space

        def move(self, action):
            seen.append(action)
            return super().move(torch.zeros(2, 1))

    def move(env, state, action):
        seen.append(action)
        return ({},)

    task = ScriptedTask(2, lambda uniform: {"x": uniform}, move, action_space=space)
    for env in (task, TensorSimulator(2, Taking)):
        env.reset(seed=0)
        env.step(torch.tensor(action))
    assert [map_tree(torch.Tensor.tolist, tree) for tree in seen] == [taken, taken]
