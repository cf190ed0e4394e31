"""A mixed replay gives exact shares of what was collected and what was demonstrated, whatever there is of either."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lightning_rl import (
    SAC,
    ActorOnly,
    DatasetCollector,
    EpisodeWriter,
    GripperSAC,
    GymnasiumEnv,
    MixedReplay,
    ReplayBuffer,
)
from lightning_rl.extensions.datasets import mixed_replay
from lightning_rl.extensions.datasets.mixed_replay import steps_of
from tests.arms import helped_arm
from tests.core.numerics.test_replay import (
    ACTION,
    NESTED,
    VECTOR,
    SlowReplay,
    Stream,
    fixed_rollout,
)
from tests.envs import ScriptedEnv
from tests.helpers import last, make_collector, train
from tests.messages import refused
from tests.variants import after

SCALAR = Box(-99, 99, ())
FIELDS = ("observation", "action", "reward", "next_observation", "discount")


def mixed(space=VECTOR, num_envs=2, capacity=1000, offline=1000, action=ACTION, **settings):
    parts = {"online": capacity, "offline": offline}
    made = {name: partial(ReplayBuffer, capacity=room) for name, room in parts.items()}
    return MixedReplay(space, action, num_envs, "cpu", 3, **made, **settings)


def taken_over(observations, intervened, **kwargs):
    """One env, whose observations are plain numbers and whose executed actions are 10 times them."""
    rollout = fixed_rollout(observations, rewards=observations[:-1], **kwargs)
    seen = rollout["observation"]
    rollout["executed_action"] = (10 * seen)[..., None].expand(*seen.shape, 2).contiguous()
    rollout["intervened"] = torch.zeros_like(rollout["done"])
    rollout["intervened"][0, intervened] = True
    return rollout


def drawn(replay, **settings):
    """All that is drawn, each once, as plain numbers."""
    (batch,) = replay.batches(1, 600, **settings)
    rows = torch.stack([batch[key].reshape(600, -1)[:, 0].float() for key in FIELDS], 1)
    return {tuple(row) for row in rows.tolist()}


@pytest.mark.parametrize(
    ("ratio", "size", "online"),
    [
        (0.5, 5, 3),
        (0.1, 4, 0),
        (0.0, 5, 0),
    ],
)
def test_each_minibatch_has_its_shares(ratio, size, online):
    """Halves are rounded up; 0 takes none, where LeRobot's mixer takes one, and 1 all."""
    replay = mixed(SCALAR, 1, online_ratio=ratio)
    replay.extend(taken_over([1.0, 2.0, 3.0], [0]))  # one demonstration, far fewer than a share
    replay.extend(taken_over([50.0, 51.0, 52.0], []))
    for batch in replay.batches(20, size):
        assert len(batch) == size
        assert batch["observation"][online:].tolist() == [1.0] * (size - online)
    assert replay.metrics()["replay/online_share"] == online / size


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_where_one_is_empty_all_are_the_others_and_the_charts_say_so(ratio):
    replay = mixed(SCALAR, 1, online_ratio=ratio)
    with refused(RuntimeError, names=("replay", "extend()")):
        next(replay.batches(1, 8))
    replay.extend(taken_over([1.0, 2.0, 3.0], []))
    (batch,) = replay.batches(1, 8)
    assert len(batch) == 8
    assert set(batch["observation"].tolist()) <= {1.0, 2.0}
    assert replay.metrics() == {
        "replay/size": 2.0,
        "replay/online_size": 2.0,
        "replay/offline_size": 0.0,
        "replay/interventions": 0.0,
        "replay/online_share": 1.0,
    }


def test_an_intervention_is_in_both_with_what_was_executed_and_what_truly_followed():
    """Its last step goes on to where it ended, not to where the next one begins; a time limit not to the reset."""
    replay = mixed(SCALAR, 1, online_ratio=0.0)
    replay.extend(taken_over([1.0, 2.0, 3.0, 4.0], [1]))  # ends at 3
    replay.extend(taken_over([4.0, 5.0, 9.0, 10.0], [0, 1], truncated=[1], finals={1: 6.0}))
    replay.extend(taken_over([10.0, 11.0, 12.0, 13.0], [2]))
    replay.extend(taken_over([13.0, 14.0, 15.0, 16.0], [0], terminated=[0], finals={0: 77.0}))
    found = {(*row[:4], round(row[4], 2)) for row in drawn(replay, gamma=0.5)}
    assert found == {
        (2.0, 20.0, 2.0, 3.0, 0.5),
        (4.0, 40.0, 4.0, 5.0, 0.5),
        (5.0, 50.0, 5.0, 6.0, 0.5),
        (12.0, 120.0, 12.0, 13.0, 0.5),
        (13.0, 130.0, 13.0, 77.0, 0.0),
    }
    # Sums go on where the help does, over the rollouts' bounds too, and nowhere else.
    sums = {(row[0], row[2], row[3], row[4]) for row in drawn(replay, n_steps=3, gamma=0.5)}
    assert sums == {
        (2.0, 2.0, 3.0, 0.5),
        (4.0, 6.5, 6.0, 0.25),
        (5.0, 5.0, 6.0, 0.5),
        (12.0, 18.5, 77.0, 0.0),
        (13.0, 13.0, 77.0, 0.0),
    }


@pytest.mark.parametrize("space", [VECTOR, NESTED])
def test_over_random_schedules_the_counts_add_up_and_both_hold_the_same(space):
    """1,000 rollouts of one to four steps, with ends, resets and dropped rollouts between them."""
    replay = mixed(space, 2, 20_000, 20_000)
    stream, count = Stream(space, 2, seed=5, person=True), 0
    rounds = 1000 if space is VECTOR else 100
    kept = []
    for i in range(rounds):
        rollout = stream.next(1 + i % 4, continues=i % 7 != 3)
        count += int(rollout["intervened"][:, :-1].sum())
        replay.extend(rollout)
        if i < 30:
            slow = SlowReplay(2, 8)
            slow.extend(rollout)
            kept += [slow.sample(env, t, 1, 0.9) for env, t in slow.places()]
    assert len(replay.offline) == count == replay.metrics()["replay/interventions"]
    assert len(replay.online) == sum(2 * (1 + i % 4) for i in range(rounds))
    if space is VECTOR:
        (batch,) = replay.offline.batches(1, 20_000, gamma=0.9)
        rows = {row.numpy().tobytes(): i for i, row in enumerate(batch["observation"])}
        wanted = [one for one in kept if one["intervened"]]
        assert len(wanted) > 30
        for one in wanted:
            row = rows[one["observation"].tobytes()]
            for key in ("action", "next_observation"):
                np.testing.assert_array_equal(batch[key][row], one[key])
            assert batch["reward"][row].item() == pytest.approx(one["reward"])
            assert batch["discount"][row].item() == pytest.approx(one["discount"])
            assert batch["intervened"][row]


def test_interventions_can_be_left_to_what_was_collected():
    replay = mixed(SCALAR, 1, keep_interventions=False)
    replay.extend(taken_over([1.0, 2.0], [0]))
    assert len(replay.offline) == 0


def test_chunks_are_refused():
    replay = mixed(action=Box(-1, 1, (3, 2)))
    with refused(names=("MixedReplay", "ActionChunk", "ReplayBuffer")):
        replay.extend(Stream(VECTOR, 2, seed=1, chunk=3, action=Box(-1, 1, (3, 2))).next(4))


def write_dataset(path, episodes, *, rewards=True, extra=True):
    """Episodes of numbers: observation i, action 10 i, reward i, penalty -i; ended as told."""
    pytest.importorskip("pyarrow", reason="datasets need pyarrow: pip install -e '.[data]'")
    writer = EpisodeWriter(path, Box(-999, 999, (1,)), Box(-1, 1, (2,)), 10.0, "count")
    for first, length, end in episodes:
        for i in range(first, first + length):
            is_last = i == first + length - 1
            ends = (is_last and end == "terminated", is_last and end == "truncated")
            reward = float(i) if rewards else float("nan")
            said = {"penalty": -float(i), "twice": 2.0} if extra else {}
            action = np.full(2, 10.0 * i, np.float32)
            writer.add(np.array([float(i)], np.float32), action, reward, *ends, extra=said)
        writer.end_episode(np.array([float(first + length)], np.float32), success=True)
    writer.finalise()
    return str(path)


def counting(path, **settings):
    settings = {"action": Box(-999, 999, (2,)), "online_ratio": 0.0, **settings}
    return mixed(Box(-999, 999, (1,)), 1, demonstrations=path, **settings)


def test_demonstrations_of_a_dataset_are_there_from_the_first_rollout_on(tmp_path):
    path = write_dataset(tmp_path / "data", [(1, 3, "terminated"), (10, 2, "truncated")])
    replay = counting(path)
    stream = Stream(Box(-999, 999, (1,)), 1, seed=1)
    replay.extend(stream.next(2))
    assert len(replay.offline) == 5
    assert drawn(replay, gamma=0.5) == {
        (1.0, 10.0, 1.0, 2.0, 0.5),
        (2.0, 20.0, 2.0, 3.0, 0.5),
        (3.0, 30.0, 3.0, 4.0, 0.0),
        (10.0, 100.0, 10.0, 11.0, 0.5),
        (11.0, 110.0, 11.0, 12.0, 0.5),  # where only time ran out, the true last one
    }
    replay.extend(stream.next(2))
    assert len(replay.offline) == 5  # once
    resumed = counting(path)
    resumed.load_state_dict(replay.state_dict(tmp_path / "replay"), tmp_path / "replay")
    resumed.extend(stream.next(2))
    assert len(resumed.offline) == 5  # once in the life of a run
    (batch,) = replay.batches(1, 50)
    assert torch.equal(batch["penalty"], -batch["reward"])
    weighed = counting(path, penalties={"penalty": 0.5, "twice": 1.0})
    weighed.extend(stream.next(2))
    (batch,) = weighed.batches(1, 50)
    assert torch.equal(batch["penalty"], -0.5 * batch["reward"] + 2.0)


def test_demonstrations_that_do_not_do_are_refused_before_anything_is_collected(tmp_path):
    path = write_dataset(tmp_path / "data", [(1, 3, "terminated")])
    with refused(names=("data.replay.offline.capacity=2", "3 transitions", path)):
        counting(path, offline=2)
    with refused(names=("data.replay.penalties", "cost", path, "penalty, twice")):
        counting(path, penalties={"cost": 1.0})
    bare = write_dataset(tmp_path / "bare", [(1, 2, "terminated")], rewards=False, extra=False)
    with refused(names=(bare, "rl-cli label", "keys: {<column>: reward}")):
        counting(bare)
    with refused(names="nowhere"):
        counting(str(tmp_path / "nowhere"))
    with refused(names=("data.replay.online_ratio", "[0, 1]", "1.5")):
        mixed(online_ratio=1.5)


def test_an_env_of_another_rate_is_refused_also_if_its_rate_is_the_default(tmp_path):
    path = write_dataset(tmp_path / "data", [(1, 3, "terminated")])  # 10 frames per second
    spaces = Box(-999, 999, (1,), np.float32), Box(-999, 999, (2,), np.float32)
    gymnasium.register("Rate-v0", partial(ScriptedEnv, *spaces, metadata={"render_fps": 30}))
    gymnasium.register("NoRate-v0", partial(ScriptedEnv, *spaces))
    collected = partial(make_collector, DatasetCollector, path=path, num_steps=4, seed=0)
    env, policy = GymnasiumEnv(1, "Rate-v0"), ActorOnly(*spaces)
    with refused(names=("10 frames per second", "30 steps per second")):
        collected(env=env, policy=policy)
    collected(env=GymnasiumEnv(1, "NoRate-v0"), policy=policy)
    data = {"num_envs": 1, "replay": partial(MixedReplay, demonstrations=path)}
    with refused(names=("10 frames per second", "30 steps per second")):
        train(tmp_path / "run", env="Rate-v0", data=data, model={"algorithm": SAC})


def pendulum(replay):
    data = {"num_envs": 2, "buffer_size": 8, "total_env_steps": 96, "replay": replay}
    return {"env": "Pendulum-v1", "data": data, "model": {"algorithm": SAC}}


def test_another_runs_replay_is_what_it_begins_with(tmp_path):
    small = partial(ReplayBuffer, capacity=60)
    train(tmp_path / "a", **pendulum(small))
    both = partial(MixedReplay, online=small, demonstrations=str(tmp_path / "a"))
    train(tmp_path / "b", **pendulum(both))
    env = GymnasiumEnv(1, "Pendulum-v1")
    spaces = env.single_observation_space, env.single_action_space
    state = torch.load(last(tmp_path / "a"), weights_only=True)["RLDataModule"]["replays"][0]
    source = ReplayBuffer(*spaces, 2, capacity=60)
    source.load_state_dict(state, tmp_path / "a" / "checkpoints" / "replay")
    replay = MixedReplay(*spaces, 1, online_ratio=0.0, demonstrations=str(tmp_path / "a"))
    replay.extend(Stream(spaces[0], 1, action=spaces[1], seed=1).next(2))
    assert len(replay.offline) == len(source) == 60
    rows_of = []
    for buffer in (source, replay.offline):
        (batch,) = buffer.batches(1, 3000, gamma=0.9)
        rows = torch.cat([batch[key].reshape(3000, -1) for key in FIELDS], 1)
        rows_of.append({row.numpy().tobytes() for row in rows})
    assert rows_of[0] == rows_of[1]
    assert len(rows_of[0]) == 60


@pytest.mark.parametrize("room", [20, 6])  # the last 6 steps hold two of the three interventions
def test_of_another_mixed_replay_it_takes_both_parts_and_no_intervention_twice(
    room, tmp_path, monkeypatch
):
    first = mixed(SCALAR, 1, capacity=room)
    first._put(steps_of(taken_over([60.0, 61.0, 62.0], [], terminated=[1]), 0, 0, 2))
    for begin, helped in ((1.0, [0]), (11.0, [1, 2])):
        first.extend(taken_over([begin + step for step in range(5)], helped, terminated=[3]))
    state = {"RLDataModule": {"replays": [first.state_dict(tmp_path / "replay")]}}
    monkeypatch.setattr(mixed_replay, "read_checkpoint", lambda path: state)
    (tmp_path / "a.ckpt").touch()
    demonstrations = str(tmp_path / "a.ckpt")
    second = mixed(SCALAR, 1, demonstrations=demonstrations, online_ratio=0.0)
    second._read_demonstrations()
    begun = [60.0, 61.0] + [1.0 + step for step in range(4)] + [11.0 + step for step in range(4)]
    stored = second.offline.ring.by_slot["observation",][second.offline.ring.stored_slots(), 0]
    assert sorted(stored.tolist()) == sorted(begun if room == 20 else {*begun} - {2.0})
    with refused(names=("data.replay.offline.capacity", len(begun) - 1)):
        mixed(SCALAR, 1, demonstrations=demonstrations, offline=len(begun) - 1)


def test_a_checkpoint_without_a_replay_is_refused(tmp_path):
    train(tmp_path, **pendulum(partial(ReplayBuffer, capacity=60)), trainer={"save_replay": False})
    env = GymnasiumEnv(1, "Pendulum-v1")
    spaces = env.single_observation_space, env.single_action_space
    with refused(names=(last(tmp_path), "last.ckpt", "trainer.save_replay")):
        MixedReplay(*spaces, 1, demonstrations=str(tmp_path))


def test_a_checkpoint_of_another_kind_of_replay_is_refused(tmp_path):
    plain = ReplayBuffer(VECTOR, ACTION, 2, capacity=10)
    plain.extend(Stream(VECTOR, 2, seed=1).next(2))
    one = mixed(capacity=10)
    one.extend(Stream(VECTOR, 2, seed=1).next(2))
    with refused(names=("MixedReplay", "data.replay")):
        mixed().load_state_dict(plain.state_dict(tmp_path), tmp_path)
    fresh = ReplayBuffer(VECTOR, ACTION, 2, capacity=10)
    with refused(names="data.replay"):
        fresh.load_state_dict(one.state_dict(tmp_path), tmp_path)


def test_from_env_to_minibatch_an_intervention_keeps_its_mark_and_its_penalty(tmp_path):
    seen = []

    def keep(replay, batches, *args, **kwargs):
        for batch in batches:
            seen.append(batch)
            yield batch

    data = {
        "num_envs": 1,
        "buffer_size": 1,
        "total_env_steps": 120,
        "replay": after(MixedReplay, batches=keep),
    }
    model = {"algorithm": GripperSAC, "random_env_steps": 40}
    module, *_ = train(tmp_path, env=helped_arm, data=data, model=model)
    assert module.updates_done == 80
    assert len(seen) == 80
    for batch in seen:
        assert batch["intervened"][8:].all()  # half of 16 samples are of what somebody did
        np.testing.assert_allclose(batch["action"][8:], np.tile([0.5, -0.5, 1.0], (8, 1)))
    assert any(batch["penalty"][:8].min() < 0 for batch in seen)
    assert all(batch["penalty"][8:].max() == batch["penalty"][8:].min() == 0 for batch in seen)
