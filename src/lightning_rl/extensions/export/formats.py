"""Write a policy as ONNX, as a `torch.export` program or as weights, with a parity report."""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.checkpoints import TrainedPolicy
from lightning_rl.extend.errors import import_extra, require
from lightning_rl.extend.files import write_atomically, writing
from lightning_rl.extend.policies import check_weights_are_numbers
from lightning_rl.extensions.export.graph import ActingGraph, Ports, onnx_of, traced, unwrapped
from lightning_rl.extensions.export.metadata import as_properties
from lightning_rl.extensions.export.parity import Acts, Arrays, flat, graph_acts, parity
from lightning_rl.extensions.export.weights import CONSTRUCTION, description_of, write_weights
from lightning_rl.extensions.vla.lerobot.policy import LeRobotPolicy

Format = Literal["onnx", "torch", "safetensors", "lerobot"]
"""File formats."""

SUFFIXES: dict[Format, str] = {
    **{"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"},
    "lerobot": ".lerobot",  # a directory
}
"""File suffixes; the ONNX file is made from the `torch.export` program."""


class Exported(NamedTuple):
    """The written files, policy first, and the parity report (None without a comparison)."""

    files: list[Path]
    report: dict[str, Any] | None


def export_policy(
    policy: Policy,
    ports: Ports,
    kind: Format,
    path: Path,
    metadata: Mapping[str, Any],
    construction: Mapping[str, Any],
    read_again: Callable[[Path], Policy],
) -> Exported:
    """Write a policy that is on the CPU; `path` appears only if it acts as the policy does.

    Args:
        policy: the policy.
        ports: its inputs and outputs.
        kind: format of the file.
        path: path of the file; other files are written next to it.
        metadata: plain values, written into the ONNX file, or as JSON next to other formats.
        construction: description from which the policy is rebuilt, apart from the weights.
        read_again: loads the policy from a file of weights.

    Raises:
        ConfigurationError: if the format cannot hold the policy, a package is missing, weights are
            not finite, or the export acts differently.
    """
    check_weights_are_numbers(policy)
    is_new = kind != "lerobot" or not path.exists()
    require(is_new, f"{path} exists; give the path of a new directory.")
    with _complete(path) as target:
        files, description = [target], description_of(target)
        if kind == "safetensors":
            write_weights(policy, target)
            _write_json(description, {**metadata, CONSTRUCTION: construction})
            files += [description, *_write_adapters(policy, target)]
            acts = _acting_by(lambda: read_again(target))
        elif kind == "lerobot":
            directory = lerobot_policy(policy)
            directory.save_directory(str(target))
            acts = _acting_by(lambda: directory.read_saved(str(target)))
        elif kind == "torch":
            # In memory first: `write_atomically` then leaves a whole file or none.
            content, graph = io.BytesIO(), ActingGraph(policy, ports)
            torch.export.save(traced(graph), content)
            write_atomically(target, lambda file: file.write(content.getvalue()))
            _write_json(description, metadata)
            files.append(description)
            acts = graph_acts(ports, _torch_runner(target))
        else:
            runtime, graph = onnxruntime(), ActingGraph(policy, ports)
            onnx = onnx_of(traced(graph), graph, as_properties(metadata))
            write_atomically(target, lambda file: file.write(onnx))
            acts = graph_acts(ports, _onnx_runner(runtime, target, ports))
        # A graph is in float32.
        reference = graph.policy if kind in ("torch", "onnx") else policy
        dtype = str(reference.autocast_dtype or torch.float32).removeprefix("torch.")
        header = {"format": kind, "versions": metadata["versions"], "computed_in": dtype}
        report = header | parity(reference, acts)
        files.append(target.with_name(f"{target.name}.parity.json"))
        _write_json(files[-1], report)
        _refuse_differing(path, report)
    return Exported([path.with_name(file.name) for file in files], report)


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary directory, whose files move to their places at the end."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the move is a rename.
    with TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        yield Path(folder, path.name)
        for file in filter(Path.is_file, Path(folder).rglob("*")):
            place = path.parent / file.relative_to(folder)
            place.parent.mkdir(exist_ok=True)
            file.replace(place)


def lerobot_policy(policy: Policy) -> LeRobotPolicy:
    """Return the policy inside of wrappers, if it came from a directory of LeRobot.

    Raises:
        ConfigurationError: otherwise.
    """
    inner = unwrapped(policy)
    if not isinstance(inner, LeRobotPolicy):
        raise ConfigurationError(
            f"--format lerobot writes a LeRobotPolicy, but this is a {type(inner).__name__}: "
            "choose another format."
        )
    return inner


def onnxruntime() -> Any:
    """Import onnxruntime, or raise a `ConfigurationError`."""
    return import_extra(
        "onnxruntime",
        "An ONNX file is compared with torch by onnxruntime, which is not installed: pip install "
        "-e '.[export]'.",
    )


def _acting_by(read: Callable[[], Policy]) -> Callable[[], Acts]:
    policy = read()

    def make() -> Acts:
        acting = TrainedPolicy(policy)
        return lambda observation: flat(acting.act(observation))

    return make


def _torch_runner(path: Path) -> Callable[[Arrays], Arrays]:
    # Loaded from the file, so that the comparison covers what was written.
    program = torch.export.load(path).module()

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            outputs = program({name: torch.from_numpy(array) for name, array in inputs.items()})
        return {name: tensor.numpy() for name, tensor in cast(dict[str, Tensor], outputs).items()}

    return run


def _onnx_runner(runtime: Any, path: Path, ports: Ports) -> Callable[[Arrays], Arrays]:
    options = runtime.SessionOptions()
    # onnxruntime would take all cores of the machine.
    options.intra_op_num_threads = options.inter_op_num_threads = torch.get_num_threads()
    # The providers are named, as a graph on a GPU would differ from torch on the CPU.
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in ports.outputs]

    def run(inputs: Arrays) -> Arrays:
        outputs: list[np.ndarray] = session.run(names, inputs)
        return dict(zip(names, outputs, strict=True))

    return run


def _write_adapters(policy: Policy, path: Path) -> list[Path]:
    adapters: dict[str, Any] = {}
    for name, module in policy.named_modules():
        # Use the outermost module only: inner modules may delegate these attributes.
        inside = any(name.startswith(f"{outer}.") for outer in adapters)
        if not inside and hasattr(module, "peft_config") and hasattr(module, "save_pretrained"):
            adapters[name] = module
    directories = []
    for number, module in enumerate(adapters.values()):
        directories.append(path.with_name(f"{path.stem}.adapter{number or ''}"))
        # With "auto", peft would query a hub about the base model.
        module.save_pretrained(directories[-1], save_embedding_layers=False)
    return directories


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, allow_nan=False)
    write_atomically(path, lambda file: file.write(text.encode()))


def _refuse_differing(path: Path, report: Mapping[str, Any]) -> None:
    differing = [
        f"{name} by {part['largest_difference']:.3g}"
        if "largest_difference" in part
        else f"{name} in {1.0 - part['equal']:.2%} of the choices"
        for name, part in report["actions"].items()
        if not part["passed"]
    ]
    if differing:
        raise ConfigurationError(
            f"{path} was not written, because it would give other actions than the policy in "
            f"torch, on {report['observations']:,} observations: {', '.join(differing)}; the "
            f"tolerance is {report['tolerance']:g}, in units of half the range of an action."
        )
