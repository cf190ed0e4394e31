import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl.algorithms.on_policy import TransitionSampler, epochs
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import (
    STEP_FIELDS,
    FinalObservationWriter,
    copy_tree,
    flat_transitions,
    next_observations,
    step_views,
    validate,
)
from lightning_rl.system import ranks
from tests.messages import refused

N, T = 3, 5
VECTOR = Box(-1, 1, (2,))


def allocate(observation=VECTOR):
    return allocate_rollout(observation, VECTOR, N, T)


def numbered():
    """A rollout in which every slot of `reward` has a number of its own, n * 100 + t."""
    rollout = allocate()
    numbers = torch.arange(N)[:, None] * 100.0 + torch.arange(T + 1)
    rollout["reward"].copy_(numbers)
    return rollout


def test_a_refused_space_deep_in_a_tree_is_found():
    with refused(names="Text"):
        allocate(Dict({"a": Dict({"instruction": gymnasium.spaces.Text(5)})}))


def test_copy_tree_refuses_an_observation_that_lacks_a_part():
    target = step_views(allocate(Dict(image=VECTOR, goal=Discrete(7))))[0]["observation"]
    with pytest.raises(KeyError):
        copy_tree(target, {"image": torch.zeros(N, 2)})


def test_what_follows_a_step_is_the_next_slot_or_the_true_end_of_the_episode():
    tree = Dict(x=Box(-1, 1, (2,), np.float32))
    rollout = allocate_rollout(tree, Discrete(2), 3, 4)
    generator = torch.Generator().manual_seed(0)
    seen = rollout["observation", "x"].uniform_(generator=generator)
    rollout["terminated"].bernoulli_(0.5, generator=generator)
    rollout["done"].copy_(rollout["terminated"])
    ends = torch.rand(seen[:, :-1].shape, generator=generator)
    writer = FinalObservationWriter(rollout)
    for t in range(ends.shape[1]):
        writer.write(t, {"x": ends[:, t]})
    found = next_observations(rollout)["x"]
    for env in range(3):
        for t in range(4):
            expected = ends[env, t] if rollout["done"][env, t] else seen[env, t + 1]
            assert torch.equal(found[env, t], expected)


@pytest.mark.parametrize("key", STEP_FIELDS)
def test_a_trailing_dimension_of_one_is_refused(key):
    rollout = allocate()
    rollout[key] = rollout[key].unsqueeze(-1)
    with refused(ValueError, names=f"'{key}'"):
        validate(rollout)


@pytest.mark.parametrize(
    ("key", "dtype"),
    [("reward", torch.float64), ("terminated", torch.float32), ("policy_version", torch.int32)],
)
def test_another_dtype_is_refused(key, dtype):
    rollout = allocate()
    rollout[key] = rollout[key].to(dtype)
    with refused(ValueError, names=(f"'{key}'", dtype)):
        validate(rollout)


def shuffled(rollout, batch_size, seed=0, keys=("reward",)):
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    sampler = TransitionSampler(flat_transitions(rollout, keys))
    (only,) = epochs(sampler, 1, batch_size, generator, prepare=lambda *_: {})
    return list(only)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 7, N * T, 100])
def test_each_transition_comes_once_and_the_bootstrap_slot_never(batch_size):
    batches = shuffled(numbered(), batch_size)
    seen = torch.cat([batch["reward"] for batch in batches])
    assert sorted(seen.tolist()) == [n * 100.0 + t for n in range(N) for t in range(T)]
    full, rest = divmod(N * T, batch_size)
    assert [len(batch["reward"]) for batch in batches] == [batch_size] * full + [rest] * (rest > 0)


def test_passes_are_shuffled_anew_and_repeat_with_the_generator():
    def order(seed):
        return torch.cat([batch["reward"] for batch in shuffled(numbered(), 4, seed)]).tolist()

    stream = torch.Generator().manual_seed(0)
    first = order(stream)
    state = stream.get_state()
    second = order(stream)
    assert first != second
    assert first != sorted(first)
    assert order(0) == first
    stream.set_state(state)
    assert order(stream) == second


def test_ranks_of_which_none_has_samples_take_no_minibatch(monkeypatch):
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "max_over_ranks", lambda number: number)
    none = torch.zeros(N, T, dtype=torch.bool)

    def sampler(mask):
        return TransitionSampler(flat_transitions(numbered(), ["reward"]), mask)

    draw = {"n_epochs": 2, "batch_size": 4, "generator": torch.Generator()}
    assert not list(epochs(sampler(none), **draw, prepare=lambda *_: {}))
    some = none.clone()
    some[0, 0] = True
    sizes = [
        [len(m) for m in epoch] for epoch in epochs(sampler(some), **draw, prepare=lambda *_: {})
    ]
    assert sizes == [[1], [1]]
