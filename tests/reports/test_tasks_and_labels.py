"""Tasks within an episode, labels of joined datasets: lerobot-dataset-visualizer 62, lerobot 1158."""

import warnings

import numpy as np
import pytest

from lightning_rl import EpisodeWriter, read_episodes, write_minari
from lightning_rl.extensions.datasets.label import LabelSettings, label_dataset
from tests.messages import refused
from tests.reports.datasets import ACTION, STATE, make, numbers, pa, pq

SUCCESS = np.array([0, 0, 0, 1, 0, 0, 0], bool)


def test_tasks_of_frames_are_kept_in_copies(tmp_path):
    make(tmp_path / "source", tasks=("reach", "grasp"), task_index=[0, 0, 1, 1, 1, 1, 1])
    source = read_episodes(tmp_path / "source")
    assert source[0].tasks == ("reach", "reach", "grasp", "grasp")
    assert [(one.task, len(one.tasks)) for one in source] == [("reach", 4), ("grasp", 0)]
    writer = EpisodeWriter(tmp_path / "copy", STATE, ACTION, fps=10)
    for episode in source:
        writer.write(episode)
    writer.finalise()
    (file,) = (tmp_path / "copy/data").rglob("*.parquet")
    assert pq.read_table(file).column("task_index").to_pylist() == [0, 0, 1, 1, 1, 1, 1]
    (file,) = (tmp_path / "copy/meta/episodes").rglob("*.parquet")
    assert pq.read_table(file).column("tasks").to_pylist() == [["reach", "grasp"], ["grasp"]]
    pytest.importorskip("minari", reason="needs the extra data")
    write_minari(tmp_path / "minari", source, STATE, ACTION)
    for copy in (tmp_path / "copy", tmp_path / "minari"):
        assert [one.tasks for one in read_episodes(copy)] == [one.tasks for one in source]


def test_a_task_that_the_table_does_not_have_is_refused(tmp_path):
    make(tmp_path, task_index=[0, 0, 0, 0, 7, 7, 7])
    with refused(names=("Episode 1", "task [7]", "tasks.parquet")):
        read_episodes(tmp_path)[1]


def test_an_episode_of_several_tasks_is_judged_by_episodes_of_the_same(tmp_path):
    success = np.array([0, 0, 0, 1, 0, 0, 1], bool)
    index = [0, 0, 1, 1, 0, 0, 0]
    make(
        tmp_path,
        columns=numbers(7, **{"next.success": success}),
        tasks=("a", "b"),
        task_index=index,
    )
    label_dataset(tmp_path, LabelSettings())
    returns = [one.extra["return"].tolist() for one in read_episodes(tmp_path)]
    np.testing.assert_allclose(returns[0], [-3 / 7, -2 / 7, -1 / 7, 0], rtol=1e-6)
    np.testing.assert_allclose(returns[1], [-2 / 5, -1 / 5, 0], rtol=1e-6)  # the longest has 3


def test_who_only_passes_the_goal_has_failed_as_where_it_plays_and_a_warning_says_so(tmp_path):
    success = np.array([0, 1, 1, 0, 0, 0, 1], bool)
    make(tmp_path / "lerobot", columns=numbers(7, **{"next.success": success}))
    dataset = read_episodes(tmp_path / "lerobot")
    with refused(UserWarning, names=(tmp_path / "lerobot", "1 of 2", "rl-cli label --success")):
        assert [one.success for one in dataset] == [False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [one.success for one in dataset] == [False, True], "one warning is enough"
    assert dataset.successes() == [False, True]
    pytest.importorskip("minari", reason="needs the extra data")
    write_minari(tmp_path / "minari", dataset, STATE, ACTION)
    dataset = read_episodes(tmp_path / "minari")
    read = dataset._storage.get_episodes

    def passing(numbers):
        parts = [dict(part) for part in read(numbers)]
        for part in parts:
            part["infos"] = part["infos"] | {"success": np.roll(part["infos"]["success"], -1)}
        return parts

    dataset._storage.get_episodes = passing
    assert dataset.successes() == [False, False]
    with refused(UserWarning, names=(tmp_path / "minari", "1 of 2")):
        assert [one.success for one in dataset] == [False, False]


@pytest.mark.parametrize(
    "restarts",
    [
        {"index": [0, 1, 2, 3, 0, 1, 2]},
        {"index": [0, 1, 2, 3, 0, 1, 2], "rows": {"dataset_from_index": [0, 0], "dataset_to_index": [4, 3]}},
        {"index": [9] * 7},
        {"index": [0, 1, 2, 3, 0, 1, 2], "rows": {"episode_index": [0, 0]}, "episode_index": [0] * 7},
    ],
    ids=["index", "and bounds", "one index", "and episodes"],
)  # fmt: skip
def test_labels_go_to_rows_by_their_place_and_not_by_their_index(tmp_path, restarts):
    columns = numbers(7, **{"next.success": SUCCESS})
    make(tmp_path, columns=columns, files=[1, 1], **restarts)
    label_dataset(tmp_path, LabelSettings(), success=[0], failure=[1])
    good, bad = (one.extra["reward"].tolist() for one in read_episodes(tmp_path))
    np.testing.assert_allclose(good, [-1 / 7, -1 / 7, -1 / 7, 0], rtol=1e-6)
    np.testing.assert_allclose(bad, [-1 / 7, -1 / 7, -4 / 7], rtol=1e-6)
    assert [one.success for one in read_episodes(tmp_path)] == [True, False]


def test_an_episode_without_steps_gets_no_labels_and_takes_none(tmp_path):
    make(tmp_path, (4, 0, 3), numbers(7, **{"next.success": SUCCESS}))
    with refused(UserWarning, names=("episodes", "(1)")):
        label_dataset(tmp_path, LabelSettings())
    with refused(UserWarning, names=("episodes", "(1)")):
        episodes = read_episodes(tmp_path)
    assert episodes[1].extra["reward"][-1] < -0.5
    assert [one.success for one in episodes] == [True, False]


def test_columns_of_text_do_not_keep_a_dataset_from_being_labelled(tmp_path):
    texts = {key: pa.array(["go"] * 7) for key in ("observation.note", "complementary_info.note")}
    described = {key: {"dtype": "string", "shape": [1], "names": None} for key in texts}
    make(tmp_path, columns=numbers(7, **{"next.success": SUCCESS}, **texts), features=described)
    with refused(UserWarning, names=("columns", "observation.note")):
        label_dataset(tmp_path, LabelSettings())
    with refused(UserWarning, names="observation.note"):
        episode = read_episodes(tmp_path)[0]
    assert episode.observation.shape == (5, 2)
    assert "note" not in episode.extra
    (file,) = (tmp_path / "data").rglob("*.parquet")
    assert pq.read_table(file).column("observation.note").to_pylist() == ["go"] * 7, "kept"
    with refused(names="string"):
        read_episodes(tmp_path, {"observation.note": "observation"})


def test_success_that_the_table_and_the_column_say_differently_is_refused(tmp_path):
    columns = numbers(7, **{"next.success": SUCCESS})
    make(tmp_path, columns=columns, rows={"success": [False, False]})
    with refused(names=("Episode 0", "contradicts itself", "rl-cli label")):
        read_episodes(tmp_path)[0]
