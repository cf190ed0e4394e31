"""Policies of chunks as several ONNX graphs: chunks equal torch's from the same noise, and a directory is whole or absent."""

import hashlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from lightning_rl import (
    LeRobotPolicy,
    PerceptronBackbone,
    RealTime,
    VLAPolicy,
    load_policy,
)
from lightning_rl.cli.app import run
from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.extensions.export import exported as directories
from lightning_rl.extensions.export.formats import export_policy
from lightning_rl.extensions.export.graph import graphs_of, is_in_graphs, ports_of, why_not_traced
from lightning_rl.extensions.export.parity import flat
from tests.golden.make_lerobot import filled_in
from tests.messages import assert_names, refused

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason="the extra `export` is not installed")

SPACE = Dict({"proprio": Box(-1, 1, (3,), np.float32)})
CHUNK = Box(np.float32([[-2, 0]] * 4), np.float32([[2, 8]] * 4))


def flow(**settings):
    torch.manual_seed(0)
    return VLAPolicy(SPACE, CHUNK, PerceptronBackbone((64,), 4), head="flow", **settings).eval()


def exported(policy, path, dtype="float32"):
    metadata = {"policy": type(policy).__name__, "versions": {}}
    return export_policy(policy, ports_of(policy), "onnx", path, metadata, {}, None, dtype)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The export of a flow."""
    path = tmp_path_factory.mktemp("graphs") / "flow"
    exported(flow(), path)
    return path


def observations(policy, rows):
    space = policy.observation_space
    space.seed(1)
    samples = [space.sample() for _ in range(rows)]
    return {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}


def assert_acts_alike(policy, path, tolerance):
    """From the fixed noise of `act`, and from drawn noise."""
    loaded, acting = load_policy(path), TrainedPolicy(policy)
    for rows in (1, 3):
        observation = observations(policy, rows)
        expected = acting.act(observation)
        width = np.maximum(1.0, np.ptp(expected))
        assert np.abs(loaded.act(observation) - expected).max() / width <= tolerance
        noise = torch.randn(rows, *policy.head.fixed_noise.shape)
        td = TensorDict({key: torch.as_tensor(value) for key, value in observation.items()}, [rows])
        with torch.no_grad():
            drawn = policy.decode(policy.features(TensorDict({"observation": td}, [rows])), noise)
        batch = TensorDict({"observation": td, "action_noise": noise}, [rows])
        found = loaded.module(batch)["action"]
        drawn = TrainedPolicy.executed(policy.action_space, drawn)
        assert (found - drawn).abs().max() / width <= tolerance
    return loaded


def test_a_flow_is_the_graphs_of_its_encoder_and_of_a_step(directory, tmp_path):
    policy = flow()
    loaded = assert_acts_alike(policy, directory, 1e-5)
    assert (loaded.observation_space, loaded.action_space) == (SPACE, CHUNK)
    draws = [loaded.act(observations(policy, 2), deterministic=False) for _ in range(2)]
    assert not np.array_equal(*draws), "the noise is drawn"
    manifest = json.loads((directory / "export.json").read_text())
    assert manifest["graphs"] == ["encoder.onnx", "step.onnx"]
    assert set(manifest["files"]) == {path.name for path in directory.iterdir()} - {"export.json"}
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest
    report = json.loads((directory / "parity.json").read_text())
    assert (report["observations"], report["passed"]) == (64, True)
    assert list(report["graphs"]) == ["encoder", "step"]
    assert all(part["milliseconds"] > 0 for part in report["graphs"].values())
    assert report["peak_memory_bytes"] > 2**20
    with refused(names=(directory, "exists")):
        exported(policy, directory)


def test_a_graph_keeps_no_path_of_the_machine_that_wrote_it(directory):
    for path in directory.iterdir():
        assert str(Path(directories.__file__).parents[2]).encode() not in path.read_bytes()


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory):
    return filled_in(tmp_path_factory.mktemp("lerobot"))


LEROBOT = ("smolvla", "smolvla_cameras", "diffusion", "diffusion_cameras")


@pytest.mark.parametrize("name", LEROBOT[1::2])
def test_graphs_in_torch_are_the_policy(name, lerobot):
    """What is traced: the same steps from the same noise, also that of each step of a DDPM."""
    policy = LeRobotPolicy(path=str(lerobot(name))).eval()
    graphs = graphs_of(policy, ports_of(policy))
    pictures = ["pictures", "prefix", "step"] if "smolvla" in name else ["encoder", "step"]
    assert list(graphs) == pictures
    observation = observations(policy, 2)
    td = TensorDict({key: torch.as_tensor(value) for key, value in observation.items()}, [2])
    noise = torch.randn(2, policy.head.fixed_noise.numel())
    with torch.no_grad():
        expected = policy.decode(policy.features(TensorDict({"observation": td}, [2])), noise)
    values = flat(observation, "observation")
    runs = {name: partial(directories.run_in_torch, graph) for name, graph in graphs.items()}
    blocks = noise.view(2, *policy.head.noise_shape).numpy()
    *_, (_, outputs) = directories.run_graphs(runs, values, blocks, policy.head.steps)
    np.testing.assert_allclose(outputs["action"], expected, rtol=0, atol=1e-5)


@pytest.mark.slow  # torch writes three graphs in ten seconds
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", LEROBOT)
def test_a_directory_of_lerobot_acts_by_graphs(name, dtype, lerobot, tmp_path):
    policy = LeRobotPolicy(path=str(lerobot(name))).eval()
    exported(policy, tmp_path / "graphs", dtype)
    assert_acts_alike(policy, tmp_path / "graphs", 1e-5 if dtype == "float32" else 1e-2)


def test_float16_halves_the_weights_of_a_graph(directory, tmp_path, capsys):
    exported(flow(), tmp_path / "half", "float16")
    assert_acts_alike(flow(), tmp_path / "half", 1e-2)
    whole, half = (
        sum(file.stat().st_size for file in path.glob("*.data"))
        for path in (directory, tmp_path / "half")
    )
    assert 0 < half < 0.6 * whole
    with pytest.raises(SystemExit):
        run(["export", "--ckpt_path", "x", "--format", "torch", "--dtype", "float16"])
    assert_names(capsys.readouterr().err, "--dtype float16", "--format onnx", "torch")


def test_a_graph_that_computes_otherwise_leaves_no_directory(tmp_path, monkeypatch):
    kept = directories.onnx_of

    def spoilt(program, graph, metadata, dtype):
        done = kept(program, graph, metadata, dtype)
        weights = done.model.graph.initializers.values()
        if "step_number" in [port.name for port in graph.ports.inputs]:
            value = max(weights, key=lambda value: value.const_value.size)
            import onnx_ir

            value.const_value = onnx_ir.tensor(value.const_value.numpy() * 1.5)
        return done

    monkeypatch.setattr(directories, "onnx_of", spoilt)
    with refused(names=(tmp_path / "flow", "action", "step", "1e-05")):
        exported(flow(), tmp_path / "flow")
    assert list(tmp_path.iterdir()) == []


def test_a_chain_in_real_time_keeps_its_single_graph_or_is_refused():
    settings = {"execution_horizon": 2, "delay_steps": 1}
    assert not is_in_graphs(flow(real_time=RealTime(method="skip", **settings)))
    reason = why_not_traced(flow(real_time=RealTime(**settings)))
    assert_names(reason, "real_time.method: guided", "--format safetensors")
