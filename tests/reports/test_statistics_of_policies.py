"""A policy owns its scales: a file of statistics is found by name, read once, and then part of the weights."""

import json
import shutil

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from lightning_rl import (
    PPO,
    ActionChunk,
    ActorOnly,
    EpisodeWriter,
    NoisePolicy,
    PerceptronBackbone,
    RLDataModule,
    VLAPolicy,
    load_policy,
)
from lightning_rl.extensions.datasets.dataset_statistics import DatasetStatistics
from lightning_rl.extensions.tasks.probes import TwoDoors
from lightning_rl.extensions.vla.lerobot.directory import Feature
from lightning_rl.extensions.vla.lerobot.inputs import names_of_inputs
from lightning_rl.extensions.vla.lerobot.processors import _normalizers
from lightning_rl.extensions.vla.statistics import choose, read_statistics
from lightning_rl.rollout.names import named
from tests.helpers import last, load
from tests.messages import refused
from tests.numerics.test_vla import fit

SEEN = Dict({"proprio": Box(-1, 1, (4,))})
SPAN = {"q01": [-0.5, 0.0], "q99": [0.5, 2.0]}


def made(content, tmp_path, size=2, name="s.json", **settings):
    file = tmp_path / name
    file.write_text(json.dumps(content))
    settings = {"head": "token", "num_bins": 3, "action_statistics": str(file), **settings}
    return VLAPolicy(SEEN, Box(-1, 1, (1, size)), PerceptronBackbone(), **settings)


def reach(policy):
    head = policy.head
    return (head.center - head.scale).tolist(), (head.center + head.scale).tolist()


def test_numbers_that_the_mask_leaves_out_are_not_scaled(tmp_path):
    action = {**SPAN, "mask": [True, False]}
    assert reach(made({"data": {"action": action}}, tmp_path)) == ([-0.5, -1.0], [0.5, 1.0])
    with refused(names=("3", "2")):
        made({"data": {"action": {**SPAN, "mask": [True] * 3}}}, tmp_path)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"norm_stats": {"state": {"q01": [0], "q99": [1]}, "actions": SPAN}}, None),
        ({"bridge": {"action": SPAN}, "fractal": {"action": {"min": [0], "max": [1]}}}, "bridge"),
        ({"so100": {"buffer": {"action": SPAN}}, "so101": {"buffer": {"action": {}}}}, "so100"),
    ],
)
def test_statistics_of_a_dataset_are_found_by_name(content, key, tmp_path):
    assert reach(made(content, tmp_path, statistics_key=key)) == ([-0.5, 0.0], [0.5, 2.0])


def test_statistics_of_other_names_are_refused_with_those_that_exist(tmp_path):
    several = {"bridge": {"action": SPAN}, "fractal": {"action": SPAN}}
    with refused(names=("bridge.action", "fractal.action", "statistics_key: bridge")):
        made(several, tmp_path)
    with refused(names=("statistics_key: droid", "bridge.action")):
        made(several, tmp_path, statistics_key="droid")
    with refused(names=("action", "arm.velocity")):
        made({"arm": {"velocity": SPAN}}, tmp_path)
    with refused(names=("statistics_key=bridge", "action_statistics")):
        made(several, tmp_path, action_statistics=None, statistics_key="bridge")


def test_a_constant_number_keeps_its_value_and_small_spans_are_warned_of(tmp_path):
    with refused(UserWarning, names=("s.json", "[1, 2]")):
        policy = made({"q01": [-1, 3, 0], "q99": [1, 3, 1e-4]}, tmp_path, size=3)
    low, high = reach(policy)
    assert low[1] == pytest.approx(3, abs=1e-5) == high[1]
    unit = policy.head.to_unit(torch.tensor([[[0.0, 3.0, 0.0]]]))
    assert unit[0, 1].abs() <= 1
    with refused(names=("q01", "q99", "[0]")):
        made({"q01": [2], "q99": [1]}, tmp_path, size=1)


# --- a trained policy ---


def chunks(num_envs=1):
    return ActionChunk(num_envs, TwoDoors, 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a short run, and the file that its policy read."""
    place = tmp_path_factory.mktemp("trained")
    file = place / "stats.json"
    file.write_text(json.dumps({"action": {"q01": [-1.0], "q99": [1.0]}}))
    fit(place / "run", PPO(flow(file), n_epochs=1, batch_size=8), data(), limit_val_batches=0)
    return place


def data():
    return RLDataModule(chunks, num_envs=4, buffer_size=4, total_env_steps=32, num_eval_episodes=1)


def flow(file):
    env = chunks()
    spaces = env.single_observation_space, env.single_action_space
    return VLAPolicy(*spaces, PerceptronBackbone(), head="flow", action_statistics=str(file))


@pytest.fixture
def run(trained, tmp_path):
    """Return a copy of the run; its policy names the file in the copy."""
    shutil.copytree(trained, tmp_path / "copy")
    path = last(tmp_path / "copy" / "run")
    content = load(path)
    config = content["rl_config"].replace(str(trained), str(tmp_path / "copy"))
    settings = content["lightning_rl"]["policy"][""]["settings"]
    settings["action_statistics"] = str(tmp_path / "copy" / "stats.json")
    torch.save({**content, "rl_config": config}, path)
    return tmp_path / "copy"


def acted(policy):
    space = policy.observation_space.spaces
    return policy.act({key: np.zeros(one.shape, np.float32) for key, one in space.items()})


def grow(file):
    file.write_text(json.dumps({"action": {"q01": [-0.1], "q99": [0.4]}}))


@pytest.mark.parametrize("change", [grow, lambda file: file.unlink(), lambda f: f.write_text("{")])
def test_a_checkpoint_acts_as_it_was_trained_whatever_became_of_the_file(change, run, recwarn):
    before = acted(load_policy(run / "run"))
    spaces = [getattr(chunks(), f"single_{name}_space") for name in ("observation", "action")]
    zeros = {key: torch.zeros(1, *one.shape) for key, one in spaces[0].spaces.items()}
    td = TensorDict({"observation": zeros}, [1])
    base = NoisePolicy(*spaces, checkpoint=str(run / "run")).base(td, deterministic=True)["action"]
    change(run / "stats.json")
    assert np.array_equal(before, acted(load_policy(run / "run")))
    again = NoisePolicy(*spaces, checkpoint=str(run / "run")).base(td, deterministic=True)["action"]
    assert torch.equal(base, again)
    assert not [one for one in recwarn if "statistics" in str(one.message)]


def test_other_statistics_at_a_resume_are_named_and_not_used(run):
    grow(run / "stats.json")
    with refused(UserWarning, names=(run / "stats.json", "checkpoint")):
        module = fit(
            run / "run",
            PPO(flow(run / "stats.json"), n_epochs=1, batch_size=8),
            data(),
            last(run / "run"),
            limit_val_batches=0,
        )
    assert reach(module.policy)[1] == [1.0] * 2


def earlier(run):
    """Make the checkpoint one of a version that did not save statistics."""
    path = last(run / "run")
    content = load(path)
    head = content["lightning_rl"]["policy"]["head"]["settings"]
    for name in ("center", "scale"):
        head[name] = content["state_dict"].pop(f"policy.head.{name}").tolist()
    content["lightning_rl"]["policy"][""]["settings"].pop("action_statistics")
    content["lightning_rl"].pop("contents", None)
    torch.save(content, path)


def test_a_checkpoint_of_an_earlier_version_reads_the_file_once(run):
    before, file = acted(load_policy(run / "run")), run / "stats.json"
    earlier(run)
    with refused(UserWarning, names=(file, "earlier version")):
        assert np.array_equal(before, acted(load_policy(run / "run")))
    grow(file)
    with refused(names=(file, "earlier version", "changed")):
        load_policy(run / "run")
    file.unlink()
    with refused(names=(file, "earlier version")):
        load_policy(run / "run")


# --- statistics that a dataset holds ---


def test_the_quantiles_of_a_dataset_are_those_of_all_frames(tmp_path):
    """Episodes of two kinds: their own quantiles say little of all."""
    place, actions = tmp_path / "levers", []
    for part in range(2):  # the second extends the dataset
        lever = Box(-1, 1, (1,))
        writer = EpisodeWriter(place, Box(-1, 1, (2,)), lever, fps=10, task="move")
        for number in range(4):
            for t in range(20):
                action = np.float32([(0.8 if number % 2 else -0.8 - 0.1 * part) + 0.001 * t])
                actions.append(action)
                writer.add(np.zeros(2, np.float32), action, 0.0, t == 19, False)
            writer.end_episode(np.zeros(2, np.float32), success=True)
        writer.finalise()
        found = json.loads((place / "meta/stats.json").read_text())["action"]
        for name, share in {"q01": 0.01, "q50": 0.5, "q99": 0.99}.items():
            assert found[name][0] == pytest.approx(np.quantile(actions, share), abs=1e-6)


# --- statistics of a dataset with names ---

ARM, TURNED = ("shoulder", "elbow"), ("elbow", "shoulder")
NUMBERS = {"action": SPAN, "observation.state": {"mean": [1.0, 2.0], "std": [0.1, 0.2]}}


def dataset(place, names=TURNED):
    """Write the statistics of a dataset whose elbow is its first number."""
    meta = place / "meta"
    meta.mkdir()
    features = {key: {"dtype": "float32", "shape": [2], "names": names} for key in NUMBERS}
    (meta / "info.json").write_text(json.dumps({"features": features}))
    (meta / "stats.json").write_text(json.dumps(NUMBERS))
    return place


def of_arm(file, order=ARM, head="token"):
    space = named(Box(-1, 1, (3, 2)), order)
    settings = {"head": head, "num_bins": 3, "action_statistics": str(file)}
    return VLAPolicy(SEEN, space, PerceptronBackbone(), **settings)


@pytest.mark.parametrize("file", ["", "meta/stats.json"])
def test_statistics_go_to_the_joints_of_their_names(file, tmp_path):
    place = dataset(tmp_path) / file
    with refused(UserWarning, names=("order", "elbow, shoulder", "shoulder, elbow")):
        policy = of_arm(place)
    assert reach(policy) == ([0.0, -0.5] * 3, [2.0, 0.5] * 3)
    assert reach(of_arm(place, TURNED)) == ([-0.5, 0.0] * 3, [0.5, 2.0] * 3)
    assert reach(of_arm(place, ())) == ([-0.5, 0.0] * 3, [0.5, 2.0] * 3)


def test_statistics_of_other_joints_are_refused_with_both_lists(tmp_path):
    with refused(names=("action", "wrist, elbow", "shoulder, elbow", "info.json")):
        of_arm(dataset(tmp_path, ("wrist", "elbow")))


@pytest.mark.parametrize("names", [None, ["a"], {"motors": list(ARM)}])
def test_statistics_without_names_of_their_numbers_are_read_in_their_order(names, tmp_path):
    assert reach(of_arm(dataset(tmp_path, names)))[0] == [-0.5, 0.0] * 3


def test_moments_of_observations_go_to_the_joints_of_their_names(tmp_path):
    callback = DatasetStatistics(str(dataset(tmp_path)))
    callback._statistics = read_statistics(str(tmp_path))
    policy = ActorOnly(Dict({"agent_pos": named(Box(-9, 9, (2,)), ARM)}), Box(-1, 1, (1,)))
    with refused(UserWarning, names=("observation.state", "elbow, shoulder")):
        rollout = callback._rollout(policy)
    assert rollout["observation", "agent_pos"][0, 2].tolist() == [2.0, 1.0]


def test_normalisers_of_lerobot_go_to_the_joints_of_their_names(tmp_path):
    orders = names_of_inputs(Dict({"proprio": named(Box(-9, 9, (2,)), ARM)}), {}) | {"action": ARM}
    statistics = read_statistics(str(dataset(tmp_path)))
    config = {"norm_map": {"STATE": "MEAN_STD"}}
    features = {"observation.state": Feature("STATE", (2,))}
    with refused(UserWarning, names=("observation.state", "elbow, shoulder")):
        made = _normalizers(features, config, statistics, None, str(tmp_path), orders)
    assert made["observation.state"].first.tolist() == [2.0, 1.0]


def test_a_key_of_statistics_is_a_whole_part_of_a_name():
    statistics = {"bridge.action": {"q01": 0.0}, "bridge_v2.action": {"q01": 1.0}}
    assert choose(statistics, "action", "bridge", "stats.json") == {"q01": 0.0}
