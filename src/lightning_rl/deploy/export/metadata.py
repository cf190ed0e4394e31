"""Say what an exported policy reads and does, of which run it is, and how well it did there."""

import csv
import io
import json
import math
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

from lightning_rl.checkpoints.format import STATE_KEY, own_version
from lightning_rl.deploy.export.graph import Port, Ports, unwrapped
from lightning_rl.envs import VectorEnv
from lightning_rl.policies import Policy
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import open_file, read_json
from lightning_rl.system.runs import CHECKPOINTS

MOST_METRICS = 2**30
"""The most bytes of a run's metrics.csv."""

FORMAT = 1
"""Grows when a key changes its meaning."""

SAID_BY_ENVS = (
    *("joint_names", "joint_stiffness", "joint_damping", "default_joint_pos"),
    *("observation_names", "action_names", "action_scale", "command_names"),
)
"""What is taken over from an env's `metadata`, under the same names; as mjlab calls them."""

EVALUATED = (
    *("episodes", "avg_reward", "std_reward", "ci95", "avg_length"),
    *("success_rate", "success_ci95", "deterministic", "env_steps"),
)
"""What of `evaluation.json` is taken over."""

PACKAGES = ("torch", "numpy", "gymnasium", "onnx", "onnxscript", "onnxruntime", "safetensors")
"""Whose versions are said, beside this one's."""


def metadata_of(
    policy: Policy,
    ports: Ports,
    path: Path,
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
    env: VectorEnv | None,
) -> dict[str, Any]:
    """Return what is written with an exported policy, of plain values.

    Args:
        policy: is exported.
        ports: of it.
        path: of its checkpoint.
        content: of that.
        settings: the configuration of its run.
        env: one of its run; None where it cannot be made here.
    """
    outputs = [port for port in ports.outputs if port.space is not None]
    states = [port for port in ports.inputs if port.space is None]
    chunk = None if env is None or env.steps_per_action == 1 else env.steps_per_action
    return {
        "format": FORMAT,
        "policy": type(unwrapped(policy)).__name__,
        "algorithm": _name(settings.get("model")),
        "env": _env_name(settings),
        "deterministic": True,
        "observations": [_described(one) for one in ports.inputs if one.space is not None],
        "actions": [_described(one) for one in outputs],
        "state": {"input": states[0].name, "output": "next_state", "shape": list(states[0].shape)}
        if states
        else None,
        "actions_executed_of_a_chunk": chunk,
        "control_period": _control_period(env),
        **_said_by(env),
        "run": _run(path, content),
        "evaluation": _evaluation(path, content),
        "versions": versions(),
        "exported": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def directory_of(path: Path) -> Path:
    """Return the run directory of a checkpoint, or the one that it lies in."""
    parent = path.absolute().parent
    return parent.parent if parent.name == CHECKPOINTS else parent


def versions() -> dict[str, str]:
    """Return the versions that took part."""
    found = {"lightning-rl": own_version(), "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def as_properties(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata as ONNX keeps it: texts by name, here JSON each."""
    return {name: json.dumps(value) for name, value in metadata.items()}


def _described(port: Port) -> dict[str, Any]:
    """Return name, shape, dtype and limits of an input or an output."""
    said: dict[str, Any] = {
        "name": port.name,
        "shape": list(port.shape),
        "dtype": str(port.dtype).removeprefix("torch."),
    }
    space = port.space
    if isinstance(space, gymnasium.spaces.Box):
        said |= {"low": _numbers(space.low), "high": _numbers(space.high)}
        bounded = np.isfinite(space.low).all() and np.isfinite(space.high).all()
        if bounded and port.name.startswith("action"):
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            center, scale = (high + low) / 2, (high - low) / 2
            said |= {"center": _numbers(center), "scale": _numbers(scale)}
    elif isinstance(space, gymnasium.spaces.Discrete):
        said |= {"low": int(space.start), "high": int(space.start + space.n - 1)}
    elif isinstance(space, gymnasium.spaces.MultiDiscrete):
        last = space.start + space.nvec - 1
        said |= {"low": space.start.tolist(), "high": last.tolist()}
    elif isinstance(space, gymnasium.spaces.MultiBinary):
        said |= {"low": 0, "high": 1}
    return said


def _numbers(bound: np.ndarray) -> Any:
    """Return a bound as a list, or the one number that all of it is; null for none."""
    if bound.size and (bound == bound.flat[0]).all():
        return _plain(bound.flat[0].item())
    return _plain(bound.tolist())


def _plain(value: Any) -> Any:
    """Return JSON of a tree of what an env or a run says: null for what is no finite number."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _name(part: Any) -> str | None:
    path = part.get("class_path") if isinstance(part, Mapping) else None
    return None if path is None else str(path).rpartition(".")[2]


def _env_name(settings: Mapping[str, Any]) -> str | None:
    """Return the id of the env, or its class."""
    data = settings.get("data")
    env = data.get("env") if isinstance(data, Mapping) else None
    while isinstance(env, Mapping):
        arguments = env.get("init_args") or {}
        if "id" in arguments:
            return str(arguments["id"])
        if not isinstance(arguments.get("env"), Mapping):
            return _name(env)
        env = arguments["env"]
    return None if env is None else str(env)


def _control_period(env: VectorEnv | None) -> float | None:
    """Return the seconds between two env steps; None where the env does not say."""
    if env is None:
        return None
    said = env.metadata.get("control_period")
    if said is None and env.metadata.get("render_fps"):
        said = 1.0 / float(env.metadata["render_fps"])
    return None if said is None else float(said)


def _said_by(env: VectorEnv | None) -> dict[str, Any]:
    said = {} if env is None else env.metadata
    return {name: _plain(said[name]) for name in SAID_BY_ENVS if name in said}


def _run(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return which run and which checkpoint it is."""
    directory = directory_of(path)
    said = _json(directory / "run.json")
    return {
        "name": directory.name,
        "checkpoint": path.name,
        "env_steps": content[STATE_KEY].get("env_steps"),
        "policy_version": int(content["state_dict"]["policy.version"]),
        **{name: _plain(said.get(name)) for name in ("seed", "git_commit", "started")},
    }


def _evaluation(path: Path, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how well this very policy did: by `validate`, or else when it was trained."""
    directory = directory_of(path)
    steps = content[STATE_KEY].get("env_steps")
    for place in (directory, path.parent):  # the latter of a run in Python
        said = _json(place / "evaluation.json")
        if steps is not None and said.get("env_steps") == steps:
            return {name: _plain(said[name]) for name in EVALUATED if name in said}
    rows: list[dict[str, str]] = []
    with suppress(FileNotFoundError, csv.Error):
        metrics = open_file(directory / "logs" / "metrics.csv", directory, MOST_METRICS)
        with io.TextIOWrapper(metrics, "utf-8", "replace", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("env_steps") == str(steps)]
    found = {
        name.removeprefix("eval/"): float(value)
        for row in rows
        for name, value in row.items()
        if name and name.startswith("eval/") and value
    }
    return {**found, "env_steps": steps} if found else None


def _json(path: Path) -> dict[str, Any]:
    """Return a JSON file of a run; empty, with a warning unless it is missing, if unreadable."""
    try:
        return read_json(path, directory_of(path))
    except FileNotFoundError:
        return {}
    except ConfigurationError as error:
        rank_zero_warn(f"{error} What is exported lacks it.")
        return {}
