"""Describe an exported policy: its inputs and outputs, its run and its evaluation."""

import csv
import io
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl import ConfigurationError, Policy, VectorEnv
from lightning_rl.extend.checkpoints import CHECKPOINTS, STATE_KEY, own_version
from lightning_rl.extend.envs import bounds_of
from lightning_rl.extend.files import open_file, read_json
from lightning_rl.extensions.export.graph import NEXT_STATE, STATE, Port, Ports, unwrapped
from lightning_rl.extensions.export.weights import plain_json

MOST_METRICS = 2**30
"""Most bytes of a run's metrics.csv."""

FORMAT = 1
"""Version of the metadata; a new meaning of a key increases it."""

ENV_METADATA = (
    *("joint_names", "joint_stiffness", "joint_damping", "default_joint_pos"),
    *("observation_names", "action_names", "action_scale", "command_names"),
)
"""Keys that are copied from an env's `metadata`; mjlab uses these names."""

EVALUATED = (
    *("episodes", "avg_reward", "std_reward", "ci95", "avg_length"),
    *("success_rate", "success_ci95", "deterministic", "env_steps", "protocol"),
)
"""Keys that are copied from `evaluation.json`."""

PACKAGES = ("torch", "numpy", "gymnasium", "onnx", "onnxscript", "onnxruntime", "safetensors")
"""Packages whose versions are recorded, in addition to this one."""


def metadata_of(
    policy: Policy,
    ports: Ports,
    path: Path,
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
    env: VectorEnv | None,
) -> dict[str, Any]:
    """Return the metadata of an exported policy as plain values; `env` may be None."""
    directory, steps = directory_of(path), content[STATE_KEY].get("env_steps")
    env_metadata, manifest = {} if env is None else env.metadata, _json(directory / "run.json")
    state = next((port for port in ports.inputs if port.name == STATE), None)
    return {
        "format": FORMAT,
        "policy": type(unwrapped(policy)).__name__,
        "algorithm": _class_name(settings.get("model") or {}),
        "env": _env_name(settings),
        "deterministic": True,
        "observations": [described(port) for port in ports.inputs if port.space is not None],
        "actions": [described(port) for port in ports.outputs if port.space is not None],
        "state": state and {"input": STATE, "output": NEXT_STATE, "shape": list(state.shape)},
        "actions_executed_of_a_chunk": None
        if env is None or env.steps_per_action == 1
        else env.steps_per_action,
        "control_period": _control_period(env_metadata),
        **{name: plain_json(env_metadata[name]) for name in ENV_METADATA if name in env_metadata},
        "run": {
            "name": directory.name,
            "checkpoint": path.name,
            "env_steps": steps,
            "policy_version": int(content["state_dict"]["policy.version"]),
            **{name: plain_json(manifest.get(name)) for name in ("seed", "git_commit", "started")},
        },
        "evaluation": _evaluation(path, steps),
        "versions": versions(),
        "exported": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def directory_of(path: Path) -> Path:
    """Return the run directory of a checkpoint, or the directory of the file."""
    # A checkpoint stands in <run>/checkpoints; an export stands anywhere.
    parent = path.absolute().parent
    return parent.parent if parent.name == CHECKPOINTS else parent


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages."""
    packages = {"lightning-rl": own_version(), "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return packages


def as_properties(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata as ONNX properties: one JSON text per name."""
    return {name: json.dumps(value) for name, value in metadata.items()}


def described(port: Port) -> dict[str, Any]:
    """Return the metadata of an input or output."""
    assert port.space is not None
    dtype = str(port.dtype).removeprefix("torch.")
    description: dict[str, Any] = {"name": port.name, "shape": list(port.shape), "dtype": dtype}
    low, high = (np.asarray(bound) for bound in bounds_of(port.space))
    # Actions of a Box also get center and scale, with which a controller maps [-1, 1].
    description |= {"low": _numbers(low), "high": _numbers(high)}
    is_box = isinstance(port.space, gymnasium.spaces.Box)
    if is_box and port.name.startswith("action") and np.isfinite([low, high]).all():
        low, high = low.astype(np.float64), high.astype(np.float64)
        description |= {"center": _numbers((high + low) / 2), "scale": _numbers((high - low) / 2)}
    return description


def _numbers(bound: np.ndarray) -> Any:
    is_uniform = bound.size and (bound == bound.flat[0]).all()
    return plain_json(bound.flat[0] if is_uniform else bound)


def _env_name(settings: Mapping[str, Any]) -> str | None:
    env = (settings.get("data") or {}).get("env")
    # Down through wrappers to the id or class of the inner env.
    while isinstance(env, Mapping):
        inside = env.get("init_args") or {}
        env = inside.get("id") or inside.get("env") or _class_name(env)
    return None if env is None else str(env)


def _class_name(part: Mapping[str, Any]) -> str | None:
    path = part.get("class_path")
    return None if path is None else str(path).rpartition(".")[2]


def _control_period(metadata: Mapping[str, Any]) -> float | None:
    period = metadata.get("control_period")
    if period is None and metadata.get("render_fps"):
        period = 1.0 / float(metadata["render_fps"])
    return None if period is None else float(period)


def _evaluation(path: Path, steps: Any) -> dict[str, Any] | None:
    directory = directory_of(path)
    for place in (directory, path.parent):  # for a run in Python
        evaluation = _json(place / "evaluation.json")
        # Only an evaluation of this checkpoint's weights describes it.
        if steps is not None and evaluation.get("env_steps") == steps:
            return {name: plain_json(evaluation[name]) for name in EVALUATED if name in evaluation}
    # Else the rows of evaluations during training, at the same env steps.
    rows: list[dict[str, str]] = []
    with suppress(FileNotFoundError, csv.Error):
        metrics = open_file(directory / "logs" / "metrics.csv", directory, MOST_METRICS)
        with io.TextIOWrapper(metrics, "utf-8", "replace", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("env_steps") == str(steps)]
    averages = {
        name.removeprefix("eval/"): float(value)
        for row in rows
        for name, value in row.items()
        if name and name.startswith("eval/") and value
    }
    return {**averages, "env_steps": steps} if averages else None


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, directory_of(path))
    except FileNotFoundError:
        return {}
    except ConfigurationError as error:
        # A damaged file of the run must not prevent the export of a policy.
        rank_zero_warn(f"{error} The exported file does not contain it.")
        return {}
