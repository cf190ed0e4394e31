"""Write a policy as ONNX, as a `torch.export` program or as weights, with a parity report."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.checkpoints import TrainedPolicy
from lightning_rl.extend.errors import require
from lightning_rl.extend.files import write_atomically, writing
from lightning_rl.extend.policies import check_weights_are_numbers
from lightning_rl.extensions.export.exported import (
    onnx_graph,
    run_in_torch,
    write_directory,
    write_json,
)
from lightning_rl.extensions.export.graph import (
    ActingGraph,
    Ports,
    is_in_graphs,
    onnx_of,
    traced,
    unwrapped,
)
from lightning_rl.extensions.export.metadata import as_properties
from lightning_rl.extensions.export.parity import Acts, Dtype, flat, graph_acts, parity
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
    dtype: Dtype = "float32",
) -> Exported:
    """Write a policy that is on the CPU; `path` appears only if it acts as the policy does.

    Args:
        policy: the policy.
        ports: its inputs and outputs.
        kind: format of the file.
        path: path of the file, or of a new directory; other files are written next to it.
        metadata: plain values, written into the ONNX file, or as JSON next to other formats.
        construction: description from which the policy is rebuilt, apart from the weights.
        read_again: loads the policy from a file of weights.
        dtype: type of the weights in an ONNX file.

    Raises:
        ConfigurationError: if the format cannot hold the policy, a package is missing, weights are
            not finite, or the export acts differently.
    """
    check_weights_are_numbers(policy)
    is_directory = kind == "lerobot" or (kind == "onnx" and is_in_graphs(policy))
    require(not (is_directory and path.exists()), f"{path} exists; give a new directory's path.")
    header = {"format": kind, "versions": metadata["versions"], "weights": dtype}
    if kind == "onnx" and is_directory:
        return _export_graphs(policy, ports, path, metadata, header)
    with _complete(path) as target:
        files, description = [target], description_of(target)
        if kind == "safetensors":
            write_weights(policy, target)
            write_json(description, {**metadata, CONSTRUCTION: construction})
            files += [description, *_write_adapters(policy, target)]
            acts = _acting_by(lambda: read_again(target))
        elif kind == "lerobot":
            directory = lerobot_policy(policy)
            directory.save_directory(str(target))
            acts = _acting_by(lambda: directory.read_saved(str(target)))
        elif kind == "torch":
            graph = ActingGraph(policy, ports)
            files += [_write_program(graph, target, metadata)]
            acts = graph_acts(ports, partial(run_in_torch, torch.export.load(target).module()))
        else:
            graph = ActingGraph(policy, ports)
            onnx_of(traced(graph), graph, as_properties(metadata), dtype).save(target)
            acts = graph_acts(ports, onnx_graph(target))
        # A graph is in float32.
        reference = graph.policy if kind in ("torch", "onnx") else policy
        computed_in = str(reference.autocast_dtype or torch.float32).removeprefix("torch.")
        report = {**header, "computed_in": computed_in, **parity(reference, acts, dtype)}
        files.append(target.with_name(f"{target.name}.parity.json"))
        write_json(files[-1], report)
        _refuse_differing(path, report)
    return Exported([path.with_name(file.name) for file in files], report)


def _export_graphs(
    policy: Policy, ports: Ports, path: Path, metadata: Any, header: Any
) -> Exported:
    with _complete(path) as target:
        report = write_directory(policy, ports, target, metadata, header)
        _refuse_differing(path, report)
    return Exported([path, path / "parity.json"], report)


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary directory, whose files move to their places at the end."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the move is a rename.
    with TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        yield Path(folder, path.name)
        for part in sorted(Path(folder).iterdir()):
            place = path.parent / part.name
            # A new directory is whole or absent; an adapter's may be there from an earlier export.
            merges = part.is_dir() and place.is_dir()
            for entry in part.iterdir() if merges else [part]:
                entry.replace(place / entry.name if merges else place)


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


def _write_program(graph: ActingGraph, path: Path, metadata: Mapping[str, Any]) -> Path:
    # In memory first: `write_atomically` then leaves a whole file or none.
    content = io.BytesIO()
    torch.export.save(traced(graph), content)
    write_atomically(path, lambda file: file.write(content.getvalue()))
    write_json(description_of(path), metadata)
    return description_of(path)


def _acting_by(read: Callable[[], Policy]) -> Callable[[], Acts]:
    policy = read()

    def make() -> Acts:
        acting = TrainedPolicy(policy)
        return lambda observation: flat(acting.act(observation))

    return make


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


def _refuse_differing(path: Path, report: Mapping[str, Any]) -> None:
    differing = [
        f"{name} by {part['largest_difference']:.3g}"
        if "largest_difference" in part
        else f"{name} in {1.0 - part['equal']:.2%} of the choices"
        for name, part in (report["actions"] | report.get("graphs", {})).items()
        if not part["passed"]
    ]
    if differing:
        raise ConfigurationError(
            f"{path} was not written, because it would give other actions than the policy in "
            f"torch, on {report['observations']:,} observations: {', '.join(differing)}; the "
            f"tolerance is {report['tolerance']:g}, in units of half the range of an action."
        )
