"""Entries in Python refuse what the command line refuses: batches, steps, spaces, settings."""

import json

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, MultiBinary

from lightning_rl import ActorCritic, EpisodeWriter, LeRobotPolicy, read_episodes, write_minari
from lightning_rl.deploy.acting import TrainedPolicy
from tests.golden.make_lerobot import filled_in
from tests.messages import refused

TOP = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8)
BATCH = {"observation.state": torch.ones(4, 2), "observation.images.top": TOP, "task": ["push"] * 4}


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory):
    golden = filled_in(tmp_path_factory.mktemp("policies"))
    return LeRobotPolicy(path=str(golden("smolvla")))


def test_one_task_stands_for_all_rows(smolvla):
    torch.testing.assert_close(smolvla.predict(BATCH | {"task": "push"}), smolvla.predict(BATCH))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observation.images.top": TOP.movedim(-1, 1).float()}, ("numbers from", "0 to 1")),
        ({"observation.images.top": TOP.movedim(-1, 1)}, ("[4, 3, 64, 64]", "[B, H, W, 3]")),
        ({"observation.images.top": TOP.float() / 255}, ("[4, 64, 64, 3]", "[B, 3, H, W]")),
        ({"observation.state": torch.ones(4, 1)}, ("observation.state", "[4, 1]", "[B, 2]")),
        ({"observation.state": torch.ones(2)}, ("observation.state", "[2]")),
        ({"observation.state": torch.ones(3, 2)}, ("observation.state", "3", "4")),
        ({"task": ["push"] * 3}, ("task", "3")),
        ({"task": 7}, ("task", "7")),
    ],
)
def test_a_batch_of_another_form_is_refused_by_the_name_of_its_input(change, words, smolvla):
    with refused(names=words):
        smolvla.predict(BATCH | change)


@pytest.fixture(scope="module")
def policy():
    space = Dict({"state": Box(-1, 1, (2,)), "bits": MultiBinary(3)})
    return TrainedPolicy(ActorCritic(space, Box(-1, 1, (2,))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": [np.nan, 0]}, ("state", "nan", "finite")),
        ({"state": [1e300, 0]}, ("state", "1e+300", "finite")),
        ({"state": np.zeros((0, 2)), "bits": np.zeros((0, 3), int)}, ("bits", "no rows")),
        ({"bits": [9, 0, 0]}, ("bits", "9", "0 to 1")),
        ({"bits": [0.5, 0, 0]}, ("bits", "float64", "int8")),
        ({"bits": "yes"}, ("bits", "yes")),
    ],
)
def test_an_observation_that_no_env_may_return_is_refused_by_its_name(change, words, policy):
    with refused(names=words):
        policy.act({"state": np.zeros(2), "bits": np.ones(3, np.int8)} | change)


SEEN = Dict({"state": Box(-1, 1, (2,)), "rgb": Box(0, 255, (32, 32, 3), np.uint8)})
STATE, RGB = np.zeros(2), np.zeros((32, 32, 3), np.uint8)


def recorded(path, action=STATE, reward=0.0, terminated=True, success=True, **more):
    writer = EpisodeWriter(path, SEEN, Box(-1, 1, (2,)), 10, pictures=more.pop("pictures", "png"))
    settings = {name: more.pop(name) for name in ("extra", "task", "intervened") if name in more}
    seen = {"state": STATE, "rgb": RGB} | more
    writer.add(seen, action, reward, terminated, False, **settings)
    writer.end_episode(seen, success)
    writer.finalise()
    return read_episodes(path)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": np.array([np.inf, 0])}, ("observation.state", "inf")),
        ({"rgb": RGB + 0.5}, ("observation.images.rgb", "0.5", "uint8", "255")),
        ({"action": np.array([np.nan, 0])}, ("action", "nan")),
        ({"reward": np.inf}, ("next.reward", "inf")),
        ({"reward": np.ones(2)}, ("next.reward", "[2]")),
        ({"reward": "much"}, ("next.reward", "much")),
        ({"terminated": "no"}, ("next.terminated", "bool")),
        ({"terminated": 0.5}, ("next.terminated", "0.5", "bool")),
        ({"intervened": np.ones(2, bool)}, ("is_intervention", "[2]")),
        ({"extra": {"cost": np.ones(2)}}, ("cost", "[2]")),
        ({"success": "yes"}, ("success", "yes")),
        ({"success": np.nan}, ("success", "nan")),
        ({"task": 3}, ("task", "3")),
        ({"pictures": "jpg"}, ("pictures", "jpg", "video, png")),
    ],
)
def test_a_step_that_no_reader_accepts_is_refused_before_it_is_written(change, words, tmp_path):
    with refused(names=words):
        recorded(tmp_path, **change)
    assert not list(tmp_path.rglob("file-*"))


def test_arrays_of_one_number_are_numbers(tmp_path):
    one = {"reward": np.ones(1), "terminated": torch.ones(1, dtype=torch.bool)}
    episode = recorded(tmp_path, success=np.bool_(True), extra={"cost": np.ones(1)}, **one)
    assert (episode.reward.item(), episode.terminated.item(), episode.success) == (1, True, True)


def test_an_episode_has_all_its_rewards_or_none(tmp_path):
    def written(rewards):
        writer = EpisodeWriter(tmp_path, Box(-1, 1, (2,)), Box(-1, 1, (2,)), 10)
        for reward in rewards:
            writer.add(STATE, STATE, reward, False, False)
        writer.end_episode(STATE)

    written([np.nan, np.nan])
    with refused(names=("rewards", "step 1")):
        written([1.0, np.nan])


def test_actions_of_several_parts_are_no_column(tmp_path):
    parts = Dict({"arm": Box(-1, 1, (2,)), "gripper": Box(0, 1, (1,))})
    with refused(names=("Dict", "arm", "one array")):
        EpisodeWriter(tmp_path, SEEN, parts, 10)
    serialize_space = pytest.importorskip("minari.serialization").serialize_space
    write_minari(tmp_path / "minari", [recorded(tmp_path / "one")], SEEN, Box(-1, 1, (2,)))
    file = tmp_path / "minari/data/metadata.json"
    content = json.loads(file.read_text()) | {"action_space": serialize_space(parts)}
    file.write_text(json.dumps(content))
    with refused(names=("several parts", "arm", "Box")):
        read_episodes(tmp_path / "minari")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keys": {"nothing": "reward"}}, ("nothing",)),
        ({"ends": "sometimes"}, ("ends", "sometimes", "terminated")),
        ({"action_space": Box(-1, 1, (3,))}, ("action", "[2]", "[3]")),
        ({"observation_space": Dict({"speed": SEEN["state"]})}, ("speed",)),
    ],
)
def test_settings_that_do_not_fit_a_dataset_are_refused_on_opening(settings, words, tmp_path):
    recorded(tmp_path)
    with refused(names=words):
        read_episodes(tmp_path, **settings)
