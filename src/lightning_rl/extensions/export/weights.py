"""Write a policy's weights, and a JSON description to rebuild it; read both as a checkpoint."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.errors import import_extra
from lightning_rl.extend.files import read_json, write_atomically

SUFFIX = ".safetensors"
"""Suffix of files of weights."""

CONSTRUCTION = "construction"
"""JSON key of the description from which the policy is rebuilt."""


def description_of(path: Path) -> Path:
    """Return the path of the JSON file that belongs to an exported file."""
    return path.with_name(f"{path.name}.json")


def safetensors() -> Any:
    """Import safetensors, or raise a `ConfigurationError`."""
    return import_extra(
        "safetensors.torch",
        "Weights are written by safetensors, which is not installed: pip install -e '.[export]'.",
    )


def write_weights(policy: Policy, path: Path) -> None:
    """Write the parameters and buffers of a policy."""
    # Copy, because safetensors refuses tensors that share memory.
    state = {name: tensor.detach().cpu().clone() for name, tensor in policy.state_dict().items()}
    content: bytes = safetensors().save({name: leaf.contiguous() for name, leaf in state.items()})
    write_atomically(path, lambda file: file.write(content))


def construction_of(state: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return a description to rebuild the policy of a run, as plain values."""
    model = settings.get("model", {}).get("init_args", {})
    config = {
        "model": {"init_args": {"policy": model.get("policy")}},
        "trainer": {"precision": settings.get("trainer", {}).get("precision")},
    }
    # JSON has no infinity, which bounds of spaces and settings may hold.
    return cast(dict[str, Any], _infinities({"config": config, "state": state}, str))


def read_exported(path: Path) -> tuple[Any, Any, dict[str, Tensor]]:
    """Read an export: the configuration and the state of its construction, and the weights.

    Raises:
        ConfigurationError: if the weights or their description cannot be read.
    """
    description = description_of(path)
    try:
        construction = _infinities(read_json(description, path.parent)[CONSTRUCTION], float)
        config, state = construction["config"], construction["state"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{description} does not describe how to build the policy of {path.name}: {error!r}. "
            "Use a file written by rl-cli export, next to its JSON file."
        ) from error
    try:
        weights = safetensors().load_file(path)
    except ConfigurationError:
        raise
    except Exception as error:  # a damaged file raises many types of errors
        raise ConfigurationError(f"The weights {path} cannot be read: {error}") from error
    return config, state, weights


def plain_json(value: Any) -> Any:
    """Convert a tree of values to JSON types; numbers that are not finite become null."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain_json(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _infinities(value: Any, kind: type) -> Any:
    """Write infinities as texts for JSON, or read them as numbers: `kind` is str or float."""
    if isinstance(value, dict):
        return {str(key): _infinities(child, kind) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_infinities(child, kind) for child in value]
    return kind(value) if value in (math.inf, -math.inf, "inf", "-inf") else value
