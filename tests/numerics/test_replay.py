"""The replay buffer gives what a list of single transitions gives, index by index, and takes little more memory."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl import ReplayBuffer
from lightning_rl.buffers import replay_buffer
from lightning_rl.rollout import allocate_rollout, map_tree

VECTOR = Box(-1.0, 1.0, (3,))
PICTURE = Box(0, 255, (4, 4, 3), np.uint8)
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
        return torch.randint(
            0, 2 if like.dtype == torch.bool else 200, like.shape, generator=self.draw
        ).to(like.dtype)

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
        for key in rollout.keys(True, True):
            rollout[key] = self.random(rollout[key])
        size = (self.num_envs, steps + 1)
        rollout["terminated"], rollout["truncated"] = (
            self.chance(self.end, *size),
            self.chance(self.end, *size),
        )
        rollout["done"] = rollout["terminated"] | rollout["truncated"]
        rollout["continues"] = torch.full(size, continues and self.following is not None)
        if self.chunk:
            counts = torch.randint(1, self.chunk + 1, size, generator=self.draw)
            rollout["executed"] = torch.arange(self.chunk) < counts[..., None]
            rollout["step_reward"] = rollout["step_reward"] * rollout["executed"]
        if self.padding:
            lengths = torch.randint(1, steps + 1, (self.num_envs, 1), generator=self.draw)
            rollout["padding"] = torch.arange(steps + 1) >= lengths
        if continues and self.following is not None:
            for key, value in self.following.items():
                rollout["observation" if key is None else ("observation", key)][:, 0] = value
        observation = rollout["observation"]
        flat = {None: observation} if isinstance(observation, torch.Tensor) else observation
        self.following = {
            key: map_tree(lambda x: x[:, -1].clone(), value) for key, value in flat.items()
        }
        return rollout


class SlowReplay:
    """By definition: single transitions in lists, each with what followed it."""

    def __init__(self, num_envs, capacity):
        self.kept, self.streams = capacity // num_envs, [[] for _ in range(num_envs)]

    def extend(self, rollout):
        steps = rollout.batch_size[1] - 1
        padding = rollout.get("padding", None)
        for env, stream in enumerate(self.streams):
            if stream and not rollout["continues"][env, 0]:
                stream[-1]["goes_on"] = False
            for t in range(steps):
                at = lambda key, t=t: map_tree(lambda x: x[env, t].numpy().copy(), rollout.get(key))
                done = bool(rollout["done"][env, t])
                padded = padding is not None and bool(padding[env, t])
                rewards = rollout["step_reward" if "executed" in rollout.keys() else "reward"][
                    env, t
                ]
                before_padding = padding is not None and t + 1 < steps and bool(padding[env, t + 1])
                stream.append(
                    {
                        "observation": at("observation"),
                        "action": at(
                            "executed_action" if "intervened" in rollout.keys() else "action"
                        ),
                        "rewards": rewards.double().numpy().reshape(-1).copy(),
                        "steps": int(rollout["executed"][env, t].sum())
                        if "executed" in rollout.keys()
                        else 1,
                        "terminated": bool(rollout["terminated"][env, t]),
                        "next": at("final_observation") if done else at("observation", t + 1),
                        "goes_on": not (done or before_padding),
                        "padded": padded,
                        "intervened": bool(rollout["intervened"][env, t])
                        if "intervened" in rollout.keys()
                        else False,
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
            map_tree(
                lambda want, got: np.testing.assert_array_equal(got[row], want),
                expected[key],
                batch.get(key),
            )
        for key in ("reward", "discount"):
            np.testing.assert_allclose(batch[key][row], expected[key], rtol=2e-6, atol=2e-6)
        if "intervened" in batch.keys():
            assert bool(batch["intervened"][row]) == expected["intervened"]
    for value in batches[0].values(True, True):
        assert value.is_contiguous()
    return batches[0]


CASES = {
    "one env, one step at a time": ({"num_envs": 1}, 7, [1] * 30),
    "the same, an end at each step": ({"num_envs": 1, "end": 0.9}, 7, [1] * 30),
    "several envs": ({"num_envs": 3}, 20, [4] * 8),
    "a capacity that no rollout divides": ({"num_envs": 3}, 31, [4, 1, 7, 3, 4, 4, 2, 9]),
    "a rollout larger than the ring": ({"num_envs": 2}, 9, [3, 11, 2, 5, 13]),
    "one slot": ({"num_envs": 4}, 4, [1, 3, 1, 1]),
    "never an end": ({"num_envs": 2, "end": 0.0}, 12, [3] * 9),
    "more ends than there is room for": ({"num_envs": 8, "end": 0.9}, 400, [20] * 6),
    "chunks": ({"num_envs": 2, "chunk": 3, "action": Box(-1, 1, (3, 2))}, 12, [3] * 9),
    "a person takes over": ({"num_envs": 2, "person": True}, 12, [3] * 9),
    "padding": ({"num_envs": 3, "padding": True}, 24, [5] * 6),
    "pictures": ({"num_envs": 2, "space": PICTURE}, 10, [3] * 7),
    "a tree": ({"num_envs": 2, "space": NESTED}, 10, [3] * 7),
    "discrete": ({"num_envs": 2, "space": Discrete(5), "action": Discrete(3)}, 10, [3] * 7),
}


@pytest.mark.parametrize("storage", ["cpu", "disk"])
@pytest.mark.parametrize("case", CASES)
def test_each_index_gives_what_single_transitions_give(case, storage, tmp_path, monkeypatch):
    settings, capacity, lengths = CASES[case]
    if storage == "disk" and case not in ("more ends than there is room for", "a tree"):
        pytest.skip("the same code")
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
