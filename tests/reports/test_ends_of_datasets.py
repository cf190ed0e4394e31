"""What a dataset says about time and ends: read, or refused (hil-serl 20, lerobot 1861, 4143, Minari)."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import EpisodeWriter, read_episodes, read_replay, write_minari
from lightning_rl.extensions.datasets.episode import Episode, Episodes
from tests.messages import assert_names, refused
from tests.reports.datasets import ACTION, STATE, film, greys, make, numbers, with_film

LAST = np.array([0, 0, 0, 1, 0, 0, 1], bool)
NEVER = np.zeros(7, bool)
DENSE = np.full(7, 0.5, np.float32)


@pytest.mark.parametrize(
    ("columns", "ends", "terminal"),
    [
        ({"next.done": LAST, "next.truncated": LAST}, None, False),
        ({"next.done": LAST, "next.truncated": NEVER}, None, True),
        ({"next.done": LAST, "next.terminated": NEVER}, None, False),
        ({"next.done": LAST, "next.terminated": LAST}, None, True),
        ({"next.truncated": NEVER}, None, True),
        ({"next.terminated": NEVER, "next.truncated": NEVER}, None, False),
        ({"terminated": LAST}, None, True),
        ({"next.done": LAST}, None, False),
        ({"next.done": NEVER, "next.success": LAST}, None, False),
        ({"next.done": LAST, "next.success": LAST}, None, True),
        ({"next.success": NEVER}, None, False),
        ({"next.done": LAST}, "terminated", True),
        ({}, "terminated", True),
        ({"next.done": LAST, "next.success": LAST}, "truncated", False),
        ({"next.done": LAST[:, None].astype(np.float32), "next.truncated": LAST[:, None]}, None, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_an_end_is_what_the_columns_say_and_never_what_the_reward_hints(
    tmp_path, columns, ends, terminal
):
    make(tmp_path, columns=numbers(7, **{"next.reward": DENSE}, **columns))
    for episode in read_episodes(tmp_path, ends=ends):
        last = [False] * (len(episode) - 1)
        assert episode.terminated.tolist() == [*last, terminal]
        assert episode.truncated.tolist() == [*last, not terminal]


def test_an_end_may_be_both(tmp_path):
    make(tmp_path, columns=numbers(7, **{"next.terminated": LAST, "next.truncated": LAST}))
    episode = read_episodes(tmp_path)[1]
    assert episode.terminated[-1]
    assert episode.truncated[-1]


@pytest.mark.parametrize("flag", ["terminated", "truncated", "done"])
def test_an_end_before_the_last_step_is_refused(tmp_path, flag):
    early = LAST | (np.arange(7) == 1)
    make(tmp_path, columns=numbers(7, **{f"next.{flag}": early}))
    with refused(names=("Episode 0", flag, "step 1", "2 steps")):
        read_episodes(tmp_path)[0]


@pytest.mark.parametrize(
    "columns",
    [
        {"next.done": NEVER, "next.terminated": LAST},
        {"next.done": NEVER, "next.truncated": LAST},
        {"next.done": LAST, "next.terminated": NEVER, "next.truncated": NEVER},
        {"next.done": np.full(7, 0.5, np.float32)},
        {"next.done": np.where(LAST, np.nan, 0.0)},
    ],
)
def test_flags_that_contradict_are_refused(tmp_path, columns):
    make(tmp_path, columns=numbers(7, **columns))
    with refused(names=("Episode 0", str(tmp_path))):
        read_episodes(tmp_path)[0]


def test_ends_beside_a_dataset_that_says_it_itself_is_refused(tmp_path):
    make(tmp_path, columns=numbers(7, **{"next.terminated": LAST}))
    with refused(names=("next.terminated", "remove ends")):
        read_episodes(tmp_path, ends="truncated")


def test_the_rule_is_said_once_on_opening(tmp_path, caplog):
    make(tmp_path / "said", columns=numbers(7, **{"next.terminated": LAST}))
    list(read_episodes(tmp_path / "said"))
    assert [m for m in caplog.messages if "terminated" in m] == [
        f"Dataset {tmp_path / 'said'}: an episode is terminated if next.terminated is true, else truncated."
    ]
    make(tmp_path / "assumed")
    with refused(UserWarning, names=("truncated", "ends", "keys: {<column>: terminated}")):
        read_episodes(tmp_path / "assumed")


# --- time ---


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"timestamp": np.array([0, 1, 3, 4, 0, 1, 2]) / 10}, "timestamp"),
        ({"timestamp": np.array([0, 1, 2, 3, 0, 1, 2]) / 20}, "10 frames per second"),
        ({"timestamp": np.array([0, 1, np.nan, 3, 0, 1, 2]) / 10}, "timestamp"),
        ({"frame_index": [0, 1, 3, 4, 0, 1, 2]}, "frame_index 3 after 1"),
        ({"frame_index": [0, 2, 1, 3, 0, 1, 2]}, "out of order"),
        ({"rows": {"length": [4, 2]}}, "its length is 2"),
        ({"rows": {"length": [4, None]}}, "has no length"),
        ({"episode_index": [0, 0, 0, 1, 1, 1, 1]}, "damaged"),
        ({"info": {"total_episodes": 3}}, "3 episodes in info.json"),
    ],
)
def test_rows_that_contradict_the_clock_or_the_table_are_refused(tmp_path, settings, word):
    make(tmp_path, **settings)
    with refused(names=word):
        list(read_episodes(tmp_path))


def test_indices_kept_as_lists_of_one_are_numbers(tmp_path):
    index = {name: np.array([[0], [1], [2]]) for name in ("frame_index", "index")}
    index |= {name: np.zeros((3, 1), np.int64) for name in ("episode_index", "task_index")}
    make(tmp_path, (3,), timestamp=np.array([[0], [0.1], [0.2]]), **index)
    assert len(read_episodes(tmp_path)[0]) == 3


def test_an_episode_without_steps_is_left_out_with_a_warning(tmp_path):
    make(tmp_path, (4, 0, 3), numbers(7, **{"next.reward": DENSE, "next.terminated": LAST}))
    with refused(UserWarning, names=("episodes", "(1)")):
        episodes = read_episodes(tmp_path)
    assert [len(episode) for episode in episodes] == episodes.lengths == [4, 3]
    assert len(read_replay(episodes, STATE, ACTION)) == 7


def test_an_index_error_inside_read_surfaces():
    class Broken(Episodes):
        path, fps, lengths = None, None, [1, 1]

        def read(self, index):
            raise IndexError("inside")

        def spaces(self):
            raise NotImplementedError

    for use in (list, lambda episodes: episodes[:], lambda episodes: episodes[0]):
        with pytest.raises(IndexError, match="inside"):
            use(Broken())


# --- films ---

KEY = "observation.image"


def filmed(path, lengths, begins, ends, levels, **settings):
    place = with_film(path, KEY, lengths=lengths, begins=begins, ends=ends, **settings)
    film(place, greys(*levels))
    space = Dict({"agent_pos": STATE, "pixels": Box(0, 255, (16, 16, 3), np.uint8)})
    return read_episodes(path, observation_space=space)


def test_frames_are_those_at_the_timestamps(tmp_path):
    late = np.array([2, 3, 4, 0, 1], np.float32) / 10
    episodes = filmed(tmp_path, (3, 2), [0.0, 0.5], [0.5, 0.7], range(0, 210, 30), timestamp=late)
    for episode, expected in zip(episodes, ([60, 90, 120, 120], [150, 180, 180]), strict=True):
        levels = episode.observation["pixels"].float().mean((1, 2, 3))
        np.testing.assert_allclose(levels, expected, atol=4)


def test_a_film_that_is_shorter_than_its_rows_does_not_show_the_next_episode(tmp_path):
    for name, ends in {"said": [0.3, 0.6], "wrong": [0.4, 0.7], "unsaid": [None, None]}.items():
        with refused(names=("Episode 0", KEY, "episode 1 begins at 0.3 s")):
            filmed(tmp_path / name, (4, 3), [0.0, 0.3], ends, range(0, 180, 30))
    episodes = filmed(tmp_path / "last", (4, 3), [0.0, 0.4], [0.4, 0.6], range(0, 210, 30))
    with refused(names=("Episode 1", KEY, "lasts 0.2 s")):
        episodes[1]


# --- copies ---


@pytest.mark.parametrize("pictures", ["png", "video"])
def test_a_copy_does_not_know_more_than_its_source(tmp_path, pictures):
    """Of two episodes the first has its final observation, in the source and in each copy."""
    space = Dict({"agent_pos": STATE, "pixels": Box(0, 255, (64, 64, 3), np.uint8)})

    def seen(t):
        return {"agent_pos": np.full(2, t), "pixels": np.full((64, 64, 3), 20 * t, np.uint8)}

    writer = EpisodeWriter(tmp_path / "source", space, ACTION, 10, "push", pictures)
    for final in (seen(3), None):
        for t in range(3):
            writer.add(seen(t), np.zeros(2), np.nan, False, t == 2)
        writer.end_episode(final)
    for finalised in (False, True):
        if finalised:
            writer.finalise()
        source = read_episodes(tmp_path / "source")
        assert [episode.final_known for episode in source] == [True, False]
    copy = EpisodeWriter(tmp_path / "copy", space, ACTION, 10, pictures=pictures)
    for episode in source:
        copy.write(episode)
    copy.finalise()
    copies = [read_episodes(tmp_path / "copy")]
    if pictures == "png":
        pytest.importorskip("minari", reason="needs the extra data")
        write_minari(tmp_path / "minari", source, space, ACTION)
        copies.append(read_episodes(tmp_path / "minari"))
    for episodes in copies:
        assert [episode.final_known for episode in episodes] == [True, False]
        assert [episode.success for episode in episodes] == [None, None]
        for one, other in zip(source, episodes, strict=True):
            assert torch.equal(one.observation["agent_pos"], other.observation["agent_pos"])
            assert other.reward.isnan().all()


def test_a_copy_names_the_rule_by_which_its_ends_were_read(tmp_path, caplog):
    make(tmp_path / "source", columns=numbers(7, **{"next.reward": DENSE}))
    copied = tmp_path / "source"
    for name in ("copy", "again"):
        writer = EpisodeWriter(tmp_path / name, STATE, ACTION, 10)
        for episode in read_episodes(copied, ends=None if name == "again" else "truncated"):
            writer.write(episode)
        writer.finalise()
        copied = tmp_path / name
        caplog.clear()
        assert read_episodes(copied)[0].end_rule == "every episode is truncated (ends)"
        assert_names(caplog.messages[0], "copied", "truncated (ends)")
    pytest.importorskip("minari", reason="needs the extra data")
    write_minari(tmp_path / "minari", read_episodes(copied), STATE, ACTION)
    assert read_episodes(tmp_path / "minari")[0].end_rule == "every episode is truncated (ends)"


# --- Minari ---


def by_minari(path, **fields):
    """Write one episode of five steps as Minari's buffer would, with fields that deviate."""
    storage = pytest.importorskip("minari.dataset.minari_storage", reason="needs the extra data")
    from minari.data_collector.episode_buffer import EpisodeBuffer

    episode = {
        "observations": np.zeros((6, 2), np.float32),
        "actions": np.zeros((5, 2), np.float32),
        "rewards": np.zeros(5),
        "terminations": np.zeros(5, bool),
        "truncations": np.arange(5) == 4,
        "infos": {},
        **fields,
    }
    path.mkdir()
    made = storage.MinariStorage.new(path / "data", STATE, ACTION)
    made.update_episodes([EpisodeBuffer(id=0, **episode)])
    return path


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rewards": np.zeros(3)}, ("5 terminations", "3 steps")),
        (
            {"observations": np.zeros((5, 2), np.float32)},
            ("5 rewards", "5 entries in its observation instead of 6"),
        ),
        ({"terminations": np.arange(5) == 2}, ("terminated is true at step 2",)),
        ({"truncations": np.zeros(4, bool)}, ("4 truncations",)),
        ({"infos": {"success": np.zeros(3, bool)}}, ("info 'success'",)),
        ({"observations": np.full((6, 2), np.nan, np.float32)}, ("nan", "'observation' at step 0")),
    ],
)
def test_an_episode_of_minari_that_contradicts_itself_is_refused(tmp_path, fields, words):
    path = by_minari(tmp_path / "data", **fields)
    with refused(names=("Episode 0", *words)):
        read_episodes(path)[0]


def test_of_minari_an_episode_without_a_flag_was_cut_and_columns_of_one_are_numbers(tmp_path):
    flags = {name: np.zeros((5, 1), bool) for name in ("terminations", "truncations")}
    path = by_minari(tmp_path / "data", rewards=np.ones((5, 1)), **flags)
    episode = read_episodes(path)[0]
    assert episode.reward.shape == episode.terminated.shape == (5,)
    assert episode.truncated.tolist() == [False] * 4 + [True]
    with refused(names=("ends", "terminated and truncated")):
        read_episodes(path, ends="terminated")


def test_infos_of_minari_that_are_not_read_are_named_once(tmp_path):
    infos = {"note": ["a", "b", "c", "d", "e"], "height": np.ones(5), "few": np.ones(2)}
    episodes = read_episodes(by_minari(tmp_path / "data", infos=infos))
    with refused(UserWarning, names=("infos", "few, note")) as seen:
        assert [set(episode.extra) for episode in [*episodes, *episodes]] == [{"height"}] * 2
    assert len(seen) == 1


@pytest.mark.parametrize(
    "parts", [{"observation": torch.zeros(5, 2)}, {"action": torch.zeros(3, 2)}, {"tasks": ("a",)}]
)
def test_a_writer_refuses_an_episode_whose_parts_do_not_fit(tmp_path, parts):
    flags = torch.arange(5) == 4
    fields = {"observation": torch.zeros(6, 2), "action": torch.zeros(5, 2), **parts}
    fields |= {"reward": torch.zeros(5), "terminated": flags, "truncated": flags}
    episode = Episode(**fields, success=None, intervened=flags, task="")
    (part,) = parts
    writer = EpisodeWriter(tmp_path / "data", STATE, ACTION, 10)
    with refused(names=("5 rewards", part)):
        writer.write(episode)
    pytest.importorskip("minari", reason="needs the extra data")
    with refused(names=("5 rewards", part)):
        write_minari(tmp_path / "m", [episode], STATE, ACTION)


def test_an_episode_is_a_plain_dataclass_with_one_task_by_default():
    flat = torch.zeros(1)
    episode = Episode(flat, flat, flat, flat > 0, flat > 0, None, flat > 0, "push")
    assert (episode.tasks, episode.final_known) == ((), True)
