"""Write a policy as ONNX, as a program of torch or as weights, and the report of its parity."""

import io
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.deploy.export.graph import ActingGraph, Ports, onnx_of, traced
from lightning_rl.deploy.export.metadata import as_properties
from lightning_rl.deploy.export.parity import Acts, Arrays, flat, graph_acts, parity
from lightning_rl.deploy.export.weights import MAKING, description_of, write_weights
from lightning_rl.policies import Policy
from lightning_rl.policies.base import check_weights_are_numbers
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import write_atomically

Format = Literal["onnx", "torch", "safetensors"]
"""What a policy is written as."""

SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
"""How the names of the files end. A program of `torch.export` is what the ONNX file is made of too,
so there is one way of tracing; TorchScript, the other that torch has, is deprecated by it."""


class Exported(NamedTuple):
    """What was written.

    Attributes:
        files: the policy first.
        report: of its parity, see `parity`; None where it was not compared.
    """

    files: list[Path]
    report: dict[str, Any] | None


def export_policy(
    policy: Policy,
    ports: Ports,
    kind: Format,
    path: Path,
    metadata: Mapping[str, Any],
    making: Mapping[str, Any],
    read_again: Callable[[Path], Policy],
) -> Exported:
    """Write a policy, and compare what was written with it.

    Args:
        policy: on the CPU.
        ports: of it.
        kind: of the file.
        path: of the file; others lie beside it.
        metadata: of it; inside an ONNX file, beside the others as JSON.
        making: what makes the policy again, beside its weights.
        read_again: makes the policy of a file of weights.

    Raises:
        ConfigurationError: for a policy that this format cannot hold, a package that is missing,
            weights that are not finite numbers, and an export that acts otherwise than the policy;
            then the files are there, to look at.
    """
    check_weights_are_numbers(policy)
    beside = description_of(path)
    files = [path]
    if kind == "safetensors":
        write_weights(policy, path)
        _write_json(beside, {**metadata, MAKING: making})
        files += [beside, *_write_adapters(policy, path)]
        acts = _acting_by(lambda: read_again(path))
    elif kind == "torch":
        content, graph = io.BytesIO(), ActingGraph(policy, ports)
        torch.export.save(traced(graph), content)
        write_atomically(path, lambda file: file.write(content.getvalue()))
        _write_json(beside, metadata)
        files.append(beside)
        acts = graph_acts(ports, _torch_runner(path))
    else:
        runtime, graph = onnxruntime(), ActingGraph(policy, ports)
        content_of_onnx = onnx_of(traced(graph), graph, as_properties(metadata))
        write_atomically(path, lambda file: file.write(content_of_onnx))
        acts = graph_acts(ports, _onnx_runner(runtime, path, ports))
    reference = policy if kind == "safetensors" else graph.policy  # in float32, as the graph is
    dtype = str(reference.autocast_dtype or torch.float32).removeprefix("torch.")
    said = {"format": kind, "versions": metadata["versions"], "computed_in": dtype}
    report = said | parity(reference, acts)
    files.append(path.with_name(f"{path.name}.parity.json"))
    _write_json(files[-1], report)
    _refuse_differing(path, report)
    return Exported(files, report)


def onnxruntime() -> Any:
    """Return the library.

    Raises:
        ConfigurationError: where it is not installed.
    """
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        raise ConfigurationError(
            "An ONNX file is compared with torch by onnxruntime, which is not installed: pip "
            f"install 'lightning-rl[export]'. ({error})"
        ) from error


def _acting_by(read: Callable[[], Policy]) -> Callable[[], Acts]:
    policy = read()

    def make() -> Acts:
        acting = TrainedPolicy(policy)
        return lambda observation: flat(acting.act(observation))

    return make


def _torch_runner(path: Path) -> Callable[[Arrays], Arrays]:
    program = torch.export.load(path).module()

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            outputs = program({name: torch.from_numpy(one) for name, one in inputs.items()})
        return {name: one.numpy() for name, one in cast(dict[str, Tensor], outputs).items()}

    return run


def _onnx_runner(runtime: Any, path: Path, ports: Ports) -> Callable[[Arrays], Arrays]:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in ports.outputs]

    def run(inputs: Arrays) -> Arrays:
        outputs: list[np.ndarray] = session.run(names, inputs)
        return dict(zip(names, outputs, strict=True))

    return run


def _write_adapters(policy: Policy, path: Path) -> list[Path]:
    """Write the adapters of peft in a policy as peft does, each into a directory of its own."""
    found: dict[str, Any] = {}
    for name, module in policy.named_modules():
        # The outermost: what is inside of it passes such questions on.
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and hasattr(module, "peft_config") and hasattr(module, "save_pretrained"):
            found[name] = module
    directories = []
    for number, module in enumerate(found.values()):
        directories.append(path.with_name(f"{path.stem}.adapter{number or ''}"))
        # By "auto" peft would ask a hub about the base model.
        module.save_pretrained(directories[-1], save_embedding_layers=False)
    return directories


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, allow_nan=False)
    write_atomically(path, lambda file: file.write(text.encode()))


def _refuse_differing(path: Path, report: Mapping[str, Any]) -> None:
    """Refuse an export that acts otherwise.

    Raises:
        ConfigurationError: naming the parts of the action, and by how much.
    """
    differing = [
        f"{name} by {one['largest_difference']:.3g}"
        if "largest_difference" in one
        else f"{name} in {1.0 - one['equal']:.2%} of the choices"
        for name, one in report["actions"].items()
        if not one["passed"]
    ]
    if differing:
        raise ConfigurationError(
            f"{path} acts otherwise than the policy in torch, on {report['observations']:,} "
            f"observations: {', '.join(differing)}; {report['tolerance']:g} are allowed, in units "
            f"of half the range of an action. Do not use it; {path.name}.parity.json says more."
        )
