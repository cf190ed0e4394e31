"""Policies that LeRobot wrote act as LeRobot's own run did, and are refused where they would not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_rl import LeRobotPolicy
from lightning_rl.policies.lerobot.directory import read_directory
from lightning_rl.policies.lerobot.processors import Normalizer, Processors
from lightning_rl.system.errors import ConfigurationError
from tests.golden.make_lerobot import PIXELS, ROWS, TASKS, fill, pixels_of, recipes

GOLDEN = Path(__file__).parents[1] / "golden"
RECIPES = recipes()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Return a function that makes a directory with its weights, once."""
    root = tmp_path_factory.mktemp("lerobot")
    shutil.copytree(GOLDEN / "tiny_smolvlm", root / "tiny_smolvlm")

    def make(name):
        if not (root / name).exists():
            fill(GOLDEN / name, root / name)
        return root / name

    return make


@pytest.fixture
def broken(place, tmp_path):
    """Return a function that copies a directory, to be broken."""

    def make(name):
        shutil.copytree(place(name), tmp_path / name)
        shutil.copytree(GOLDEN / "tiny_smolvlm", tmp_path / "tiny_smolvlm")
        return tmp_path / name

    return make


def batch_of(name, io, *, planes):
    """The batch of LeRobot's run, with its names; pictures as planes of floats or as bytes."""
    kind, inputs, _, fields, rename = RECIPES[name]
    raw = {new: old for old, new in rename.items()}
    steps = (fields.get("n_obs_steps", 2),) if kind == "diffusion" else ()
    batch = {"task": TASKS}
    for key, shape in inputs:
        there = raw.get(key, key)
        if len(shape) == 3:
            pixels = pixels_of(key, (ROWS, *steps, *shape))
            batch[there] = pixels.float() / 255.0 if planes else pixels.movedim(-3, -1)
        else:
            batch[there] = io[there]
    return batch


def noise_in(io, policy):
    """The noise of LeRobot's run: of a DDPM also that of its steps."""
    if policy.directory.kind == "act":
        return None
    noise = io["noise"]
    if policy.directory.kind == "smolvla":
        return noise[:, : policy.backbone.network.action_steps]
    torch.manual_seed(11)
    more = [torch.randn(noise.shape) for _ in range(policy.backbone.network.noisy_steps)]
    return torch.stack([noise, *more], 1)


@pytest.mark.parametrize("name", RECIPES)
def test_inputs_and_actions_are_those_of_lerobot(name, place, tmp_path):
    """Also after it is saved: the weights and statistics keep their bits."""
    io = load_file(GOLDEN / name / "io.safetensors")
    policy = LeRobotPolicy(path=str(place(name)))
    prepared = policy.prepare(batch_of(name, io, planes=True))
    for key, value in prepared.items():
        value = value[..., ::PIXELS, ::PIXELS] if value.dim() >= 4 else value
        torch.testing.assert_close(value.float(), io[f"prepared.{key}"].float(), rtol=0, atol=1e-6)
    first = policy.backbone.network.obs_steps - 1
    steps = policy.backbone.network.action_steps
    noise = noise_in(io, policy)
    action = policy.predict(batch_of(name, io, planes=False), noise)
    wanted = io["action"][:, first : first + steps]
    torch.testing.assert_close(action, wanted, rtol=0, atol=1e-5)
    policy.save_directory(str(tmp_path / "saved"))
    for file in sorted(place(name).iterdir()):
        again = tmp_path / "saved" / file.name
        if file.suffix == ".json":
            assert json.loads(file.read_text()) == json.loads(again.read_text())
        else:
            old, new = load_file(file), load_file(again)
            assert old.keys() == new.keys()
            assert all(torch.equal(old[key], new[key]) for key in old), file.name


def test_one_denoising_step_is_that_of_lerobot(place):
    io = load_file(GOLDEN / "diffusion" / "io.safetensors")
    policy = LeRobotPolicy(path=str(place("diffusion")))
    condition = policy.backbone.of_inputs(policy.prepare(batch_of("diffusion", io, planes=True)))
    with torch.no_grad():
        network = policy.backbone.network
        found = network.unet(io["noise"], torch.tensor([3, 1]), condition.summary)
    torch.testing.assert_close(found, io["denoised"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "QUANTILES"])
def test_normalisers_follow_their_formulas_and_invert_them(mode):
    first, second = np.array([-1.0, 0.5, 2.0]), np.array([3.0, 0.7, 2.0])
    value = np.array([[0.3, 0.9, 2.5], [-2.0, 0.1, 2.0]])
    span = second if mode == "MEAN_STD" else np.where(second == first, 1e-8, second - first)
    wanted = (value - first) / (span + 1e-8)
    if mode != "MEAN_STD":
        wanted = 2 * (value - first) / span - 1
    one = Normalizer(mode, torch.tensor(first), torch.tensor(second), 1e-8)
    normal = one(torch.tensor(value))
    np.testing.assert_allclose(normal, wanted, rtol=1e-12)
    np.testing.assert_allclose(one.inverse(normal), value, rtol=1e-6)


def spoil(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


NAME = "model.action_head.bias"

WEIGHTS = {
    "missing": (lambda w: w.pop(NAME), f"1 missing: {NAME}"),
    "additional": (lambda w: w.update(more=torch.ones(1)), "1 unexpected: more"),
    "of another shape": (lambda w: w.update({NAME: torch.ones(4)}), f"another shape: {NAME}"),
    "not a number": (lambda w: w[NAME].fill_(torch.nan), "not all finite numbers: backbone"),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_wrong_weight_is_refused(kind, broken):
    path = broken("act")
    change, message = WEIGHTS[kind]
    spoil(path, change)
    with pytest.raises(ConfigurationError, match=message):
        LeRobotPolicy(path=str(path))


def test_a_cut_file_of_weights_is_refused(broken):
    path = broken("act")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigurationError, match="damaged"):
        LeRobotPolicy(path=str(path))


OPTIONS = [
    ("act", {"temporal_ensemble_coeff": 0.01}, "temporal_ensemble_coeff: 0.01"),
    ("act", {"n_obs_steps": 2}, "n_obs_steps: 2"),
    ("act", {"use_peft": True}, "use_peft: true"),
    ("act", {"vision_backbon": "resnet18"}, "'vision_backbon', which is no field.*vision_backbone"),
    ("act", {"dim_model": "wide"}, "dim_model is 'wide', not <class 'int'>"),
    ("act", {"feedforward_activation": "glu"}, "feedforward_activation is 'glu'"),
    ("act", {"n_action_steps": 9}, r"n_action_steps=9 must lie in \[1, 8\]"),
    ("act_cameras", {"vision_backbone": "resnet50"}, "supported are resnet18, resnet34"),
    ("act_cameras", {"replace_final_stride_with_dilation": True}, "final_stride_with_dilation: tr"),
    ("diffusion", {"compile_model": True}, "compile_model: true"),
    ("diffusion", {"horizon": 18}, "horizon=18 is no multiple of 4"),
    ("diffusion", {"num_inference_steps": 13}, "num_inference_steps"),
    ("smolvla", {"empty_cameras": 1}, "empty_cameras: 1"),
    ("smolvla", {"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha: true"),
    ("smolvla", {"rtc_config": {"enabled": True}}, "rtc_config"),
    ("smolvla", {"vlm_model_name": "HuggingFaceTB/SmolVLM2"}, "give the local directory as langu"),
    ("smolvla", {"type": "pi0"}, "type 'pi0', and act, diffusion, smolvla can be read"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), OPTIONS)
def test_an_option_that_is_not_done_is_refused_by_name(name, overrides, message, place):
    path = place(name) if "cameras" not in name else GOLDEN / name  # without its weights
    with pytest.raises(ConfigurationError, match=message):
        LeRobotPolicy(path=str(path), overrides=overrides)


def steps_of(path, file):
    content = json.loads((path / file).read_text())
    return content, content["steps"], lambda: (path / file).write_text(json.dumps(content))


def relative(path):
    _, steps, write = steps_of(path, "policy_preprocessor.json")
    config = {"enabled": True, "exclude_joints": [], "action_names": None}
    steps.insert(2, {"registry_name": "relative_actions_processor", "config": config})
    write()


def unknown_step(path):
    _, steps, write = steps_of(path, "policy_postprocessor.json")
    steps.append({"registry_name": "clip_processor", "config": {}})
    write()


def half_precision(path):
    _, steps, write = steps_of(path, "policy_preprocessor.json")
    steps[2]["config"]["float_dtype"] = "bfloat16"
    write()


def without_a_statistic(path):
    file = path / "policy_preprocessor_step_3_normalizer_processor.safetensors"
    state = load_file(file)
    state.pop("observation.state.std")
    save_file(state, file)


PROCESSORS = [
    (relative, "relative_actions_processor' with enabled: true"),
    (unknown_step, "'clip_processor', which is not supported"),
    (half_precision, "float_dtype: bfloat16"),
    (without_a_statistic, "no observation.state.std"),
    (lambda path: (path / "policy_postprocessor.json").unlink(), "has no policy_postprocessor.js"),
    (lambda path: next(path.glob("*unnorm*.safetensors")).unlink(), "which is not there"),
]


@pytest.mark.parametrize(("spoil", "message"), PROCESSORS)
def test_processors_that_are_not_done_are_refused(spoil, message, broken):
    path = broken("act")
    spoil(path)
    with pytest.raises(ConfigurationError, match=message):
        LeRobotPolicy(path=str(path))


def test_statistics_of_a_dataset_replace_those_of_the_directory(place, tmp_path):
    statistics = {
        "observation.state": {"mean": [1.0] * 4, "std": [2.0] * 4},
        "action": {"mean": [0.5] * 3, "std": [0.1, 0.2, 0.0]},
    }
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "stats.json").write_text(json.dumps(statistics))
    policy = LeRobotPolicy(path=str(place("act")), dataset_stats=str(tmp_path))
    batch = {
        "observation.state": torch.ones(1, 4),
        "observation.environment_state": torch.ones(1, 6),
    }
    assert (policy.prepare(batch)["observation.state"] == 0).all()
    low, high = Processors(read_directory(str(place("act"))), str(tmp_path)).action_bounds()
    torch.testing.assert_close(high[:2], torch.tensor([0.6, 0.7]))
    assert (low < high).all(), "an action that never changed keeps a width"
    action = policy.predict(batch)
    assert (action[..., 2] - 0.5).abs().max() < 1e-4
    policy.save_directory(str(tmp_path / "saved"))
    again = LeRobotPolicy(path=str(tmp_path / "saved"))
    torch.testing.assert_close(again.predict(batch), action, rtol=0, atol=1e-6)
