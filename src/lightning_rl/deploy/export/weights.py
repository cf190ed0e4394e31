"""Write the weights of a policy with what makes it again, and read them as a checkpoint.

Two files: `NAME.safetensors`, and `NAME.safetensors.json` beside it, of which `making` is what
`load_policy` needs. Both are data.
"""

import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_rl.checkpoints.format import (
    CONFIG_KEY,
    STATE_KEY,
    check_schema,
    weights_of,
)
from lightning_rl.policies import Policy
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import read_json, write_atomically
from lightning_rl.system.plain_yaml import dump_yaml

SUFFIX = ".safetensors"
"""How the names of files of weights end."""

MAKING = "making"
"""The key of what makes the policy again, in the JSON beside its weights."""


def is_exported(path: Path) -> bool:
    """Tell whether a file is one of weights that were exported."""
    return path.suffix == SUFFIX


def description_of(path: Path) -> Path:
    """Return where what belongs to an exported file is said."""
    return path.with_name(f"{path.name}.json")


def safetensors() -> Any:
    """Return the library.

    Raises:
        ConfigurationError: where it is not installed.
    """
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise ConfigurationError(
            f"Weights are kept by safetensors, which is not installed: pip install "
            f"'lightning-rl[export]'. ({error})"
        ) from error


def write_weights(policy: Policy, path: Path) -> None:
    """Write the weights and buffers of a policy."""
    # Copies, as safetensors takes none that share memory.
    state = {name: one.detach().cpu().clone() for name, one in policy.state_dict().items()}
    content: bytes = safetensors().save({name: one.contiguous() for name, one in state.items()})
    write_atomically(path, lambda file: file.write(content))


def making_of(content: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return what makes the policy of a checkpoint again, as plain values.

    Args:
        content: of the checkpoint.
        settings: its configuration, of which the policy and its precision are kept.
    """
    model = settings.get("model", {}).get("init_args", {})
    return {
        "config": {
            "model": {"init_args": {"policy": model.get("policy")}},
            "trainer": {"precision": settings.get("trainer", {}).get("precision")},
        },
        "state": _without_infinities(weights_of(content)[STATE_KEY]),
    }


def read_exported(path: Path) -> dict[str, Any]:
    """Return exported weights as the content of a checkpoint.

    Raises:
        ConfigurationError: where they, or what is said of them, cannot be read.
    """
    beside = description_of(path)
    try:
        making = read_json(beside, path.parent)[MAKING]
        content = {
            CONFIG_KEY: dump_yaml(making["config"]),
            STATE_KEY: _with_infinities(making["state"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{beside} does not say how the policy of {path.name} is made: {error!r}. Give a file "
            "that rl-cli export wrote, with the JSON beside it."
        ) from error
    try:
        weights = safetensors().load_file(path)
    except ConfigurationError:
        raise
    except Exception as error:  # a damaged file fails in many ways
        raise ConfigurationError(f"The weights {path} cannot be read: {error}") from error
    content["state_dict"] = {f"policy.{name}": one for name, one in weights.items()}
    check_schema(content, f"The export {path}")
    return content


def plain_json(value: Any) -> Any:
    """Return JSON of a tree of values: null for a number that is not finite."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain_json(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _without_infinities(value: Any) -> Any:
    """Return a tree as JSON has it, which knows no infinite numbers: as texts."""
    if isinstance(value, dict):
        return {str(key): _without_infinities(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(child) for child in value]
    return str(value) if value in (float("inf"), float("-inf")) else value


def _with_infinities(value: Any) -> Any:
    """Return the tree that `_without_infinities` was given."""
    if isinstance(value, dict):
        return {key: _with_infinities(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_with_infinities(child) for child in value]
    return float(value) if value in ("inf", "-inf") else value
