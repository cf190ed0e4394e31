"""Datasets that were sent: recording removes and changes nothing outside, reading only reads files."""

import os

import numpy as np
import pytest
from gymnasium.spaces import Box

from lightning_rl.offline.episodes import EpisodeWriter, read_episodes
from lightning_rl.offline.label import label_dataset
from tests.reports.datasets import refused

SPACES = Box(-1, 1, (2,)), Box(-1, 1, (1,))
MARK = ".lightning_rl_recording"


def put(path, text="mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def content(path):
    """What a directory holds: files with their bytes, links with their targets."""
    return {
        str(file.relative_to(path)): os.readlink(file) if file.is_symlink() else file.read_bytes()
        for file in path.rglob("*")
        if file.is_symlink() or file.is_file()
    }


def step(writer, last=False):
    writer.add(np.zeros(2, np.float32), np.zeros(1), 1.0, last, False)


def record(path, **settings):
    writer = EpisodeWriter(path, *SPACES, 10, **settings)
    step(writer, last=True)
    writer.end_episode(np.ones(2, np.float32), success=True)
    writer.finalise()


@pytest.mark.parametrize(
    "names",
    [
        (".lock", "data/a.txt", "videos/e.mp4", "meta/notes.txt"),  # of a run that was killed
        (".lock",),
        (".finalised/data/a.txt", "data/b.txt"),
        (".recording/a.txt",),
        (".joining/a.txt", ".lock", "config.yaml"),
        (MARK, "data/a.txt"),
    ],
)
def test_a_directory_that_is_no_dataset_keeps_all_it_holds(names, tmp_path):
    for name in names:
        put(tmp_path / name)
    before = content(tmp_path)
    refused(lambda: EpisodeWriter(tmp_path, *SPACES, 10), "and no dataset", names[0].split("/")[0])
    assert content(tmp_path) == before


def test_a_begun_dataset_that_holds_something_else_keeps_it(tmp_path):
    begun = tmp_path / "begun"
    writer = EpisodeWriter(begun, *SPACES, 10)
    step(writer)
    del writer
    put(begun / "thesis.tex")
    before = content(begun)
    refused(lambda: EpisodeWriter(begun, *SPACES, 10), "thesis.tex")
    assert content(begun) == before


@pytest.mark.parametrize("end", ["finalised", "killed", "killed while a file was written"])
def test_a_first_episode_that_was_not_finished_is_no_obstacle(end, tmp_path):
    path = tmp_path / "data"
    writer = EpisodeWriter(path, *SPACES, 10)
    step(writer)
    if end == "finalised":  # by Ctrl-C, an error of the env or a full disk
        writer.finalise()
        assert list(path.iterdir()) == []
        step(writer)  # and the writer goes on
        assert (path / MARK).is_file()
    if end.endswith("written"):
        put(path / ".tmp-1-a")
    del writer
    record(path)
    assert len(read_episodes(path)) == 1
    left = {one.name for one in path.iterdir()} - {".tmp-1-a"}
    assert left == {"data", "meta"}


def test_files_of_episodes_are_kept_whatever_the_order_of_the_table(tmp_path):
    path = tmp_path / "data"
    writer = EpisodeWriter(path, *SPACES, 10)
    for _ in range(2):
        step(writer, last=True)
        writer.end_episode(np.ones(2, np.float32), success=True)
    del writer  # without being finalised: two files
    table = path / "meta/episodes/chunk-000"
    swap = [table / f"file-00{i}.parquet" for i in range(2)]
    os.rename(swap[0], table / "a")
    os.rename(swap[1], swap[0])
    os.rename(table / "a", swap[1])
    before = content(path / "data")
    EpisodeWriter(path, *SPACES, 10)
    assert content(path / "data") == before


LINKS = ["data", "meta", "videos", ".lock", ".recording", ".joining", ".finalised", MARK]
LINKS += ["data/chunk-000", "data/chunk-000/file-000.parquet", "data/chunk-000/file-007.parquet"]
LINKS += ["meta/info.json", "meta/episodes/chunk-000/file-000.parquet", "meta/stats.json"]


@pytest.mark.parametrize("name", LINKS)
def test_links_inside_a_dataset_are_refused_for_writing(name, tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "data"
    record(path)
    place = path / name
    if place.exists():
        os.rename(place, victim)
    else:
        put(victim, "secret")
    place.symlink_to(victim)
    before = content(tmp_path)
    for write in (lambda: EpisodeWriter(path, *SPACES, 10), lambda: label_dataset(path)):
        refused(write, "is a link")
        assert content(tmp_path) == before


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    from lightning_rl.files import lock_file

    put(tmp_path / "victim", "secret")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    refused(lambda: lock_file(tmp_path / ".lock", "taken"), "is a link")
    assert (tmp_path / "victim").read_text() == "secret"


def test_a_dataset_behind_a_link_that_the_user_names_is_extended(tmp_path):
    record(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    record(tmp_path / "link")
    assert len(read_episodes(tmp_path / "data")) == 2
