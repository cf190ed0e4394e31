"""Columns that are films, texts, of several lengths, or missing: lerobot 3181, 2429, 2283, openpi 213."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict

from lightning_rl import EpisodeWriter, read_episodes, write_minari
from lightning_rl.extensions.datasets.label import LabelSettings, label_dataset
from tests.messages import refused
from tests.reports.datasets import ACTION, STATE, film, greys, make, numbers, pa, pq, with_film

CAMERA = "observation.images.front"


def filmed(path, **rows):
    film(
        with_film(path, CAMERA, lengths=(4, 3), begins=(0.0, 0.4), rows=rows),
        greys(*range(0, 210, 30)),
    )
    return path


def test_keys_name_a_film(tmp_path):
    episodes = read_episodes(filmed(tmp_path), {CAMERA: "observation.front"})
    assert episodes[1].observation["front"].shape == (4, 16, 16, 3)
    levels = episodes[1].observation["front"].float().mean((1, 2, 3))
    np.testing.assert_allclose(levels, [120, 150, 180, 180], atol=4)
    space = Dict({"front": Box(0, 255, (16, 16, 3), np.uint8)})
    named = read_episodes(tmp_path, {CAMERA: "observation.front"}, observation_space=space)
    assert named[0].observation["front"].shape == (5, 16, 16, 3)


@pytest.mark.parametrize("name", ["chunk_index", "file_index", "from_timestamp"])
def test_a_film_without_a_place_is_refused_on_opening(tmp_path, name):
    path = filmed(tmp_path, **{f"videos/{CAMERA}/{name}": [0, None]})
    with refused(names=("Episode 1", f"videos/{CAMERA}/{name}")):
        read_episodes(path)
    assert len(read_episodes(path, observation_space=STATE)) == 2, "without the camera"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({CAMERA: "reward"}, ("a column of video",)),
        ({"observation.state": "observation", "action": "observation"}, ("two columns the same",)),
        ({"observation.state": "observation.speed"}, ("no such part", "observation.agent_pos")),
    ],
)
def test_keys_that_would_be_ignored_are_refused(tmp_path, keys, words):
    space = Dict({"agent_pos": STATE})
    with refused(names=words):
        read_episodes(filmed(tmp_path), keys, observation_space=space)


LISTS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("key", "values", "word"),
    [
        ("next.reward", pa.array([0.0, 0, None, 0, 0, 0, 0], pa.float32()), "1 values are missing"),
        ("observation.state", pa.array([[1.0, 2]] * 6 + [None], LISTS), "1 values are missing"),
        ("observation.state", pa.array([[1.0, 2]] * 6 + [[1, None]], LISTS), "missing"),
        ("observation.state", pa.array([[1.0], [1, 2, 3]] + [[1, 2]] * 5, LISTS), "1 to 3 entries"),
        ("observation.state", pa.array([[1.0, 2, 3]] * 7, LISTS), "3 values per row"),
        ("observation.state", pa.array(["text"] * 7), "it holds string instead of numbers"),
        ("action", pa.array([[1.0], [1, 2, 3]] + [[1, 2]] * 5, LISTS), "1 to 3 entries"),
        ("complementary_info.a", pa.array([0.0, 0, None, 0, 0, 0, 0]), "1 values are missing"),
        ("next.done", pa.array([None] * 7, pa.bool_()), "missing"),
    ],
)
def test_a_column_with_holes_or_lists_of_several_lengths_is_refused(tmp_path, key, values, word):
    shape = [2] if key in ("observation.state", "action") else [1]
    described = {key: {"dtype": "bool" if "done" in key else "float32", "shape": shape}}
    make(tmp_path, columns={**numbers(7), key: values}, features=described)
    with refused(names=("Episode ", f"'{key}'", word)):
        list(read_episodes(tmp_path))


def test_a_column_that_the_file_does_not_have_is_refused(tmp_path):
    make(tmp_path, features={"next.reward": {"dtype": "float32", "shape": [1], "names": None}})
    with refused(names=("file-000.parquet", "next.reward")):
        read_episodes(tmp_path)[0]


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"fps": ...}, "fps"),
        ({"fps": 0}, "fps"),
        ({"fps": "10"}, "fps"),
        ({"features": ...}, "features"),
        ({"data_path": ...}, "data_path"),
        ({"data_path": "data/{episode_chunk}/{episode_index}.parquet"}, "data_path"),
        ({"features": {"action": {"shape": [2]}}}, "features.action"),
        ({"features": {"action": {"dtype": "float33", "shape": [2]}}}, "features.action"),
        (
            {"features": {CAMERA: {"dtype": "video", "shape": [16, 16, 3]}}, "video_path": ...},
            "video_path",
        ),
    ],
)
def test_an_info_file_that_lacks_something_is_refused_by_its_name(tmp_path, info, name):
    make(tmp_path, info=info)
    with refused(names=name):
        read_episodes(tmp_path)


@pytest.mark.parametrize("pictures", ["png", "video"])
def test_names_with_slashes_are_kept_through_joining_and_labelling(tmp_path, pictures):
    space = Dict({"arm/left": STATE, "eye/0": Box(0, 255, (64, 64, 3), np.uint8)})
    writer = EpisodeWriter(tmp_path, space, ACTION, 10, pictures=pictures)

    def seen(t):
        return {"arm/left": np.full(2, t), "eye/0": np.full((64, 64, 3), 20 * t, np.uint8)}

    for _ in range(2):
        for t in range(3):
            writer.add(seen(t), np.zeros(2), 1.0, t == 2, False, extra={"cost/time": t, "b": 0})
        writer.end_episode(seen(3), success=True)
    writer.finalise()
    label_dataset(tmp_path, LabelSettings())
    for settings in ({}, {"observation_space": space, "action_space": ACTION}):
        episode = read_episodes(tmp_path, **settings)[1]
        assert set(episode.observation) == {"arm/left", "eye/0"}
        assert episode.extra["cost/time"].tolist() == [0, 1, 2]
    if pictures == "png":
        pytest.importorskip("minari", reason="needs the extra data")
        with refused(names="slash"):
            write_minari(tmp_path / "minari", [episode], space, ACTION)
        plain = replace(episode, observation=episode.observation["arm/left"])
        write_minari(tmp_path / "minari", [plain], STATE, ACTION)
        assert read_episodes(tmp_path / "minari")[0].extra.keys() == episode.extra.keys()
        shutil.rmtree(tmp_path / "minari")
    again = EpisodeWriter(tmp_path, space, ACTION, 10, pictures=pictures)
    again.write(episode)
    again.finalise()
    assert read_episodes(tmp_path)[2].extra["cost/time"].tolist() == [0, 1, 2]


def test_two_extras_of_one_column_are_refused(tmp_path):
    writer = EpisodeWriter(tmp_path, STATE, ACTION, 10)
    extra = {"a/b": 0.0, "a_b": 0.0}
    with refused(names="column"):
        writer.add(np.zeros(2), np.zeros(2), 0.0, False, False, extra=extra)


def test_strangers_columns_with_slashes_are_read_and_labelled(tmp_path):
    zeros = np.zeros(7, np.float32)
    columns = numbers(7, **{"observation.a/b": zeros, "complementary_info.c/d": zeros + 1})
    columns["next.success"] = np.array([0, 0, 0, 1, 0, 0, 1], bool)
    make(tmp_path, columns=columns)
    label_dataset(tmp_path, LabelSettings())
    episode = read_episodes(tmp_path)[0]
    assert set(episode.observation) == {"state", "a/b"}
    assert episode.extra["c/d"].tolist() == [1, 1, 1, 1]
    (file,) = (tmp_path / "meta/episodes").rglob("*.parquet")
    assert pq.read_table(file).column("success").to_pylist() == [True, True]


SOUNDS = pa.array([[0.5] * (frame + 1) for frame in range(7)], LISTS)
NOTHING = pa.array([[]] * 7, LISTS)
STRANGE = {
    "sound": ("observation.audio.mic", SOUNDS, {"dtype": "audio", "shape": [1], "names": None}),
    "sound-without-shape": ("observation.audio.mic", SOUNDS, {"dtype": "audio"}),
    "nothing": ("observation.force", NOTHING, {"dtype": "float32", "shape": [0], "names": []}),
    "elsewhere": ("microphone", SOUNDS, {"dtype": "audio", "sampling_rate": 16000}),
    "undescribed": ("microphone", NOTHING, {}),
    "ragged": ("microphone", SOUNDS, {"dtype": "float32", "shape": [1]}),
    "text": ("note", pa.array(["a"] * 7), {"dtype": "string", "shape": [1]}),
}


@pytest.mark.parametrize(("key", "column", "feature"), STRANGE.values(), ids=STRANGE)
def test_a_column_that_nobody_reads_is_kept_by_labels_and_not_extended(
    tmp_path, key, column, feature
):
    columns = {**numbers(7), key: column, "next.success": np.array([0, 0, 0, 1, 0, 0, 1], bool)}
    statistics = {f"stats/{key}/{name}": [[0.1], [0.2]] for name in ("mean", "min")}
    make(tmp_path, columns=columns, features={key: feature}, rows=statistics, files=[1, 1])
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio/mic.wav").write_bytes(b"RIFF")
    label_dataset(tmp_path, LabelSettings())

    def kept():
        tables = [pq.read_table(file) for file in sorted((tmp_path / "data").rglob("*.parquet"))]
        (rows,) = (tmp_path / "meta/episodes").rglob("*.parquet")
        assert pq.read_table(rows).column(f"stats/{key}/mean").to_pylist() == [[0.1], [0.2]]
        assert json.loads((tmp_path / "meta/info.json").read_text())["features"][key] == feature
        assert (tmp_path / "audio/mic.wav").read_bytes() == b"RIFF"
        return [value for table in tables for value in table.column(key).to_pylist()]

    assert kept() == column.to_pylist()
    assert read_episodes(tmp_path)[0].extra.keys() >= {"advantage"}
    with refused(names=(tmp_path, key)):
        EpisodeWriter(tmp_path, Dict({"state": STATE}), ACTION, 10)
    assert kept() == column.to_pylist()


def test_a_column_that_another_program_added_to_a_dataset_of_ours_stops_its_extension(tmp_path):
    def writer():
        return EpisodeWriter(tmp_path, STATE, ACTION, 10)

    first = writer()
    for t in range(3):
        first.add(np.zeros(2), np.zeros(2), 0.0, t == 2, False)
    first.end_episode(np.zeros(2), success=True)
    first.finalise()
    (file,) = (tmp_path / "data").rglob("*.parquet")
    pq.write_table(pq.read_table(file).append_column("microphone", NOTHING[:3]), file)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    info["features"]["microphone"] = {"dtype": "audio"}
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    with refused(names=(tmp_path, "microphone")):
        writer()
    assert pq.read_table(file).column("microphone").to_pylist() == [[]] * 3
