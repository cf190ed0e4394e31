"""Apply the processors of a LeRobot policy: names, statistics and instructions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import do_weights_follow, is_plain_name, require
from lightning_rl.extend.files import read_json
from lightning_rl.extensions.vla.lerobot.directory import (
    ACTION,
    Feature,
    PolicyDirectory,
    write_text,
    write_weights,
)
from lightning_rl.extensions.vla.statistics import (
    Statistics,
    choose,
    grouped,
    numbers,
    read_statistics,
    with_width,
)
from lightning_rl.extensions.vla.weight_files import load_weights
from lightning_rl.extensions.vla.weights import extra

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

CURE = (
    "Set dataset_stats to a dataset that has them; or, if the policy was trained without, "
    "norm_map to IDENTITY in policy_preprocessor.json and policy_postprocessor.json."
)
"""Cure for missing statistics: LeRobot would act in normalised units."""


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

    def __init__(self, mode: str, first: Tensor, second: Tensor, eps: float) -> None:
        super().__init__()
        self.mode, self.eps = mode, eps
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, value: Tensor) -> Tensor:
        if self.mode == "MEAN_STD":
            return (value - self.first) / (self.second + self.eps)
        return 2 * (value - self.first) / self._span() - 1

    def inverse(self, value: Tensor) -> Tensor:
        """Return values [..., *shape] in their units."""
        if self.mode == "MEAN_STD":
            return value * self.second + self.first
        return (value + 1) / 2 * self._span() + self.first

    def _span(self) -> Tensor:
        # Not a buffer: loaded weights replace both statistics.
        span = self.second - self.first
        return span.where(span != 0, self.eps)


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
        complete = instruction.endswith("\n") or not self.new_line
        return instruction if complete else f"{instruction}\n"

    def tokens(self, tokenizer: Any, instructions: Sequence[str]) -> Any:
        """Return `input_ids` and `attention_mask`, int64 [B, S], of B instructions."""
        return tokenizer(
            [self.text(instruction) for instruction in instructions],
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
        dataset_stats: file or dataset whose statistics replace the policy's, see
            `read_statistics`; NaN if weights follow.
        key: see `choose`.
        orders: by feature, names of the env's numbers; see `choose`.

    Attributes:
        rename: LeRobot's names of inputs, by the names in the data.
        normalizers: by feature, with slashes for dots, without `action`.
        action: normalises actions; None without normalisation.
        tokenization: tokens of instructions; None without instructions.

    Raises:
        ConfigurationError: for a missing or damaged file, a step that is not supported, or missing
            statistics.
    """

    def __init__(
        self,
        directory: PolicyDirectory,
        dataset_stats: str | None = None,
        key: str | None = None,
        orders: Mapping[str, Sequence[str]] = {},
    ) -> None:
        super().__init__()
        self.source = dataset_stats or str(directory.path)
        # Weights that follow hold the statistics: the file may be gone by then.
        unread = dataset_stats is not None and do_weights_follow()
        self.path, self.action_size = directory.path, directory.action_size
        input_steps = list(_steps(directory.path, "policy_preprocessor.json", BEFORE))
        output_steps = list(_steps(directory.path, "policy_postprocessor.json", AFTER))
        dataset_statistics = None
        if dataset_stats is not None and not unread:
            dataset_statistics = read_statistics(dataset_stats)

        def normalizers(
            features: Mapping[str, Feature], config: Mapping[str, Any], state: Mapping[str, Tensor]
        ) -> dict[str, Normalizer]:
            statistics = grouped(state) if dataset_statistics is None else dataset_statistics
            read = None if unread else statistics
            return _normalizers(features, config, read, key, self.source, orders)

        self.rename: dict[str, str] = {}
        self.tokenization: Tokenization | None = None
        self.normalizers, self.action = nn.ModuleDict(), None
        new_line = False
        for name, config, state in input_steps:
            if name == "rename_observations_processor":
                self.rename = dict(config.get("rename_map", {}))
                require(
                    not self.rename or not self.normalizers,
                    f"{self.path}: renaming inputs after normalising them is not supported.",
                )
            # The step that adds a new line comes before the tokenizer's.
            new_line = new_line or name == "smolvla_new_line_processor"
            if name == "tokenizer_processor":
                self.tokenization = replace(_tokenization(config, self.path), new_line=new_line)
            if name == "normalizer_processor":
                inputs = {k: f for k, f in directory.inputs.items() if k != ACTION}
                names = config.get("normalize_observation_keys")
                # null selects all inputs.
                selected = {k: f for k, f in inputs.items() if names is None or k in names}
                modules = normalizers(selected, config, state)
                # The name of a module cannot have a dot.
                self.normalizers.update({k.replace(".", "/"): m for k, m in modules.items()})
        for name, config, state in output_steps:
            if name == "unnormalizer_processor":
                action = {ACTION: Feature("ACTION", (directory.action_size,))}
                self.action = normalizers(action, config, state).get(ACTION)

    def prepare(self, name: str, value: Tensor) -> Tensor:
        """Normalise the input `name` [B, *shape]."""
        key = name.replace(".", "/")
        return self.normalizers[key](value) if key in self.normalizers else value

    def action_bounds(self) -> tuple[Tensor, Tensor]:
        """Return the actions [A] for the network's outputs -1 and 1."""
        unit = torch.ones(self.action_size)
        # Without normalisation the outputs are actions.
        if self.action is None:
            return -unit, unit
        return with_width(self.action.inverse(-unit), self.action.inverse(unit), self.source)


def load_tokenizer(name: str, places: Sequence[Path]) -> Any:
    """Load a tokenizer of transformers from a local directory, see `find_local`."""
    transformers = extra("transformers")
    path = find_local(name, places, "tokenizer.json", "language_model")
    return transformers.AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )


def find_local(name: str, places: Sequence[Path], file: str, setting: str) -> str:
    """Return the first directory that has a file: a place, or `name` in a place.

    Raises:
        ConfigurationError: if no directory has the file; the message names `setting`.
    """
    # A place must have the name itself: a policy's config.json belongs to another model.
    matches = [p for p in places if p.resolve().name == Path(name).name]
    for place in [*matches, *(p / name for p in places)]:
        if (place / file).is_file():
            return str(place)
    raise ConfigurationError(
        f"No '{name}' with {file} in {', '.join(map(str, places))}. Nothing is downloaded: give "
        f"the local directory as {setting}."
    )


def write_processors(processors: Processors, directory: PolicyDirectory, path: Path) -> None:
    """Write the processors of a policy, with their present statistics, to a directory."""
    for name in ("policy_preprocessor", "policy_postprocessor"):
        content = read_json(directory.path / f"{name}.json")
        for number, step in enumerate(content["steps"]):
            kind = step.get("registry_name")
            normalizes = kind in ("normalizer_processor", "unnormalizer_processor")
            if "state_file" not in step and not normalizes:
                continue
            # The last part of the name: the file must lie in the new directory.
            file = Path(step.get("state_file", f"{name}_step_{number}_{kind}.safetensors")).name
            state: dict[str, Tensor] = {}
            if "state_file" in step:
                state = load_weights(directory.path / file)
            write_weights(path / file, _with_present(processors, state) if normalizes else state)
            step["state_file"] = file
        write_text(path / f"{name}.json", json.dumps(content, indent=2))


def _with_present(processors: Processors, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace the statistics of a step by the statistics of the normalisers."""
    present = {name.replace("/", "."): norm for name, norm in processors.normalizers.items()}
    if processors.action is not None:
        present[ACTION] = processors.action
    tensors = dict(state)
    for name, norm in present.items():
        assert isinstance(norm, Normalizer)
        pair = {
            f"{name}.{kind}": value
            for kind, value in zip(MODES[norm.mode], (norm.first, norm.second), strict=True)
        }
        # The file may have another shape, such as [C] for pictures.
        shaped = {k: v.reshape(state[k].shape) if k in state else v for k, v in pair.items()}
        if not all(k in state and state[k].float().equal(v.cpu()) for k, v in shaped.items()):
            # The feature's other statistics belong to other data.
            tensors = {k: v for k, v in tensors.items() if k.rpartition(".")[0] != name}
        tensors |= shaped
    return tensors


def _steps(
    path: Path, file: str, supported: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    place = path / file
    require(
        place.is_file(),
        f"{path} has no {file}. LeRobot before 0.4 kept the statistics among the weights: convert "
        "the directory by its migrate_policy_normalization.",
    )
    steps = read_json(place).get("steps")
    require(
        isinstance(steps, list) and all(isinstance(s, dict) for s in steps),
        f"{place} has no list of steps.",
    )
    assert isinstance(steps, list)
    for step in steps:
        name, config = step.get("registry_name"), step.get("config", {})
        # A step that is disabled changes nothing.
        if name in RELATIVE and config.get("enabled") is False:
            continue
        require(
            name in supported,
            f"{place} has the step "
            f"'{name or step.get('class')}'{' with enabled: true' if name in RELATIVE else ''}, "
            f"which is not supported. Supported are: {', '.join(supported)}.",
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
    statistics: Statistics | None,
    key: str | None,
    source: str,
    orders: Mapping[str, Sequence[str]],
) -> dict[str, Normalizer]:
    """Return normalisers by feature; None for statistics stands for NaN."""
    normalizers = {}
    for name, feature in features.items():
        mode = config.get("norm_map", {}).get(feature.kind, "IDENTITY")
        if mode == "IDENTITY":
            continue
        require(
            mode in MODES,
            f"{source}: normalisation {mode} of {name} is not one of IDENTITY, {', '.join(MODES)}.",
        )
        shape = (feature.shape[0], 1, 1) if feature.kind == "VISUAL" else feature.shape
        # NaN, so that weights which do not follow would show.
        pair = [torch.full(shape, torch.nan) for _ in MODES[mode]]
        if statistics is not None:
            values = choose(statistics, name, key, source, CURE, orders.get(name, ()))
            pair = [_statistic(values, name, kind, shape, source) for kind in MODES[mode]]
        normalizers[name] = Normalizer(mode, pair[0], pair[1], float(config.get("eps", 1e-8)))
    return normalizers


def _statistic(
    values: Mapping[str, Any], name: str, kind: str, shape: tuple[int, ...], source: str
) -> Tensor:
    require(kind in values, f"{source}: the statistics have no {name}.{kind}.")
    value = numbers(values[kind], f"{source}: {name}.{kind}")
    require(
        # Statistics of pictures may be stored as [C].
        list(value.shape) in ([shape[0]], list(shape)),
        f"{source}: {name}.{kind} must have the shape {list(shape)}, got {list(value.shape)}.",
    )
    return value.reshape(shape)
