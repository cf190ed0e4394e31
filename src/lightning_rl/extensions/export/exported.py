"""Write a policy of chunks as a directory of ONNX graphs, and open it as a policy."""

import base64
import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.errors import check_range, import_extra, is_plain_name, require
from lightning_rl.extend.files import open_file, read_json, write_atomically
from lightning_rl.extend.policies import RNG, noise_for
from lightning_rl.extensions.export.graph import (
    ACTION,
    NEXT_X,
    OBSERVATION,
    STEP,
    STEP_NOISE,
    STEP_NUMBER,
    Ports,
    X,
    chain_of,
    graphs_of,
    onnx_of,
    traced,
)
from lightning_rl.extensions.export.metadata import described
from lightning_rl.extensions.export.parity import Arrays, Dtype, flat, graph_acts, parity
from lightning_rl.extensions.vla.weights import one_message

MANIFEST, EXPORT_ID = "export.json", "export_id"
"""Name of the manifest, by which `load_policy` knows a directory; property of graphs: its id."""

MISSING = "ONNX files need onnx and onnxruntime: pip install -e '.[export]'."
"""Message without these packages."""

MOST_STEPS = 10_000
"""Maximum steps of a chain in a manifest; a longer one might never end."""

CALLS, ROWS = 8, (7, 1)
"""Batches of each size in the comparison, and their sizes: 64 observations."""

GRAPH_TOLERANCES = {"float32": 1e-4, "float16": 5e-2}
"""Allowed difference of a graph's outputs, in units of the largest; it adds up along the graphs."""

CURE = "Export the policy again, or copy the whole directory again."
"""Last sentence of a refusal."""


class ExportedPolicy(Policy):
    """A policy whose graphs run in ONNX Runtime, from a `directory` of `rl-cli export`.

    A chain of steps begins with the fixed noise of the export; `deterministic=False` draws it.

    Raises:
        ConfigurationError: see `check_files`; also for a damaged manifest.
    """

    has_critic = has_entropy = False
    fixed_noise: Tensor

    def __init__(self, directory: Path) -> None:
        with one_message(f"{directory / MANIFEST} describes no export"):
            manifest = read_json(directory / MANIFEST, directory)
            check_files(directory, manifest["files"], manifest["graphs"], manifest["id"])
            boxes: dict[str, Any] = {port["name"]: _box(port) for port in manifest["observations"]}
            keys = {name.removeprefix(f"{OBSERVATION}."): box for name, box in boxes.items()}
            (action,) = manifest["actions"]
            super().__init__(boxes.get(OBSERVATION) or gymnasium.spaces.Dict(keys), _box(action))
            numbers = np.frombuffer(base64.b64decode(manifest["noise"]["base64"]), "<f4")
            noise = torch.from_numpy(numbers.reshape(manifest["noise"]["shape"]).copy())
            self.register_buffer("fixed_noise", noise, persistent=False)
            self.steps = int(manifest["steps"])
            check_range(
                f"steps in {directory / MANIFEST}", self.steps, minimum=0, maximum=MOST_STEPS
            )
            self.graphs = {
                Path(name).stem: onnx_graph(directory / name) for name in manifest["graphs"]
            }

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        rows = td.batch_size[0]
        noise = noise_for(self, td, deterministic, generator)
        if noise is None:
            noise = self.fixed_noise.expand(rows, *self.fixed_noise.shape)
        values = flat(td["observation"].cpu(), OBSERVATION)
        begin = noise.cpu().reshape(rows, *self.fixed_noise.shape).numpy()
        *_, (_, outputs) = run_graphs(self.graphs, values, begin, self.steps)
        action = torch.from_numpy(outputs[ACTION]).to(self.version.device)
        return td.update({"action": action, "sample_log_prob": action.new_zeros(rows)})

    def draw_noise(self, batch: Any, generator: RNG = None) -> Tensor:
        noise = torch.empty(*batch, self.fixed_noise.numel(), device=self.version.device)
        return noise.normal_(generator=generator)

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        raise ConfigurationError("An exported policy is not trained: train its checkpoint.")

    get_value = evaluate_actions


def run_graphs(
    graphs: Mapping[str, Callable[[Arrays], Arrays]], values: Arrays, noise: np.ndarray, steps: int
) -> Iterator[tuple[str, Arrays]]:
    """Run graphs in order, the step `steps` times; yield the name and the outputs of each run.

    `values` [N, ...] are an observation by the names of inputs; `noise` [N, S, ...] is the initial
    noise and the noise of the first steps. The last run returns `action`.
    """
    for name in (name for name in graphs if name != STEP):
        outputs = graphs[name](values)
        values = values | outputs
        yield name, outputs
    x, *step_noises = np.moveaxis(noise, 1, 0)
    for number in range(steps):
        # The last step of a DDPM adds no noise.
        step_noise = step_noises[number] if number < len(step_noises) else np.zeros_like(x)
        numbers = np.full(len(x), number)
        outputs = graphs[STEP](values | {X: x, STEP_NUMBER: numbers, STEP_NOISE: step_noise})
        x = outputs[NEXT_X]
        yield STEP, outputs


def onnx_graph(path: Path) -> Callable[[Arrays], Arrays]:
    """Open an ONNX file in ONNX Runtime, on the CPU."""
    runtime = import_extra("onnxruntime", MISSING)
    options = runtime.SessionOptions()
    # onnxruntime would take all cores of the machine.
    options.intra_op_num_threads = options.inter_op_num_threads = torch.get_num_threads()
    # The provider is named, as a graph on a GPU would differ from torch on the CPU.
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs, outputs = (
        [port.name for port in p] for p in (session.get_inputs(), session.get_outputs())
    )

    def run(values: Arrays) -> Arrays:
        arrays = session.run(outputs, {name: values[name] for name in inputs})
        return dict(zip(outputs, arrays, strict=True))

    return run


# --- write a directory ---


def write_directory(
    policy: Policy,
    ports: Ports,
    directory: Path,
    metadata: Mapping[str, Any],
    header: dict[str, Any],
) -> dict[str, Any]:
    """Write graphs, manifest and parity report, which begins with `header`; return the report.

    Raises:
        ConfigurationError: see `export_policy`.
    """
    directory.mkdir()
    head, graphs, identity = chain_of(policy), graphs_of(policy, ports), uuid.uuid4().hex
    for name, graph in graphs.items():
        program = onnx_of(traced(graph), graph, {EXPORT_ID: identity}, header["weights"])
        program.save(directory / f"{name}.onnx", external_data=True)
    noise = torch.zeros(1) if head is None else head.fixed_noise.view(head.noise_shape).cpu()
    text = base64.b64encode(noise.numpy().astype("<f4").tobytes()).decode()
    manifest = {
        **metadata,
        "observations": [described(port) for port in ports.inputs],
        "actions": [described(port) for port in ports.outputs],
        "id": identity,
        "graphs": [f"{name}.onnx" for name in graphs],
        "steps": 0 if head is None else head.steps,
        "noise": {"shape": list(noise.shape), "base64": text},
    }
    _seal(directory, manifest)
    report = {**header, "computed_in": "float32"} | _parity(
        policy, ports, graphs, ExportedPolicy(directory), header["weights"]
    )
    write_json(directory / "parity.json", report)
    _seal(directory, manifest)  # with the report
    return report


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values as JSON."""
    text = json.dumps(content, indent=2, allow_nan=False)
    write_atomically(path, lambda file: file.write(text.encode()))


def _seal(directory: Path, manifest: dict[str, Any]) -> None:
    files = manifest.setdefault("files", {})
    names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
    files |= {name: digest_of(directory / name) for name in names if name not in files}
    write_json(directory / MANIFEST, manifest)


def _parity(
    policy: Policy, ports: Ports, graphs: dict[str, Any], exported: ExportedPolicy, dtype: Dtype
) -> dict[str, Any]:
    """Return the report of `parity`, with graphs, times of single observations and memory."""
    in_torch = {name: partial(run_in_torch, graph) for name, graph in graphs.items()}
    parts: dict[str, Any] = {
        name: {"largest_difference": 0.0, "milliseconds": 0.0} for name in graphs
    }

    def run(values: Arrays) -> Arrays:
        rows = len(next(iter(values.values())))
        noise = exported.fixed_noise.numpy()[None].repeat(rows, 0)
        actual_runs = run_graphs(exported.graphs, values, noise, exported.steps)
        for name, expected in run_graphs(in_torch, values, noise, exported.steps):
            part, begin = parts[name], time.perf_counter()
            _, actual = next(actual_runs)
            part["milliseconds"] += 1e3 * (time.perf_counter() - begin) * (rows == 1) / CALLS
            for key, value in actual.items():
                scale = max(1.0, np.abs(expected[key]).max())
                difference = np.abs(expected[key].astype(np.float64) - value).max() / scale
                part["largest_difference"] = max(part["largest_difference"], float(difference))
        return {ACTION: actual[ACTION]}

    report = parity(policy, graph_acts(ports, run), dtype, (CALLS, ROWS))
    for part in parts.values():
        part["passed"] = part["largest_difference"] <= GRAPH_TOLERANCES[dtype]
    status = Path("/proc/self/status")  # of Linux
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "")
    return {**report, "graphs": parts, "peak_memory_bytes": peak and 1024 * int(peak[1])}


def run_in_torch(module: Any, values: Arrays) -> Arrays:
    """Return the outputs [N, ...] of a module of named tensors."""
    with torch.no_grad():
        outputs = module({name: torch.from_numpy(array) for name, array in values.items()})
    return {name: output.numpy() for name, output in outputs.items()}


# --- checks of a directory that was sent ---


def check_files(
    directory: Path, files: Mapping[str, str], graphs: list[str], identity: str
) -> None:
    """Refuse files of another or a damaged export; `files` has the SHA-256 by name.

    Raises:
        ConfigurationError: with the name of the file.
    """
    # Before ONNX Runtime, which would open any file that a graph names for its weights.
    for name, digest in files.items():
        path = directory / name
        require(
            is_plain_name(name) and not path.is_symlink(),
            f"{path} is a link, or not in the directory of its export: it is not opened. {CURE}",
        )
        require(
            path.is_file() and digest_of(path) == digest,
            f"{path} is missing, cut, changed or of another export: its SHA-256 is not that in "
            f"{MANIFEST}. {CURE}",
        )
    onnx = import_extra("onnx", MISSING)
    for name in graphs:
        require(name in files, f"{directory / MANIFEST} lists no file '{name}'. {CURE}")
        with open_file(directory / name, directory, 2**28) as file:
            model = onnx.load_model_from_string(file.read())
        export_id = {entry.key: entry.value for entry in model.metadata_props}.get(EXPORT_ID)
        require(
            export_id == identity,
            f"{directory / name} is of export {export_id}, but {MANIFEST} of {identity}. {CURE}",
        )
        for place in places_of_weights(model):
            require(
                place in files,
                f"{directory / name} has weights in '{place}', but only files that {MANIFEST} "
                f"lists are opened: {', '.join(files)}. {CURE}",
            )


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_file(path, path.parent, 2**36) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def places_of_weights(message: Any) -> Iterator[str]:
    """Yield the files of a graph's external weights, also in attributes, subgraphs, functions."""
    if message.DESCRIPTOR.name == "TensorProto":
        places = {entry.key: entry.value for entry in message.external_data}
        if message.data_location or places:
            yield places.get("location", "")
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in [value] if hasattr(value, "DESCRIPTOR") else value:
                yield from places_of_weights(child)


def _box(port: Mapping[str, Any]) -> gymnasium.spaces.Box:
    dtype: Any = np.dtype(str(port["dtype"])).type
    # JSON has no infinity: null, here NaN, is no bound.
    low, high = (
        np.nan_to_num(np.array(port[name], np.float64), nan=none)
        for name, none in (("low", -np.inf), ("high", np.inf))
    )
    shape = tuple(map(int, port["shape"]))
    low, high = (np.broadcast_to(bound, shape).astype(dtype) for bound in (low, high))
    return gymnasium.spaces.Box(low, high, shape, dtype)
