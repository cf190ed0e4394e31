"""Read and write directories of LeRobot policies: features, settings and weights."""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from lightning_rl.extend.errors import closest, require
from lightning_rl.extend.files import expanded, read_json, write_atomically
from lightning_rl.extensions.vla.weight_files import fitting, refuse_adapter, weights_at
from lightning_rl.extensions.vla.weights import extra

MOST_LAYERS, LARGEST_SIZE, LARGEST_FEATURE = 2**8, 2**14, 2**26
"""Bounds of the numbers in config.json, checked before memory is allocated."""

KINDS = ("act", "diffusion", "smolvla")
"""Types of policies that are read."""

STATE: str = "observation.state"
"""LeRobot's name of the state of the robot."""

ENVIRONMENT: str = "observation.environment_state"
"""LeRobot's name of the state of the env."""

ACTION: str = "action"
"""LeRobot's name of actions."""

VERSION = "0.6.1"
"""Version of LeRobot whose directories the tests read and write."""

UNUSED = (
    *("type", "input_features", "output_features", "normalization_mapping", "device", "use_amp"),
    *("push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path"),
    "pretrained_revision",
)
"""Fields of every config.json that other code reads, or that do not affect outputs."""


@dataclass(frozen=True)
class Feature:
    """An input or output of a policy: type, such as VISUAL, and shape without the batch."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PolicyDirectory:
    """The content of config.json.

    Attributes:
        path: path of the directory.
        config: all fields.
        inputs: features of the observation, in their order.
        action_size: A.
    """

    path: Path
    config: Mapping[str, Any]
    inputs: Mapping[str, Feature]
    action_size: int

    @property
    def kind(self) -> str:
        """The type of the policy, one of `KINDS`."""
        return str(self.config["type"])

    @property
    def cameras(self) -> dict[str, Feature]:
        """The pictures among the inputs."""
        return {name: feature for name, feature in self.inputs.items() if feature.kind == "VISUAL"}

    def size_of(self, name: str) -> int | None:
        """Return the number of entries of an input of numbers; None without that input."""
        return math.prod(self.inputs[name].shape) if name in self.inputs else None


@dataclass(frozen=True)
class Settings:
    """Fields of config.json that a network reads; `of_training`: only LeRobot's training does."""

    of_training: ClassVar[tuple[str, ...]] = ()

    n_obs_steps: int = 1
    use_peft: bool = False


_Settings = TypeVar("_Settings", bound=Settings)


def read_directory(path: str, overrides: Mapping[str, Any] | None = None) -> PolicyDirectory:
    """Read config.json of a local directory that LeRobot's `save_pretrained` wrote.

    `overrides` replace fields of config.json.

    Raises:
        ConfigurationError: if the file is missing, or describes another kind of policy.
    """
    place = expanded(path)
    refuse_adapter(place)
    file = place / "config.json"
    require(
        file.is_file(),
        f"No LeRobot policy at {path}: there is no config.json. Give a local directory that "
        "save_pretrained of LeRobot wrote; nothing is downloaded.",
    )
    # Before the checks, so that they see what will be used.
    config = read_json(file) | dict(overrides or {})
    kind = config.get("type")
    require(
        kind in KINDS,
        f"{file} describes a policy of type '{kind}', but only {', '.join(KINDS)} can be read.",
    )
    inputs = _features(config, "input_features", file)
    outputs = _features(config, "output_features", file)
    require(
        list(outputs) == [ACTION] and len(outputs[ACTION].shape) == 1,
        f"{file}: output_features must be one action [A], got {outputs}.",
    )
    return PolicyDirectory(place, config, inputs, outputs[ACTION].shape[0])


def read_settings(cls: type[_Settings], directory: PolicyDirectory) -> _Settings:
    """Return the fields of config.json for a network.

    Raises:
        ConfigurationError: for an unknown field, another type, or an unsupported value.
    """
    kinds = get_type_hints(cls)
    field_names = {field.name for field in fields(cls)}
    ignored = (*UNUSED, *cls.of_training)
    values: dict[str, Any] = {}
    for name, value in directory.config.items():
        # Settings of LeRobot's training do not change outputs.
        if name in ignored or name.startswith(("optimizer_", "scheduler_")):
            continue
        require(
            name in field_names,
            f"{directory.path / 'config.json'} has '{name}', which is not a field of LeRobot "
            f"{VERSION}'s {directory.kind}{closest(name, field_names)}. The policy is not loaded, "
            "because the effect of the field is unknown.",
        )
        # JSON has lists where the dataclass has tuples.
        values[name] = tuple(value) if isinstance(value, list) else value
        require(
            _is_a(values[name], kinds[name]),
            f"{directory.path / 'config.json'}: {name} is {value!r}, not {kinds[name]}.",
        )
        largest = MOST_LAYERS if name.endswith("_layers") else LARGEST_SIZE
        numbers = values[name] if isinstance(values[name], tuple) else (values[name],)
        require(
            all(-1 <= number <= largest for number in numbers if type(number) in (int, float)),
            f"{directory.path / 'config.json'}: {name} is {value!r}, which must lie in [-1, "
            f"{largest}].",
        )
    settings = cls(**values)
    refuse_unsupported(directory, {"use_peft": (settings.use_peft, False)})
    return settings


def refuse_unsupported(directory: PolicyDirectory, options: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse unsupported options of config.json: by name, its value and the supported value.

    Raises:
        ConfigurationError: for the first option whose value differs.
    """
    for name, (value, supported) in options.items():
        require(
            value == supported,
            f"{directory.path / 'config.json'} sets {name}: {json.dumps(value)}, but only {name}: "
            f"{json.dumps(supported)} is supported for {directory.kind}.",
        )


def load_parts(parts: Mapping[str, nn.Module], directory: PolicyDirectory) -> None:
    """Load model.safetensors into modules, by the prefix of their names in it.

    Raises:
        ConfigurationError: for a missing, an additional or a damaged weight.
    """
    weights = weights_at(str(directory.path), "path")
    state = named_weights(parts)
    # A file holds shared tensors once.
    shared = {value.data_ptr(): weights[name] for name, value in state.items() if name in weights}
    for name, value in state.items():
        if name not in weights and value.numel() and value.data_ptr() in shared:
            weights[name] = shared[value.data_ptr()]
    with torch.no_grad():
        for name, value in fitting(state, weights, str(directory.path)).items():
            # In place, because a module outside of `parts` may share the tensor.
            state[name].copy_(value)


def named_weights(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the weights of modules by LeRobot's names."""
    return {
        f"{prefix}{name}": value
        for prefix, module in parts.items()
        for name, value in module.state_dict().items()
    }


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write named tensors as a safetensors file, each with its own memory."""
    # safetensors refuses tensors that share memory.
    content = extra("safetensors.torch").save(
        {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    )
    write_atomically(path, lambda file: file.write(content))


def write_text(path: Path, text: str) -> None:
    """Write a file of text."""
    write_atomically(path, lambda file: file.write(text.encode()))


def _features(config: Mapping[str, Any], name: str, file: Path) -> dict[str, Feature]:
    features = config.get(name)
    # `type(size) is int`, because True is an instance of int.
    fits = isinstance(features, dict) and all(
        isinstance(f, dict)
        and isinstance(f.get("type"), str)
        and isinstance(f.get("shape"), list)
        and all(type(size) is int and size > 0 for size in f["shape"])
        and math.prod(f["shape"]) <= LARGEST_FEATURE
        for f in features.values()
    )
    require(
        fits,
        f"{file}: {name} must give type and shape of each feature, at most {LARGEST_FEATURE} "
        f"numbers, got {features!r}.",
    )
    assert isinstance(features, dict)
    return {key: Feature(f["type"], tuple(f["shape"])) for key, f in features.items()}


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(kind, types.UnionType):
        return any(_is_a(value, member) for member in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        first, *tail = get_args(kind)
        # tuple[int, ...] has any length.
        sizes = ... in tail or (isinstance(value, tuple) and len(value) == len(tail) + 1)
        return isinstance(value, tuple) and sizes and all(_is_a(entry, first) for entry in value)
    if kind is Any:
        return True
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind
