"""The replay buffer gives what a list of single transitions gives, index by index, and takes little more memory."""

import errno
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Text

from lightning_rl import ConfigurationError, ReplayBuffer
from lightning_rl.buffers import replay_buffer, transition_ring
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import (
    FinalObservationWriter,
    copy_tree,
    final_observations,
    map_tree,
)
from tests.messages import refused


def table(replay, **settings):
    """What is drawn, by its observation: (next observation, reward, discount)."""
    (batch,) = replay.batches(1, 200, **settings)
    rows = zip(
        *(batch[k].tolist() for k in ("observation", "next_observation", "reward", "discount")),
        strict=True,
    )
    return {
        observation: (following, round(reward, 4), round(discount, 4))
        for observation, following, reward, discount in rows
    }


def scalar_replay(capacity):
    return ReplayBuffer(Box(-99, 99, ()), ACTION, 1, "cpu", 1, capacity=capacity)


VECTOR = Box(-1.0, 1.0, (3,))
PICTURE = Box(0, 255, (4, 4, 3), np.uint8)
UNSIGNED = Dict(depth=Box(0, 2**16 - 1, (2,), np.uint16), ticks=Box(0, 2**32 - 1, (), np.uint32))
NESTED = Dict({"arm": Dict({"joints": VECTOR}), "camera": PICTURE})
ACTION = Box(-1.0, 1.0, (2,))


class Stream:
    """Random rollouts that go on where the last one ended, or do not."""

    def __init__(
        self, space, num_envs, *, seed, action=ACTION, chunk=0, person=False, padding=False, end=0.2
    ):
        self.space, self.action, self.num_envs, self.end = space, action, num_envs, end
        self.chunk, self.person, self.padding = chunk, person, padding
        self.draw = torch.Generator().manual_seed(seed)
        self.following = None

    def random(self, like):
        if like.dtype.is_floating_point:
            return torch.randn(like.shape, generator=self.draw)
        high = 2 if like.dtype == torch.bool else 200
        return torch.randint(high, like.shape, generator=self.draw).to(like.dtype)

    def chance(self, probability, *shape):
        return torch.rand(shape, generator=self.draw) < probability

    def next(self, steps, continues=True):
        extra = {"continues": ((), torch.bool)}
        if self.chunk:
            extra |= {
                "executed": ((self.chunk,), torch.bool),
                "step_reward": ((self.chunk,), torch.float32),
            }
        if self.person:
            extra |= {
                "executed_action": (self.action.shape, torch.float32),
                "intervened": ((), torch.bool),
            }
        rollout = allocate_rollout(
            self.space, self.action, self.num_envs, steps, extra_fields=extra
        )
        for key, field in rollout.exclude("final_observation", "final_index").items(True, True):
            rollout[key] = self.random(field)
        size = (self.num_envs, steps + 1)
        for key in ("terminated", "truncated"):
            rollout[key] = self.chance(self.end, *size)
        rollout["done"] = rollout["terminated"] | rollout["truncated"]
        finals, first = FinalObservationWriter(rollout), rollout.get("observation")[:, 0]
        for t in range(steps):
            finals.write(t, map_tree(self.random, first))
        rollout["continues"] = torch.full(size, continues and self.following is not None)
        if self.chunk:
            counts = torch.randint(1, self.chunk + 1, size, generator=self.draw)
            rollout["executed"] = torch.arange(self.chunk) < counts[..., None]
            rollout["step_reward"] = rollout["step_reward"] * rollout["executed"]
        if self.padding:
            lengths = torch.randint(1, steps + 1, (self.num_envs, 1), generator=self.draw)
            rollout["padding"] = torch.arange(steps + 1) >= lengths
        if continues and self.following is not None:
            copy_tree(first, self.following)
        self.following = map_tree(torch.clone, rollout.get("observation")[:, -1])
        return rollout


def value_at(rollout, env, step, key):
    if key == "final_observation":
        finals = final_observations(rollout, torch.tensor([env]), torch.tensor([step]))
        return map_tree(lambda x: x[0].numpy().copy(), finals)
    return map_tree(lambda x: x[env, step].numpy().copy(), rollout.get(key))


def row_of(tree, row):
    return map_tree(lambda x: x[row].numpy(), tree)


class SlowReplay:
    """By definition: single transitions in lists, each with what followed it."""

    def __init__(self, num_envs, capacity):
        self.kept, self.streams = capacity // num_envs, [[] for _ in range(num_envs)]

    def extend(self, rollout):
        steps = rollout.batch_size[1] - 1
        chunks, person = "executed" in rollout.keys(), "intervened" in rollout.keys()
        padding = rollout.get("padding", torch.zeros(rollout.shape, dtype=torch.bool))
        for env, stream in enumerate(self.streams):
            if stream and not rollout["continues"][env, 0]:
                stream[-1]["goes_on"] = False
            for t in range(steps):
                at = partial(value_at, rollout, env)
                done = bool(rollout["done"][env, t])
                ends = done or (t + 1 < steps and bool(padding[env, t + 1]))
                rewards = rollout["step_reward" if chunks else "reward"][env, t]
                stream.append(
                    {
                        "observation": at(t, "observation"),
                        "action": at(t, "executed_action" if person else "action"),
                        "rewards": rewards.double().numpy().reshape(-1).copy(),
                        "steps": int(rollout["executed"][env, t].sum()) if chunks else 1,
                        "terminated": bool(rollout["terminated"][env, t]),
                        "next": at(t, "final_observation") if done else at(t + 1, "observation"),
                        "goes_on": not ends,
                        "padded": bool(padding[env, t]),
                        "intervened": person and bool(rollout["intervened"][env, t]),
                    }
                )
        self.streams = [stream[-self.kept :] for stream in self.streams]

    def places(self):
        length = len(self.streams[0])
        cells = [(env, t) for t in range(length) for env in range(len(self.streams))]
        return [(env, t) for env, t in cells if not self.streams[env][t]["padded"]]

    def sample(self, env, t, n_steps, gamma):
        stream, total, discount = self.streams[env], 0.0, 1.0
        for i in range(t, min(t + n_steps, len(stream))):
            one = stream[i]
            total += discount * sum(gamma**k * reward for k, reward in enumerate(one["rewards"]))
            discount *= gamma ** one["steps"]
            if not one["goes_on"]:
                break
        first = stream[t]
        return {
            "observation": first["observation"],
            "action": first["action"],
            "reward": total,
            "next_observation": one["next"],
            "discount": 0.0 if one["terminated"] else discount,
            "intervened": first["intervened"],
        }


def assert_alike(replay, slow, n_steps, gamma, draws):
    """Minibatches [B] hold what the slow replay has at the same indices; all of them, in all likelihood."""
    places = slow.places()
    assert len(replay) == len(places)
    size = 3 * len(places)
    indices = torch.randint(len(places), (2 * size,), generator=draws).tolist()
    batches = list(replay.batches(2, size, n_steps=n_steps, gamma=gamma))
    assert len(batches) == 2
    assert all(batch.batch_size == (size,) for batch in batches)
    for k, index in enumerate(indices):
        batch, row = batches[k // size], k % size
        expected = slow.sample(*places[index], n_steps, gamma)
        for key in ("observation", "action", "next_observation"):
            map_tree(np.testing.assert_array_equal, row_of(batch.get(key), row), expected[key])
        for key in ("reward", "discount"):
            np.testing.assert_allclose(batch[key][row], expected[key], rtol=2e-6, atol=2e-6)
        if "intervened" in batch.keys():
            assert bool(batch["intervened"][row]) == expected["intervened"]
    for value in batches[0].values(True, True):
        assert value.is_contiguous()
    return batches[0]


CASES = {
    "one env, one step at a time": ({"num_envs": 1}, 7, [1] * 30),
    "several envs": ({"num_envs": 3}, 20, [4] * 8),
    "a capacity that no rollout divides": ({"num_envs": 3}, 31, [4, 1, 7, 3, 4, 4, 2, 9]),
    "a rollout larger than the ring": ({"num_envs": 2}, 9, [3, 11, 2, 5, 13]),
    "never an end": ({"num_envs": 2, "end": 0.0}, 12, [3] * 9),
    "more ends than there is room for": ({"num_envs": 8, "end": 0.9}, 160, [10] * 6),
    "chunks": ({"num_envs": 2, "chunk": 3, "action": Box(-1, 1, (3, 2))}, 12, [3] * 9),
    "a person takes over": ({"num_envs": 2, "person": True}, 12, [3] * 9),
    "padding": ({"num_envs": 3, "padding": True}, 24, [5] * 6),
    "pictures": ({"num_envs": 2, "space": PICTURE}, 10, [3] * 7),
    "a tree": ({"num_envs": 2, "space": NESTED}, 10, [3] * 7),
    "unsigned integers": ({"num_envs": 2, "space": UNSIGNED}, 10, [3] * 7),
}


def test_unsigned_integers_are_stored_in_dtypes_that_hold_them_all():
    rollout = allocate_rollout(UNSIGNED, ACTION, 1, 1)
    for name, space in UNSIGNED.items():
        row = rollout["observation"][name][0, 0]
        assert row.copy_(torch.from_numpy(np.asarray(space.high))).tolist() == space.high.tolist()


ON_DISK = "more ends than there is room for", "a tree"


@pytest.mark.parametrize(
    ("case", "storage"), [*((case, "cpu") for case in CASES), *((case, "disk") for case in ON_DISK)]
)
def test_each_index_gives_what_single_transitions_give(case, storage, tmp_path, monkeypatch):
    settings, capacity, lengths = CASES[case]
    monkeypatch.setattr(replay_buffer, "GATHER_BYTES", 2**12)  # several groups
    settings = {"space": VECTOR, "action": ACTION, **settings}
    stream = Stream(**settings, seed=1)
    spaces = stream.space, stream.action
    replay = ReplayBuffer(
        *spaces, stream.num_envs, "cpu", 5, capacity=capacity, storage=storage, directory=tmp_path
    )
    slow, draws = SlowReplay(stream.num_envs, capacity), torch.Generator().manual_seed(5)
    for i, steps in enumerate(lengths):
        rollout = stream.next(steps, continues=i % 4 != 2)
        replay.extend(rollout)
        slow.extend(rollout)
        rollout.apply_(torch.zeros_like)  # it was copied
        assert_alike(replay, slow, 1 + i % 5, 0.9, draws)
    assert not list(tmp_path.iterdir())


def fixed_rollout(
    observations, *, rewards, terminated=(), truncated=(), finals=None, continues=True
):
    """One env, whose observations are plain numbers; `finals` by step."""
    steps = len(rewards)
    rollout = allocate_rollout(
        Box(-99, 99, ()), ACTION, 1, steps, extra_fields={"continues": ((), torch.bool)}
    )
    rollout["observation"][0] = torch.tensor(observations)
    rollout["reward"][0, :steps] = torch.tensor(rewards)
    rollout["continues"][:] = continues
    for key, where in {"terminated": terminated, "truncated": truncated}.items():
        for t in where:
            rollout[key][0, t] = rollout["done"][0, t] = True
    for t, value in (finals or {}).items():
        FinalObservationWriter(rollout).write(t, torch.tensor([value]))
    return rollout


def test_time_running_out_bootstraps_from_the_true_final_observation():
    """And not from the reset, 10, which is the next slot's (trap 1)."""
    replay = scalar_replay(10)
    ends = {"truncated": [1], "terminated": [3], "finals": {1: 3.0, 3: 12.0}}
    replay.extend(fixed_rollout([1.0, 2.0, 10.0, 11.0, 20.0], rewards=[1.0, 2.0, 3.0, 4.0], **ends))
    assert table(replay, gamma=0.5) == {
        1.0: (2.0, 1.0, 0.5),
        2.0: (3.0, 2.0, 0.5),
        10.0: (11.0, 3.0, 0.5),
        11.0: (12.0, 4.0, 0.0),
    }


def test_what_comes_in_while_minibatches_are_drawn_is_refused():
    """A transition that was drawn may by then be another one, or half of one (trap 10)."""
    replay = ReplayBuffer(Box(-99, 99, ()), ACTION, 1, "cpu", 1, capacity=2)
    replay.extend(fixed_rollout([1.0, 2.0, 3.0], rewards=[1.0, 2.0]))
    batches = replay.batches(3, 4)
    next(batches)
    replay.extend(fixed_rollout([3.0, 4.0], rewards=[1.0]))
    with refused(RuntimeError, names=("replay", "batches()", "extend()")):
        next(batches)


def test_what_it_cannot_do_it_says(tmp_path, monkeypatch):
    empty = ReplayBuffer(VECTOR, ACTION, 4, "cpu", capacity=100)
    with refused(RuntimeError, names=("replay", "extend()")):
        empty.batches(1, 1)
    with refused(names=("data.num_envs=4", "has 1", "IQL", "MixedReplay")):
        empty.extend(Stream(VECTOR, 1, seed=1).next(2))  # would be copied to all envs
    refusals = {
        "data.replay.capacity must be at least 1, got 0.": {"capacity": 0},
        "data.replay.capacity is 3, and one step of the envs is 4 transitions: set it to at least data.num_envs, and "
        "much larger than a minibatch.": {"capacity": 3},
        "data.replay.storage='gpu' is none of ('cpu', 'device', 'disk').": {"storage": "gpu"},
        "data.replay.capacity of 1,000,000 needs 29,000,116 bytes of memory (29 for each transition), and 12,000,000 "
        "are free. Lower data.replay.capacity, to 413,789 at most, or set data.replay.storage to disk.": {},
        "data.replay.capacity of 1,000,000 needs 29,000,116 bytes on the disk (29 for each transition), and "
        "12,000,000 are free. Lower data.replay.capacity, to 413,789 at most.": {"storage": "disk"},
    }
    monkeypatch.setattr(transition_ring, "available_bytes", lambda *arguments: 12_000_000)
    for message, settings in refusals.items():
        with pytest.raises(ConfigurationError) as error:
            ReplayBuffer(VECTOR, ACTION, 4, "cpu", 1, directory=tmp_path, **settings)
        assert str(error.value) == message
    with refused(names=("Text", "Box, Discrete")):
        ReplayBuffer(Text(5), ACTION, 4, "cpu", capacity=100)


def test_a_disk_without_room_is_no_crash(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    replay = ReplayBuffer(
        VECTOR, ACTION, 4, "cpu", capacity=100, storage="disk", directory=tmp_path
    )
    with refused(
        names=("data.replay.capacity", "100", "3,016 bytes", "No space left", "data.replay.storage")
    ):
        replay.extend(Stream(VECTOR, 4, seed=2).next(9))


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_a_million_transitions_take_the_bytes_of_their_fields():
    """Observation (17), action (6) and reward of HalfCheetah-v5, and two flags; before, they take nothing."""
    stream = Stream(Box(-1, 1, (17,)), 1, action=Box(-1, 1, (6,)), seed=1, end=0.001)
    rollout = stream.next(10_000)
    before = anonymous_bytes()
    replay = ReplayBuffer(stream.space, stream.action, 1, "cpu", 1, capacity=1_000_000)
    replay.extend(stream.next(1))
    assert anonymous_bytes() - before < 50e6
    for _ in range(101):
        replay.extend(rollout)
    assert anonymous_bytes() - before <= 1.1 * 1_000_000 * (4 * (17 + 6 + 1) + 2)
