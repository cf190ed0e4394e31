"""A checkpoint's replay is whole or absent, never loses the one before, and costs what is new."""

import importlib
import os
import shutil
import sys
import textwrap
from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_rl import DQN, ActorOnly, ReplayBuffer
from lightning_rl.buffers import ring_files
from lightning_rl.buffers.replay_files import Part, ReplayLog
from tests.callbacks import at_iteration
from tests.commands import killed_around_call
from tests.core.equivalence.test_own_algorithms import OFF_POLICY
from tests.core.numerics.test_replay import ACTION, CASES, NESTED, VECTOR, Stream
from tests.helpers import assert_same, assert_same_run, fit_in, last, load, make_data, train
from tests.messages import refused

CURE = (
    "Resume from another checkpoint of the run, such as best.ckpt or an iteration_*.ckpt, or start "
    "with an empty replay by --restore_replay false, which is not an exact resumption."
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The module of an algorithm in small that samples from a replay."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy_sac.py").write_text(textwrap.dedent(OFF_POLICY))
    sys.path.insert(0, str(folder))
    yield importlib.import_module("toy_sac")
    sys.path.remove(str(folder))
    del sys.modules["toy_sac"]


def run(toy, run_dir, *, ckpt_path=None, data=None, capacity=100, storage="cpu", **trainer):
    """Train in a directory: 6 iterations of 2 × 16 steps, a save after every second one."""
    seed_everything(1)
    settings = {"num_envs": 2, "total_env_steps": 192, "iterations_per_epoch": 2}
    replay = partial(ReplayBuffer, capacity=capacity, storage=storage)
    module = make_data("Pendulum-v1", replay=replay, **settings | (data or {}))
    policy = ActorOnly(module.observation_space, module.action_space, (16,), squash=True)
    model = toy.ToySAC(policy, updates=2, batch_size=16, compile=False)
    fit_in(run_dir, model, module, ckpt_path=ckpt_path, **{"limit_val_batches": 0} | trainer)


def files(run_dir, checkpoint="last.ckpt"):
    return load(run_dir / "checkpoints" / checkpoint)["RLDataModule"]["replays"][0]["files"]


def present(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints" / "replay").iterdir())


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """A run that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("whole")
    run(toy, run_dir)
    return run_dir


@pytest.mark.parametrize(("small", "largest"), [(2**18, 2**26), (700, 2000)])
@pytest.mark.parametrize(
    "case", ["several envs", "more ends than there is room for", "chunks", "padding", "a tree"]
)
def test_whatever_was_saved_when_it_goes_on_as_if_nothing_had_been(
    case, small, largest, tmp_path, monkeypatch
):
    monkeypatch.setattr(ring_files, "SMALL_PART_BYTES", small)
    monkeypatch.setattr(ring_files, "MOST_PARTS", 2**30)
    monkeypatch.setattr(ring_files, "PART_BYTES", largest)
    settings, capacity, lengths = CASES[case]
    stream = Stream(**{"space": VECTOR, "action": ACTION, **settings}, seed=3)
    make = partial(ReplayBuffer, stream.space, stream.action, stream.num_envs, "cpu")
    replay, other = make(5, capacity=capacity), None
    for i, steps in enumerate(lengths * 2):
        state = replay.state_dict(tmp_path / "one")
        torch.save(state, tmp_path / "state")  # as a checkpoint would hold it
        if i in (3, 4, 9):
            other = make(6, capacity=capacity)
            other.load_state_dict(load(tmp_path / "state"), tmp_path / "one")
        if i % 3:  # what follows a break may come with the next file
            state = replay.state_dict(tmp_path / "two")
        rollout = stream.next(steps, continues=i % 4 != 2)
        for one in (replay, other)[: 1 + (other is not None)]:
            one.extend(rollout)
        if other is not None:
            assert_same(
                *(
                    list(one.batches(2, 50, n_steps=3, gamma=0.9))[1].to_dict()
                    for one in (replay, other)
                )
            )
            other.state_dict(tmp_path / "three")
    smaller = make(5, capacity=capacity // 2)
    smaller.load_state_dict(replay.state_dict(tmp_path / "one"), tmp_path / "one")
    assert 0 < len(smaller) <= capacity // 2


@pytest.mark.parametrize("storage", ["cpu", "disk"])
def test_a_run_that_is_resumed_ends_as_uninterrupted(storage, toy, whole, tmp_path):
    run(toy, tmp_path, storage=storage, max_steps=4)
    run(toy, tmp_path, storage=storage, ckpt_path=last(tmp_path))
    assert_same_run(whole, tmp_path)
    assert present(tmp_path) == sorted(files(tmp_path))
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize("name", ["replace", "fsync", "unlink"])
def test_killed_at_any_moment_of_a_save_it_goes_on_bit_for_bit(name, toy, whole, tmp_path):
    kills, steps = 0, set()
    for at in range(2, 40, 2 if name == "fsync" else 1):  # behind a flush is before what follows
        run_dir = tmp_path / str(at)

        def save(count_calls, run_dir=run_dir):
            begin = at_iteration(3, lambda trainer: count_calls())  # between two saves
            run(toy, run_dir, callbacks=[begin, at_iteration(5, lambda trainer: os._exit(0))])

        if not killed_around_call(save, os, name, at):
            break
        kills += 1
        steps.add(load(last(run_dir))["global_step"])
        run(toy, run_dir, ckpt_path=last(run_dir))
        assert_same_run(whole, run_dir)
        assert present(run_dir) == sorted(files(run_dir)), "nothing is left behind"
        shutil.rmtree(run_dir)
    assert kills >= {"replace": 4, "fsync": 4, "unlink": 2}[name]
    assert steps == ({4} if name == "unlink" else {2, 4})


def test_checkpoints_share_files_and_what_none_names_is_removed(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(ring_files, "SMALL_PART_BYTES", 0)
    monkeypatch.setattr(ring_files, "MOST_PARTS", 2**30)
    named = {}

    def note(trainer):
        found = {
            path.name: files(tmp_path, path.name)
            for path in (tmp_path / "checkpoints").glob("*.ckpt")
        }
        named[trainer.global_step] = found, present(tmp_path)

    run(
        toy,
        tmp_path,
        capacity=150,
        checkpoint_every_n_iterations=1,
        keep_checkpoints=2,
        callbacks=[at_iteration(i, note) for i in (5, 7)],
        data={"total_env_steps": 256},
    )
    for found, there in named.values():
        assert len(found) == 3
        assert {name for names in found.values() for name in names} == set(there)
    one, two = (set(files(tmp_path, f"iteration_{i:06d}.ckpt")) for i in (7, 8))
    assert len(one & two) >= 3
    assert set(files(tmp_path)) == two
    assert set(present(tmp_path)) == one | two


def test_an_algorithm_that_trains_on_without_its_checkpoint_says_that_its_replay_is_empty(
    tmp_path, recwarn
):
    settings = {"data": {"replay": ReplayBuffer}, "model": {"algorithm": DQN, "compile": False}}
    module, data, trainer = train(tmp_path / "run", **settings)
    assert not [warning for warning in recwarn if "empty replay" in str(warning.message)]
    trainer.save_checkpoint(tmp_path / "small.ckpt", weights_only=True)
    assert not [warning for warning in recwarn if "small.ckpt" in str(warning.message)]
    with refused(UserWarning, names=("after.ckpt", "replay", "last.ckpt", "weights_only=True")):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    with refused(UserWarning, names=("empty replay", "ckpt_path")):
        fit_in(tmp_path / "on", module, data)


def test_what_cannot_be_read_may_name_anything(toy, tmp_path):
    stray = "rank0-5-9-0123456789abcdef.pt"
    foreign = tmp_path / "checkpoints" / "replay" / "of_mine.pt"

    def strew(trainer):
        (foreign.parent / stray).touch()
        foreign.touch()
        (tmp_path / "checkpoints" / "copy.ckpt").write_bytes(b"PK")

    with refused(UserWarning, names=("replay", "copy.ckpt")):
        run(toy, tmp_path, max_steps=4, callbacks=at_iteration(3, strew))
    assert stray in present(tmp_path)
    (tmp_path / "checkpoints" / "copy.ckpt").unlink()
    run(toy, tmp_path, max_steps=5, ckpt_path=last(tmp_path))
    assert stray not in present(tmp_path)
    assert foreign.exists()


@pytest.fixture
def half(toy, tmp_path):
    """A run that ended before its time."""
    run(toy, tmp_path / "half", max_steps=4)
    return tmp_path / "half"


def test_a_file_that_is_missing_or_damaged_is_named_with_what_to_do(toy, half):
    path = half / "checkpoints" / "replay" / files(half)[0]
    content = path.read_bytes()
    changed = torch.load(path)
    changed["reward",][0] += 1
    for spoil in (
        lambda: path.write_bytes(content[:-100]),
        lambda: torch.save(changed, path),
        path.unlink,
    ):
        spoil()
        with refused(names=("replay", path, CURE)):
            run(toy, half, ckpt_path=last(half))
    with refused(UserWarning, names="restore_replay"):
        run(toy, half, ckpt_path=last(half), restore_replay=False)
    run(toy, half, ckpt_path=last(half), data={"total_env_steps": 224})  # the choice was for once


def test_other_envs_and_spaces_are_refused(toy, half, monkeypatch):
    cure = ("2 envs", "data.num_envs", "4", "--data.num_envs 2", "--restore_replay false")
    with refused(names=cure):
        run(toy, half, ckpt_path=last(half), data={"num_envs": 4})
    state = load(last(half))["RLDataModule"]["replays"][0]
    other = ReplayBuffer(NESTED, ACTION, 2, "cpu", 1, capacity=100)
    names = ("observation.arm.joints", files(half)[0], "data.env", "torch.float32", "[50, 2, 3]")
    with refused(names=(*names, CURE)):
        other.load_state_dict(state, half / "checkpoints" / "replay")


def test_with_a_resume_help_penalties_and_padding_begin_or_end(tmp_path, monkeypatch):
    """Steps that lack them have zeros, in whichever file they are; other fields are refused."""
    monkeypatch.setattr(ring_files, "SMALL_PART_BYTES", 0)
    monkeypatch.setattr(ring_files, "MOST_PARTS", 2**30)
    make = partial(ReplayBuffer, VECTOR, ACTION, 2, "cpu", 1, capacity=100)
    replay, stream = make(), Stream(VECTOR, 2, seed=1)
    for i in range(4):
        rollout = stream.next(3)
        rollout["reward"] = torch.full((2, 4), float(i))
        if i % 2:
            rollout["penalty"] = torch.full((2, 4), -0.5)
            rollout["intervened"] = torch.ones(2, 4, dtype=torch.bool)
            rollout["padding"] = torch.tensor([[False, False, True, True]]).expand(2, 4)
        replay.extend(rollout)
        state, replay = replay.state_dict(tmp_path), make()
        replay.load_state_dict(state, tmp_path)
    assert len(state["files"]) == 4
    (batch,) = replay.batches(1, 500)
    helped = batch["reward"] % 2 == 1
    assert batch["intervened"].equal(helped)
    assert batch["penalty"].equal(-0.5 * helped)
    assert (len(replay), set(batch["reward"].tolist())) == (20, {0.0, 1.0, 2.0, 3.0})
    rollout = stream.next(3)
    rollout["state"] = torch.zeros(2, 4, 5)
    with refused(names=("state [5]", "data.extra_fields", "--restore_replay false")):
        replay.extend(rollout)


@pytest.mark.parametrize(
    "name",
    ["../../secret.pt", "/etc/passwd", "rank0-0-64-0123456789abcdef.pt/../x", "last.ckpt", ""],
)
def test_a_checkpoint_names_files_of_its_own_folder_only(name, tmp_path, monkeypatch):
    replay = ReplayBuffer(VECTOR, ACTION, 2, "cpu", 1, capacity=100)
    replay.extend(Stream(VECTOR, 2, seed=1).next(5))
    state = replay.state_dict(tmp_path) | {"files": [name]}
    monkeypatch.setattr(torch, "load", None)
    with refused(names=(f"'{name}'", CURE)):
        ReplayBuffer(VECTOR, ACTION, 2, "cpu", 1, capacity=100).load_state_dict(state, tmp_path)


def test_where_a_file_was_deleted_by_hand_all_are_written_again(tmp_path):
    log = ReplayLog([Part("a.pt", 0, 4, 1), Part("b.pt", 4, 8, 1), Part("c.pt", 8, 9, 1)])
    for name in ("b.pt", "c.pt"):
        (tmp_path / name).touch()
    log.forget_before(4, tmp_path)
    assert [part.name for part in log.parts] == ["b.pt", "c.pt"]
    (tmp_path / "b.pt").unlink()
    log.forget_before(4, tmp_path)
    assert log.parts == []
