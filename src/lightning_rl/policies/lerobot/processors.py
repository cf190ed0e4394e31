"""Apply the processors of a LeRobot policy: names, statistics and instructions."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.policies.lerobot.directory import (
    ACTION,
    Feature,
    PolicyDirectory,
    write_text,
    write_weights,
)
from lightning_rl.policies.weights import extra, load_weights
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.files import expanded, read_json
from lightning_rl.system.texts import is_plain_name

MODES = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""The two statistics of each kind of normalisation; IDENTITY has none."""

BEFORE = (
    *("rename_observations_processor", "to_batch_processor", "device_processor"),
    *("normalizer_processor", "smolvla_new_line_processor", "tokenizer_processor"),
)
"""Steps before the network that are applied, by LeRobot's names."""

AFTER = ("unnormalizer_processor", "device_processor")
"""Steps after the network."""

RELATIVE = ("relative_actions_processor", "absolute_actions_processor")
"""Steps that are accepted only if they are disabled."""


class Normalizer(nn.Module):
    """Normalise by the statistics of a dataset, and invert it.

    MEAN_STD: (x - mean) / (std + eps). Other modes map their two statistics to -1 and 1: 2 (x -
    low) / (high - low) - 1, with eps instead of a difference of 0.

    Args:
        mode: a key of `MODES`.
        first, second: the two statistics, [*shape] of the feature, [C, 1, 1] of pictures.
        eps: see above.
    """

    first: Tensor
    second: Tensor
    span: Tensor

    def __init__(self, mode: str, first: Tensor, second: Tensor, eps: float) -> None:
        super().__init__()
        self.mode, self.eps = mode, eps
        difference = second - first
        fallback = torch.full_like(difference, eps)
        span = second if mode == "MEAN_STD" else difference.where(difference != 0, fallback)
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.register_buffer("span", span, persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        if self.mode == "MEAN_STD":
            return (value - self.first) / (self.span + self.eps)
        return 2 * (value - self.first) / self.span - 1

    def inverse(self, value: Tensor) -> Tensor:
        """Return values [..., *shape] in their units."""
        if self.mode == "MEAN_STD":
            return value * self.span + self.first
        return (value + 1) / 2 * self.span + self.first


@dataclass(frozen=True)
class Tokenization:
    """How an instruction becomes tokens.

    Attributes:
        name: name of the tokenizer, in the tokenizer step.
        max_length: largest number of tokens.
        new_line: end an instruction with a new line.
        padding_side, padding, truncation: as in transformers.
        task_key: name of the instruction in LeRobot's batches.
    """

    name: str
    max_length: int = 512
    new_line: bool = False
    padding_side: str = "right"
    padding: str = "max_length"
    truncation: bool = True
    task_key: str = "task"

    def text(self, instruction: str) -> str:
        """Return an instruction as the tokenizer gets it."""
        ended = instruction.endswith("\n") or not self.new_line
        return instruction if ended else f"{instruction}\n"

    def tokens(self, tokenizer: Any, instructions: Sequence[str]) -> Any:
        """Return `input_ids` and `attention_mask`, int64 [B, S], of B instructions."""
        return tokenizer(
            [self.text(one) for one in instructions],
            max_length=self.max_length,
            truncation=self.truncation,
            padding=self.padding,
            padding_side=self.padding_side,
            return_tensors="pt",
        )


class Processors(nn.Module):
    """The two files of processors of a policy.

    Args:
        directory: directory of the policy.
        dataset_stats: dataset of LeRobot, or its `meta/stats.json`, which replaces the policy's
            statistics.

    Attributes:
        rename: LeRobot's names of inputs, by the names in the data.
        normalizers: by feature, with slashes for dots, without `action`.
        action: normalises actions; None without normalisation.
        tokenization: tokens of instructions; None without instructions.

    Raises:
        ConfigurationError: for a missing or damaged file, a step that is not supported, or missing
            statistics.
    """

    def __init__(self, directory: PolicyDirectory, dataset_stats: str | None = None) -> None:
        super().__init__()
        self.path, self.action_size = directory.path, directory.action_size
        before = list(_steps(directory.path, "policy_preprocessor.json", BEFORE))
        after = list(_steps(directory.path, "policy_postprocessor.json", AFTER))
        given = None if dataset_stats is None else read_statistics(dataset_stats)
        self.rename: dict[str, str] = {}
        self.tokenization: Tokenization | None = None
        self.normalizers, self.action = nn.ModuleDict(), None
        new_line = False
        for name, config, state in before:
            if name == "rename_observations_processor":
                self.rename = dict(config.get("rename_map", {}))
                require(
                    not self.rename or not self.normalizers,
                    f"{self.path}: renaming inputs after normalising them is not supported.",
                )
            new_line = new_line or name == "smolvla_new_line_processor"
            if name == "tokenizer_processor":
                self.tokenization = replace(_tokenization(config, self.path), new_line=new_line)
            if name == "normalizer_processor":
                inputs = {k: one for k, one in directory.inputs.items() if k != ACTION}
                only = config.get("normalize_observation_keys")
                kept = {k: one for k, one in inputs.items() if only is None or k in only}
                made = _normalizers(kept, config, state if given is None else given, self.path)
                self.normalizers.update({k.replace(".", "/"): one for k, one in made.items()})
        for name, config, state in after:
            if name == "unnormalizer_processor":
                action = {ACTION: Feature("ACTION", (directory.action_size,))}
                statistics = state if given is None else given
                self.action = _normalizers(action, config, statistics, self.path).get(ACTION)

    def prepare(self, name: str, value: Tensor) -> Tensor:
        """Normalise the input `name` [B, *shape]."""
        key = name.replace(".", "/")
        return self.normalizers[key](value) if key in self.normalizers else value

    def action_bounds(self) -> tuple[Tensor, Tensor]:
        """Return the actions [A] for the network's outputs -1 and 1."""
        one = torch.ones(self.action_size)
        low, high = (-one, one) if self.action is None else map(self.action.inverse, (-one, one))
        # A constant action in the data has a standard deviation of 0.
        least = 1e-6 * high.abs().clamp(min=1.0)
        flat = high - low < least
        return torch.where(flat, low - least, low), torch.where(flat, high + least, high)


def read_statistics(path: str) -> dict[str, Tensor]:
    """Read the statistics of a LeRobot dataset, by names such as `observation.state.mean`.

    Raises:
        ConfigurationError: if there is no such file, or it holds something else.
    """
    place = expanded(path)
    file = place / "meta" / "stats.json" if place.is_dir() else place
    require(
        file.is_file(),
        f"No statistics at {path}: give a LeRobot dataset, or its meta/stats.json.",
    )
    found = {}
    content = read_json(file)
    for feature, statistics in content.items():
        for name, value in statistics.items() if isinstance(statistics, dict) else ():
            try:
                found[f"{feature}.{name}"] = torch.tensor(value, dtype=torch.float32)
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"{file}: {feature}.{name} are not numbers: {error}."
                ) from error
    return found


def load_tokenizer(name: str, places: Sequence[Path]) -> Any:
    """Load a tokenizer of transformers from a local directory, see `find_local`."""
    transformers = extra("transformers")
    found = find_local(name, places, "tokenizer.json", "language_model")
    return transformers.AutoTokenizer.from_pretrained(
        found, local_files_only=True, trust_remote_code=False
    )


def find_local(name: str, places: Sequence[Path], file: str, setting: str) -> str:
    """Return the first directory that has a file: a place, or `name` in a place.

    Raises:
        ConfigurationError: if no directory has the file; the message names `setting`.
    """
    # A place must have the name itself: a policy's config.json belongs to another model.
    known = [one for one in places if one.resolve().name == Path(name).name]
    for place in [*known, *(one / name for one in places)]:
        if (place / file).is_file():
            return str(place)
    raise ConfigurationError(
        f"No '{name}' with {file} in {', '.join(map(str, places))}. Nothing is downloaded: give "
        f"the local directory as {setting}."
    )


def write_processors(processors: Processors, directory: PolicyDirectory, path: Path) -> None:
    """Write the processors of a policy, with their present statistics, to a directory."""
    for file in ("policy_preprocessor.json", "policy_postprocessor.json"):
        content = read_json(directory.path / file)
        for step in content["steps"]:
            if "state_file" not in step:
                continue
            state = load_weights(directory.path / step["state_file"])
            write_weights(path / step["state_file"], {**state, **_statistics(processors, state)})
        write_text(path / file, json.dumps(content, indent=2))


def _statistics(processors: Processors, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = {k.replace("/", "."): one for k, one in processors.normalizers.items()}
    if processors.action is not None:
        made[ACTION] = processors.action
    found: dict[str, Tensor] = {}
    for name, one in made.items():
        assert isinstance(one, Normalizer)
        first, second = (f"{name}.{statistic}" for statistic in MODES[one.mode])
        found |= {first: one.first, second: one.second}
    return {k: v.reshape(state[k].shape) for k, v in found.items() if k in state}


def _steps(
    path: Path, file: str, known: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    place = path / file
    require(
        place.is_file(),
        f"{path} has no {file}. LeRobot before 0.4 kept the statistics among the weights: convert "
        "the directory by its migrate_policy_normalization.",
    )
    steps = read_json(place).get("steps")
    require(
        isinstance(steps, list) and all(isinstance(one, dict) for one in steps),
        f"{place} has no list of steps.",
    )
    assert isinstance(steps, list)
    for step in steps:
        name, config = step.get("registry_name"), step.get("config", {})
        if name in RELATIVE and config.get("enabled") is False:
            continue
        require(
            name in known,
            f"{place} has the step "
            f"'{name or step.get('class')}'{' with enabled: true' if name in RELATIVE else ''}, "
            f"which is not supported. Supported are: {', '.join(known)}.",
        )
        require(
            config.get("float_dtype") in (None, "float32"),
            f"{place}: device_processor sets float_dtype: {config.get('float_dtype')}; set null, "
            "and the run's trainer.precision.",
        )
        state: dict[str, Tensor] = {}
        if "state_file" in step:
            # `write_processors` writes a file of this name into another directory.
            require(
                is_plain_name(step["state_file"]),
                f"{place} has state_file: {step['state_file']!r}, which must be the plain name of "
                f"a file in {path}.",
            )
            tensors = path / step["state_file"]
            require(tensors.is_file(), f"{place} names {tensors.name}, which is missing.")
            state = load_weights(tensors)
        yield name, config, state


def _tokenization(config: Mapping[str, Any], path: Path) -> Tokenization:
    require("tokenizer_name" in config, f"{path}: its tokenizer_processor has no tokenizer_name.")
    names = [name for name in Tokenization.__dataclass_fields__ if name in config]
    return Tokenization(config["tokenizer_name"], **{name: config[name] for name in names})


def _normalizers(
    features: Mapping[str, Feature],
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    path: Path,
) -> dict[str, Normalizer]:
    found = {}
    for name, feature in features.items():
        mode = config.get("norm_map", {}).get(feature.kind, "IDENTITY")
        if mode == "IDENTITY":
            continue
        require(
            mode in MODES,
            f"{path}: normalisation {mode} of {name} is not one of IDENTITY, {', '.join(MODES)}.",
        )
        if not any(key.startswith(f"{name}.") for key in state):
            warnings.warn(
                f"{path} has no statistics of {name}: {name} is not normalised, as in LeRobot. To "
                f"normalise {name}, set dataset_stats.",
                stacklevel=4,
            )
            continue
        shape = (feature.shape[0], 1, 1) if feature.kind == "VISUAL" else feature.shape
        pair = [_statistic(state, f"{name}.{part}", shape, path) for part in MODES[mode]]
        found[name] = Normalizer(mode, pair[0], pair[1], float(config.get("eps", 1e-8)))
    return found


def _statistic(
    state: Mapping[str, Tensor], name: str, shape: tuple[int, ...], path: Path
) -> Tensor:
    require(name in state, f"{path}: the statistics have no {name}.")
    value = state[name].float()
    require(
        list(value.shape) in ([shape[0]], list(shape)) and bool(value.isfinite().all()),
        f"{path}: {name} must be finite numbers of shape {list(shape)}, got {list(value.shape)}.",
    )
    return value.reshape(shape)
