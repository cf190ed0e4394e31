"""True final observations: a row for each episode that ended, found again from every slice of a rollout."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl.algorithms.rollout_evaluation import write_values
from lightning_rl.buffers.segments import rollout_from, rollout_state
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import (
    LOOK_EVERY,
    FinalObservations,
    FinalObservationWriter,
    check_finite,
    clear_final_observations,
    map_tree,
    next_observations,
)
from tests.helpers import assert_same
from tests.messages import refused
from tests.numerics.test_ends import Mill, collector_of
from tests.policies import SUM_OF_OBSERVATION


def as_on_an_accelerator(rollout):
    """Force the rule for devices other than the CPU."""
    writer = FinalObservationWriter(rollout)
    writer._on_cpu = False
    return writer


N, T = 4, 37
PLAIN = Box(-9, 9, (3,), np.float32)
TREE = Dict({"image": Box(0, 255, (2, 2), np.uint8), "arm": Dict({"q": PLAIN})})


def numbered(space, seed=0):
    """A rollout without final observations, with random ends; and those, dense [N, T, ...]."""
    torch.manual_seed(seed)
    rollout = allocate_rollout(space, Discrete(2), N, T)
    map_tree(lambda field: field.copy_(100 * torch.rand(field.shape)), rollout.get("observation"))
    for key in ("terminated", "truncated"):
        rollout[key][:, :-1] = torch.rand(N, T) < 0.15
    torch.logical_or(rollout["terminated"], rollout["truncated"], out=rollout["done"])
    finals = map_tree(
        lambda field: (100 * torch.rand(field[:, :-1].shape)).to(field.dtype),
        rollout.get("observation"),
    )
    return rollout, finals


def write(rollout, finals, writer=None):
    writer = writer or FinalObservationWriter(rollout)
    for t in range(T):
        writer.write(t, map_tree(lambda field, t=t: field[:, t].clone(), finals))
    writer.finish()


def written(space, seed=0):
    rollout, finals = numbered(space, seed)
    write(rollout, finals)
    return rollout, finals


def expected_successors(rollout, finals):
    """By definition, from the dense ones, of the same rows and steps."""
    done = rollout["done"][:, :-1]

    def after(observation, final):
        ended = done.view(*done.shape, *[1] * (observation.dim() - 2))
        return torch.where(ended, final, observation[:, 1:])

    return map_tree(after, rollout.get("observation"), finals)


def plain(tree):
    return map_tree(lambda field: field, tree)


CUTS = {
    "whole": (slice(None), slice(None)),
    "some envs": (slice(1, 3), slice(None)),
    "the first steps": (slice(None), slice(None, 9)),
    "later steps": (slice(None), slice(5, 20)),
    "envs in another order": (torch.tensor([2, 0]), slice(None)),
    "both": (slice(2, None), slice(11, None)),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("space", [PLAIN, TREE], ids=["tensor", "tree"])
def test_each_slice_of_a_rollout_finds_its_own(space, cut):
    rollout, finals = written(space)
    rows, steps = cut
    part = rollout[rows][:, steps]
    following = slice(steps.start, None if steps.stop is None else steps.stop - 1)
    theirs = map_tree(lambda field: field[rows][:, following], finals)
    for copy in (part, part.clone(), part.to("cpu"), rollout_from(rollout_state(part))):
        assert_same(plain(next_observations(copy)), plain(expected_successors(part, theirs)))


def test_rollouts_that_are_joined_are_refused_and_parts_of_one_are_not():
    (one, finals), (other, _) = written(PLAIN), written(PLAIN, 1)
    parts = torch.cat([one[2:], one[:2]])
    joined = map_tree(lambda field: torch.cat([field[2:], field[:2]]), finals)
    assert_same(next_observations(parts), expected_successors(parts, joined))
    with refused(ValueError, names=("allocate_rollout", "next_observations(rollout)")):
        next_observations(torch.cat([one, other]))


def test_memory_doubles_is_kept_and_never_exceeds_a_row_per_step():
    storage = FinalObservations(torch.zeros(1, 2), initial_rows=3, max_rows=20)
    sizes = []
    for i in range(20):
        new = storage.add(1)
        storage.rows[new] = i + 1.0
        sizes.append(len(storage.rows))
    assert sizes == [4] * 3 + [8] * 4 + [16] * 8 + [21] * 5
    assert storage.rows[:, 0].tolist() == list(range(21))
    with refused(RuntimeError, names=("20 episodes", "clear_final_observations(rollout)")):
        storage.add(1)
    storage.clear()
    assert len(storage.rows) == 21
    assert storage.add(2) == slice(1, 3)


@pytest.mark.parametrize("space", [PLAIN, TREE], ids=["tensor", "tree"])
def test_where_a_look_waits_there_are_few_and_the_rows_are_the_same(space, monkeypatch):
    (one, finals), (other, _) = written(space), numbered(space)
    looks = []
    nonzero = torch.Tensor.nonzero
    monkeypatch.setattr(
        torch.Tensor, "nonzero", lambda *args, **kw: looks.append(1) or nonzero(*args, **kw)
    )
    writer = as_on_an_accelerator(other)
    for _ in range(2):
        clear_final_observations(other)
        looks.clear()
        write(other, finals, writer)
        assert len(looks) == -(-T // LOOK_EVERY)
        assert_same(rollout_state(one), rollout_state(other))


def test_what_the_cpu_knows_is_written_without_a_look_at_the_device():
    (one, finals), (other, _) = written(PLAIN), numbered(PLAIN)
    writer = FinalObservationWriter(other)
    writer._on_cpu = False
    for t in range(T):
        writer.write(t, finals[:, t], other["done"][:, t])
    assert_same(rollout_state(one), rollout_state(other))


def test_a_collector_finishes_what_was_kept_aside(monkeypatch):
    def collected():
        collector = collector_of(Mill(12), num_steps=21)
        return [rollout_state(collector.collect()) for _ in range(3)]

    expected = collected()
    assert all(state["done"].any() for state in expected)
    put_aside = FinalObservationWriter._put_aside
    monkeypatch.setattr(FinalObservationWriter, "_write_now", put_aside)
    assert_same(collected(), expected)


def test_a_truncated_episode_without_one_is_refused_and_a_failed_one_is_followed_by_zeros():
    rollout, finals = numbered(PLAIN)
    rollout["truncated"].zero_()
    rollout["done"].copy_(rollout["terminated"])
    assert_same(next_observations(rollout), expected_successors(rollout, torch.zeros_like(finals)))
    rollout["truncated"][2, 5] = rollout["done"][2, 5] = True
    rollout["terminated"][2, 5] = False
    for ask in (next_observations, lambda rollout: write_values(SUM_OF_OBSERVATION, rollout)):
        with refused(ValueError, names=("env 2", "step 5", "FinalObservationWriter(rollout)")):
            ask(rollout)


def test_one_that_is_not_finite_is_named_by_env_and_step():
    rollout, finals = numbered(PLAIN)
    env, step = (int(i) for i in rollout["done"][:, 20:].nonzero()[0])
    finals[env, 20 + step, 1] = torch.nan
    write(rollout, finals)
    with refused(
        FloatingPointError,
        names=(
            "final_observation",
            "nan",
            f"env {env}",
            f"step {20 + step}",
            "entry [1]",
            "last.ckpt",
        ),
    ):
        check_finite(rollout)
    check_finite(rollout[:, :20])  # it is of a step that was cut off
    clear_final_observations(rollout)
    check_finite(rollout)
