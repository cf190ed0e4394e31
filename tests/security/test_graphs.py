"""Directories of ONNX graphs that were sent: cut, mixed, or with weights elsewhere."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import PerceptronBackbone, VLAPolicy, load_policy
from lightning_rl.extensions.export.exported import places_of_weights
from lightning_rl.extensions.export.formats import export_policy
from lightning_rl.extensions.export.graph import ports_of
from tests.messages import refused
from tests.security.watch import nothing_happens

onnx = pytest.importorskip("onnx", reason="the extra `export` is not installed")
runtime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
pytest.importorskip("onnxscript", reason="the extra `export` is not installed")


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """An export, and its graph of a step as another export would have it."""
    root = tmp_path_factory.mktemp("graphs")
    torch.manual_seed(0)
    space = Dict({"proprio": Box(-1, 1, (3,), np.float32)})
    # Wide enough that its weights are external data.
    policy = VLAPolicy(space, Box(-1, 1, (2, 3)), PerceptronBackbone((64,), 4), head="flow").eval()
    export_policy(policy, ports_of(policy), "onnx", root / "first", {"versions": {}}, {}, None)
    model = onnx.load(root / "first" / "step.onnx", load_external_data=False)
    model.metadata_props[0].value = "f" * 32
    (root / "second").mkdir()
    onnx.save(model, root / "second" / "step.onnx")
    return root


@pytest.fixture
def sent(exports, tmp_path):
    shutil.copytree(exports / "first", tmp_path / "sent")
    return tmp_path / "sent"


def reseal(path, **changes):
    """Let the manifest have the digests of changed files, as a sender can."""
    manifest = json.loads((path / "export.json").read_text()) | changes
    for name in manifest["files"]:
        if (path / name).is_file():
            digest = hashlib.sha256((path / name).read_bytes()).hexdigest()
            manifest["files"][name] = digest
    (path / "export.json").write_text(json.dumps(manifest))


def cut(path, exports):
    file = path / "step.onnx.data"
    file.write_bytes(file.read_bytes()[:-64])


def cut_graph(path, exports):
    file = path / "step.onnx"
    file.write_bytes(file.read_bytes()[:-64])


def changed(path, exports):
    file = path / "step.onnx.data"
    file.write_bytes(bytes(64) + file.read_bytes()[64:])


def missing(path, exports):
    (path / "step.onnx.data").unlink()


def mixed(path, exports):
    shutil.copy(exports / "second" / "step.onnx", path)


def mixed_and_sealed(path, exports):
    mixed(path, exports)
    reseal(path)


def linked(path, exports):
    (path / "step.onnx.data").unlink()
    (path / "step.onnx.data").symlink_to(exports / "first" / "step.onnx.data")


def linked_inside(path, exports):
    (path / "step.onnx.data").rename(path / "kept")
    (path / "step.onnx.data").symlink_to("kept")


def piped(path, exports):
    (path / "step.onnx.data").unlink()
    os.mkfifo(path / "step.onnx.data")


def elsewhere(place):
    def spoil(path, exports):
        model = onnx.load(path / "step.onnx", load_external_data=False)
        tensor = next(t for t in model.graph.initializer if t.data_location)
        next(entry for entry in tensor.external_data if entry.key == "location").value = place
        onnx.save(model, path / "step.onnx")
        reseal(path)

    return spoil


def listed_elsewhere(path, exports):
    manifest = json.loads((path / "export.json").read_text())
    reseal(path, files=manifest["files"] | {"../x": "0" * 64})


def unlisted_graph(path, exports):
    reseal(path, graphs=["encoder.onnx", "../sent/step.onnx"])


def no_list(path, exports):
    reseal(path, noise={"shape": [10**12], "base64": ""})


def endless(path, exports):
    reseal(path, steps=10**12)


def deep(path, exports):
    (path / "export.json").write_text("[" * 10**5)


SPOILT = [
    (cut, ("step.onnx.data", "cut")),
    (cut_graph, ("step.onnx", "cut")),
    (changed, ("step.onnx.data", "SHA-256")),
    (missing, ("step.onnx.data", "missing")),
    (mixed, ("step.onnx", "another export")),
    (mixed_and_sealed, ("step.onnx", "export.json", "export")),
    (linked, ("step.onnx.data", "link")),
    (linked_inside, ("step.onnx.data", "link")),
    (piped, "step.onnx.data"),
    (elsewhere("/etc/passwd"), ("step.onnx", "'/etc/passwd'")),
    (elsewhere("../first/step.onnx.data"), ("step.onnx", "'../first/step.onnx.data'")),
    (elsewhere("unlisted"), ("step.onnx", "'unlisted'")),
    (elsewhere(""), ("step.onnx", "''")),
    (listed_elsewhere, "../x"),
    (unlisted_graph, "'../sent/step.onnx'"),
    (no_list, "export.json"),
    (endless, ("steps", "export.json", "[0, 10000]", 10**12)),
    (deep, "export.json"),
]


@pytest.mark.parametrize(("spoil", "names"), SPOILT)
def test_a_spoilt_directory_is_refused_by_name_before_it_is_run(
    spoil, names, sent, exports, monkeypatch
):
    spoil(sent, exports)
    opened = []
    monkeypatch.setattr(runtime, "InferenceSession", lambda *a, **k: opened.append(a))
    with nothing_happens(), refused(names=names):
        load_policy(sent)
    assert not opened


def test_weights_are_found_wherever_a_graph_may_have_them():
    def tensor(place):
        entry = onnx.StringStringEntryProto(key="location", value=place)
        return onnx.TensorProto(data_location=1, external_data=[entry])

    def node(**kwargs):
        return onnx.NodeProto(attribute=[onnx.AttributeProto(**kwargs)])

    inner = onnx.GraphProto(initializer=[tensor("inner")])
    sparse = onnx.SparseTensorProto(values=tensor("sparse"))
    model = onnx.ModelProto(
        graph=onnx.GraphProto(
            initializer=[tensor("outer")],
            sparse_initializer=[sparse],
            node=[node(t=tensor("attribute")), node(g=inner), node(tensors=[tensor("list")])],
        ),
        functions=[onnx.FunctionProto(node=[node(t=tensor("function"))])],
    )
    found = {"outer", "sparse", "attribute", "inner", "list", "function"}
    assert set(places_of_weights(model)) == found


def test_a_whole_directory_acts_wherever_it_is_copied(sent):
    policy = load_policy(sent)
    assert policy.act({"proprio": np.zeros(3, np.float32)}).shape == (2, 3)
    with refused(names=(sent, "policy")):
        load_policy(sent, policy=policy.module)
