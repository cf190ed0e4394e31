"""Recording: what is finished stays, whatever happens; memory does not grow; two do not mix."""

import gc
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict

from lightning_rl.extensions.datasets.directory import part_of, replacing_folders
from lightning_rl.extensions.datasets.reader import read_episodes
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from lightning_rl.system.errors import ConfigurationError
from tests.commands import killed_around_call
from tests.messages import refused


def resident():
    """The memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


pytest.importorskip("pyarrow", reason="needs the extra data")
pytest.importorskip("av", reason="needs the extra data")

SPACES = (
    Dict({"state": Box(-1, 1, (2,)), "eye": Box(0, 255, (32, 32, 3), np.uint8)}),
    Box(-1, 1, (1,)),
)


def seen(episode, t):
    eye = np.full((32, 32, 3), 20 * episode + t, np.uint8)
    return {"state": np.array([episode, t], np.float32), "eye": eye}


def record(writer, episode, length=3):
    for t in range(length):
        writer.add(seen(episode, t), np.array([t]), float(t), t == length - 1, False)
    writer.end_episode(seen(episode, length), success=True)


def number_of_episodes(path):
    with suppress(ConfigurationError):
        return len(read_episodes(path))
    with refused(names=path):
        read_episodes(path)
    return 0


def check(path, count):
    """All of the first episodes are there, whole."""
    if count == 0:
        return
    episodes = read_episodes(path, observation_space=SPACES[0], action_space=SPACES[1])
    assert len(episodes) == count
    for number, episode in enumerate(episodes):
        expected = [seen(number, t)["state"] for t in range(4)]
        np.testing.assert_array_equal(episode.observation["state"].numpy(), np.stack(expected))
        brightness = episode.observation["eye"].float().mean((1, 2, 3)).numpy()
        assert np.abs(brightness - [20 * number + t for t in range(4)]).max() < 4
        assert episode.reward.tolist() == [0, 1, 2]
        assert episode.success


def killed(path, name, at):
    """Record in a fork that kills itself around a call of a function of `os`, or `shutil`.

    Returns the episodes whose `end_episode` had returned, and whether it was killed.
    """
    reader, told = os.pipe()

    def work(count_calls):
        count_calls()
        writer = EpisodeWriter(path, *SPACES, 10)
        for episode in range(3):
            record(writer, episode)
            os.write(told, b".")
            if episode == 1:
                writer.finalise()
        writer.finalise()

    dead = killed_around_call(work, shutil if name == "copyfile" else os, name, at)
    os.close(told)
    with os.fdopen(reader, "rb") as pipe:
        return len(pipe.read()), dead


@pytest.mark.parametrize(
    ("name", "step", "least"),
    [
        ("replace", 5, 10),
        ("fsync", 19, 4),
        ("unlink", 17, 3),
        ("copyfile", 3, 3),  # while files are joined
        pytest.param("replace", 1, 50, marks=pytest.mark.slow),
        pytest.param("fsync", 2, 40, marks=pytest.mark.slow),
        pytest.param("unlink", 1, 50, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_all_finished_episodes_open_and_recording_goes_on(
    name, step, least, tmp_path
):
    kills, found = 0, set()
    for at in range(2, 400, step):
        path = tmp_path / str(at)
        finished, dead = killed(path, name, at)
        kills += dead
        count = number_of_episodes(path)
        assert count in (finished, finished + 1), "one may be finished just before it is said"
        check(path, count)
        found.add(count)
        if at % 3 == 0 or not dead:  # a recorder takes it up
            writer = EpisodeWriter(path, *SPACES, 10)
            record(writer, count)
            check(path, count + 1)
            writer.finalise()
            check(path, count + 1)
            left = {one.name for one in path.iterdir()}
            assert left == {"data", "meta", "videos"}
        shutil.rmtree(path)
        if not dead:
            break
    assert not dead, "the last one was not reached"
    assert kills >= least
    assert found >= ({0, 1, 2, 3} if name == "replace" else {3})


def test_a_rewrite_counts_once_it_is_whole(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_text("old")
    with replacing_folders(tmp_path) as target:
        (target / "data").mkdir(parents=True)
        (target / "data/a").write_text("ne")
        assert part_of(tmp_path, "data/a").read_text() == "old", "what a kill leaves now"
        (target / "data/a").write_text("new")
    assert part_of(tmp_path, "data/a").read_text() == "new"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the memory")
@pytest.mark.parametrize(
    ("pictures", "episodes", "steps"),
    [
        ("video", 5, 40),
        ("png", 5, 40),
        pytest.param("video", 10, 600, marks=pytest.mark.slow),
        pytest.param("video", 1, 6000, marks=pytest.mark.slow),
        pytest.param("png", 1, 6000, marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_and_no_tick_is_missed(pictures, episodes, steps, tmp_path):
    """Two cameras of 128 × 128 at 10 Hz: a tenth of a second for each step, ten minutes in the slow ones."""
    camera = Box(0, 255, (128, 128, 3), np.uint8)
    spaces = (Dict({"a": camera, "b": camera, "state": Box(-1, 1, (18,))}), Box(-1, 1, (4,)))
    writer = EpisodeWriter(tmp_path / "data", *spaces, 10, pictures=pictures)
    y, x = np.mgrid[:128, :128]
    slowest = after_a_while = 0.0
    gc.collect()
    gc.freeze()  # a pass over the objects of other tests takes longer than a tick
    for _ in range(episodes):
        for t in range(steps):
            frame = np.stack([2 * x + 3 * t, 2 * y + t, x + y + 5 * t], -1).astype(np.uint8)
            seen = {"a": frame, "b": frame[::-1], "state": np.full(18, t)}
            # Others may have the core meanwhile, and another thread encodes.
            begin = time.thread_time()
            writer.add(seen, np.zeros(4), 0.0, False, t == steps - 1)
            slowest = max(slowest, time.thread_time() - begin)
            if t == min(600, steps // 2) and after_a_while == 0.0:
                after_a_while = resident()
        writer.end_episode(seen)
    assert resident() - after_a_while < 100
    assert slowest < 0.1
    length, final = read_episodes(tmp_path / "data").lengths, read_episodes(tmp_path / "data")[-1]
    assert length == [steps] * episodes
    assert np.abs(final.observation["a"][-1].int().numpy() - frame).mean() < 6
