"""Numbers that are not finite, actions outside, other pictures: robomimic 38, lerobot 1144 and 1449."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from lightning_rl import MixedReplay, read_episodes, read_replay
from lightning_rl.rollout.structured_actions import StructuredActions
from tests.core.numerics.test_replay import Stream
from tests.messages import refused
from tests.reports.datasets import ACTION, STATE, make, numbers, pa, png, with_pictures

BOUNDED = Box(np.float32([-1, 0]), np.float32([1, 2]))
ACTIONS = np.float32([[0, 1], [3, 1], [-9, 1], [0, 7], [0, 0], [1, 2], [1, 2.5]])
REWARD = {"next.reward": np.ones(7, np.float32)}


def outside(path, **columns):
    return make(path, columns=numbers(7, action=ACTIONS, **REWARD, **columns))


@pytest.mark.filterwarnings("ignore:The dataset .* does not record which")
def test_actions_outside_are_clipped_and_counted_once(tmp_path):
    episodes = read_episodes(outside(tmp_path), observation_space=STATE, action_space=BOUNDED)
    with refused(UserWarning, names=("4 of 7 actions", "Box", "actions_outside: refuse")) as seen:
        actions = torch.cat([episode.action for episode in episodes])
    assert len(seen) == 1
    assert actions.tolist() == ACTIONS.clip(BOUNDED.low, BOUNDED.high).tolist()
    with refused(UserWarning, names="3 of 4"):
        assert episodes[0].action.max() <= 2


@pytest.mark.filterwarnings("ignore:The dataset .* does not record which")
def test_no_reader_learns_from_actions_outside(tmp_path):
    path = str(outside(tmp_path))
    spaces = {"observation_space": STATE, "action_space": BOUNDED}
    with refused(UserWarning, names="4 of 7"):
        replay = read_replay(read_episodes(path, **spaces), STATE, BOUNDED)
    mixed = MixedReplay(STATE, BOUNDED, 1, demonstrations=path, online_ratio=0.0)
    with refused(UserWarning, names="4 of 7"):
        mixed.extend(Stream(STATE, 1, seed=1, action=BOUNDED).next(2))
    for one in (replay, mixed):
        drawn = next(iter(one.batches(1, 200)))["action"].numpy()
        assert (drawn >= BOUNDED.low).all()
        assert (drawn <= BOUNDED.high).all()


@pytest.mark.filterwarnings("ignore:The dataset .* does not record which")
def test_they_are_refused_on_request(tmp_path):
    path = str(outside(tmp_path))
    spaces = {"observation_space": STATE, "action_space": BOUNDED, "actions_outside": "refuse"}
    with refused(names=("Episode 0", "[3.0, 1.0] at step 1")):
        list(read_episodes(path, **spaces))
    settings = {"demonstrations": path, "actions_outside": "refuse"}
    with refused(names="Episode 0"):
        MixedReplay(STATE, BOUNDED, 1, **settings)


@pytest.mark.parametrize(
    ("space", "actions", "word"),
    [
        (Discrete(2), np.array([0, 1, 0, 1, 0, 2, 0]), "the action 2 at step 1"),
        (Discrete(3, start=1), np.array([1, 2, 3, 3, 0, 1, 1]), "the action 0 at step 0"),
        (MultiDiscrete([2, 3]), np.array([[0, 2]] * 6 + [[2, 0]]), "the action [2, 0] at step 2"),
        (
            StructuredActions(Dict({"grip": Discrete(3), "move": Box(-1, 1, (1,))})),
            np.float32([[2, 0.5]] * 6 + [[0.5, 0]]),
            "the action [0.5, 0.0] at step 2",
        ),
        (Discrete(3), np.array([0, 1, 2, 0, 0, 0, np.nan]), "belongs to another env: its action"),
    ],
)
@pytest.mark.filterwarnings("ignore:The dataset .* does not record which")
def test_a_choice_that_the_space_does_not_have_is_refused(tmp_path, space, actions, word):
    make(tmp_path, columns=numbers(7, action=actions))
    with refused(names=word):
        list(read_episodes(tmp_path, action_space=space))


def test_whole_numbers_that_a_file_keeps_as_fractions_are_refused(tmp_path):
    columns = numbers(7, action=pa.array([0.0, 1.0, 0.5, 1, 1, 1, 1]))
    make(tmp_path, columns=columns, features={"action": {"dtype": "int64", "shape": [1]}})
    with refused(names=("'action'", "0.5")):
        read_episodes(tmp_path, action_space=Discrete(2))[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", ["observation.state", "action", "next.reward"])
def test_what_is_not_finite_is_blamed_on_dataset_episode_and_column(tmp_path, key, bad):
    columns = numbers(7, **{"next.reward": np.ones((7, 1), np.float32)})
    columns[key][5, 0] = bad
    make(tmp_path, columns=columns)
    episodes = read_episodes(tmp_path)
    assert len(episodes[0]) == 4
    with refused(names=("Episode 1", tmp_path, f"'{key}' at step 1")):
        episodes[1]


@pytest.mark.filterwarnings("ignore:The dataset .* does not record which")
def test_critics_are_not_given_what_is_not_finite(tmp_path):
    columns = numbers(7, **REWARD)
    columns["observation.state"][5, 0] = np.nan
    make(tmp_path, columns=columns)
    mixed = MixedReplay(STATE, ACTION, 1, demonstrations=str(tmp_path))
    stream = Stream(STATE, 1, seed=1, action=ACTION)
    with refused(names=("Episode 1", "observation.state")):
        mixed.extend(stream.next(2))


# --- pictures ---

KEY = "observation.images.front"


GENERATOR = np.random.default_rng(0)
GREY = GENERATOR.integers(0, 256, (24, 16), dtype=np.uint8)
COLOURS = GENERATOR.integers(0, 256, (24, 16, 3), dtype=np.uint8)
OPAQUE = GENERATOR.integers(0, 256, (24, 16, 4), dtype=np.uint8)


@pytest.mark.parametrize(
    ("pixels", "described", "space", "expected"),
    [
        (GREY, [24, 16, 1], (24, 16, 1), GREY[..., None]),
        (GREY, [1, 24, 16], (24, 16, 1), GREY[..., None]),
        (GREY, [24, 16, 1], (1, 24, 16), GREY[None]),
        (GREY, [24, 16], (24, 16), GREY),
        (COLOURS, [24, 16, 3], (3, 24, 16), COLOURS.transpose(2, 0, 1)),
        (OPAQUE, [24, 16, 4], (24, 16, 4), OPAQUE),
    ],
)
def test_pictures_of_other_channels_are_read(tmp_path, pixels, described, space, expected):
    pytest.importorskip("PIL", reason="makes the pictures")
    with_pictures(tmp_path, KEY, [png(pixels)] * 4, described)
    episode = read_episodes(
        tmp_path, {KEY: "observation"}, observation_space=Box(0, 255, space, np.uint8)
    )[0]
    assert np.array_equal(episode.observation[0].numpy(), expected)
    assert read_episodes(tmp_path)[0].observation["images"]["front"].dtype == torch.uint8


def test_pictures_that_are_kept_as_numbers_are_read(tmp_path):
    pixels = GENERATOR.integers(0, 256, (7, 8, 8, 3), dtype=np.uint8)
    make(tmp_path, columns=numbers(7, **{"observation.pic": pixels}))
    space = Dict({"pixels": Box(0, 255, (8, 8, 3), np.uint8)})
    keys = {"observation.pic": "observation.pixels"}
    episode = read_episodes(tmp_path, keys, observation_space=space)[0]
    assert np.array_equal(episode.observation["pixels"][:4].numpy(), pixels[:4])


def test_a_picture_that_is_none_of_the_env_is_refused_without_contradiction(tmp_path):
    pytest.importorskip("PIL", reason="makes the pictures")
    with_pictures(tmp_path / "a", KEY, [png(GREY)] * 4, [24, 16, 1])
    floats = Box(0, 1, (24, 16, 1))
    with refused(names=("pictures", "[24, 16, 1]", "float32")):
        read_episodes(tmp_path / "a", {KEY: "observation"}, observation_space=floats)
    deep = GREY.astype(np.uint16) * 257
    with_pictures(tmp_path / "b", KEY, [png(deep)] * 4, [24, 16, 1])
    with refused(names=("16 bits", "8 bits")):
        read_episodes(tmp_path / "b")[0]
