"""Read the settings of a sweep."""

import json
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rl.extend.cli import Option, UsageError, option_parser
from lightning_rl.extend.errors import closest, require
from lightning_rl.extend.files import expanded, read_text, read_yaml

TRIALS = 20
"""Default number of points, except for a grid."""

GONE = {
    "cores_per_trial": " Trials are not pinned to cores: set sweep.jobs, or begin with taskset.",
    **dict.fromkeys(
        ("address", "gpus_per_trial"),
        " A sweep runs on one machine: on each further one, run a sweep with other seeds.",
    ),
}
"""Removed settings, with their replacement."""

OF_ANY_TYPE = ("space", "search_args", "first", "pruner_args")
"""Settings whose values may have any type."""


@dataclass
class SweepSettings:
    """Trials of a sweep, and how many run in parallel.

    Args:
        seeds: seeds of each point of the space: a number n for 1 to n, or a list of seeds. Default:
            the configuration's seed.
        space: by the path of a setting: a list of values, [0.1, 0.2], or a range, {low: 1.0e-5,
            high: 1.0e-2, log: true}, which may have a step.
        search: grid (all combinations of the values), random, or a class of optuna.samplers such as
            TPESampler. Default: grid, or random if there is a range.
        search_args: arguments of the search's class.
        trials: number of points, except for a grid. Default: 20.
        first: points to try first, such as known good settings; each needs a value for every
            setting of the space.
        pruner: class of optuna.pruners, such as MedianPruner, that ends trials with bad evaluations
            early; its steps are env steps.
        pruner_args: arguments of the pruner's class.
        score: score of a trial: its last or its best evaluation, by trainer.best_metric.
        jobs: number of parallel trials. Default: the number of cores, divided by
            trainer.num_threads and devices.
        seed: seed of the search.
    """

    seeds: int | list[int] | None = None
    space: dict[str, Any] = field(default_factory=dict)
    search: str | None = None
    search_args: dict[str, Any] = field(default_factory=dict)
    trials: int | None = None
    first: list[dict[str, Any]] = field(default_factory=list)
    pruner: str | None = None
    pruner_args: dict[str, Any] = field(default_factory=dict)
    score: Literal["last", "best"] = "last"
    jobs: int | None = None
    seed: int = 1


def sweep_parser() -> LightningArgumentParser:
    """Return the parser of `rl-cli sweep`, without the options of `fit`."""
    parser = option_parser(
        "sweep",
        "Train with several seeds and settings, several trials at a time. Other options are "
        "passed to fit for all trials.",
        {"resume": Option(str, None, "Directory of a sweep to resume, or last.")},
    )
    parser.usage = (
        "rl-cli sweep --config FILE [--sweep FILE] [--sweep.NAME VALUE ...] [--NAME VALUE ...]"
    )
    parser.add_class_arguments(SweepSettings, "sweep")
    return parser


def sweep_settings(options: Sequence[str]) -> SweepSettings:
    """Read the settings from options that begin with `--sweep` or `--resume`."""
    arguments = list(options)
    from_yaml: dict[str, Any] = {}  # unless a later option overrides it
    for i, option in enumerate(options):
        flag, _, inline = option.partition("=")
        if flag.startswith("--sweep."):
            name = _check_name(flag.removeprefix("--sweep."), "--sweep has no option")
            from_yaml.pop(name, None)
        elif flag == "--sweep":
            # `--sweep=FILE` is one argument, `--sweep FILE` two.
            at = i if inline else i + 1
            require(at < len(options), "--sweep needs a YAML file, or YAML.")
            text, name = _text_of(inline or options[at])
            content = _content(text, name)
            # As JSON: the parser reads the same content, and opens no file.
            arguments[at] = f"--sweep={json.dumps(content)}" if inline else json.dumps(content)
            from_yaml |= content
    parsed = sweep_parser().parse_args(arguments)
    return _settings(parsed, from_yaml)


def kept_settings(path: Path) -> SweepSettings:
    """Read the settings file of a sweep, with the checks of the command line."""
    content = _content(read_text(path, path.parent), str(path))
    parsed = sweep_parser().parse_object({"sweep": deepcopy(content)})  # changes its input
    return _settings(parsed, content)


def _settings(parsed: Namespace, from_yaml: dict[str, Any]) -> SweepSettings:
    # The parser reads a string of any type as YAML again: a quoted "off" would become false.
    raw_values = {name: value for name, value in from_yaml.items() if name in OF_ANY_TYPE}
    settings = SweepSettings(**parsed.sweep.as_dict() | raw_values)
    for name, default in vars(SweepSettings()).items():
        is_null = default is not None and getattr(settings, name) is None
        require(not is_null, f"sweep.{name} must not be null: leave it out.")
    return settings


def _check_name(path: str, message: str) -> str:
    # `--sweep.seeds+` appends to a list.
    name = path.split(".")[0].rstrip("+")
    names = [setting.name for setting in fields(SweepSettings)]
    if name in names:
        return name
    cure = f" Put settings of the trials below space: space: {{{path}: [...]}}."
    raise UsageError(
        f"{message} '{path}'{closest(path, names)}.{cure if '.' in path else GONE.get(name, '')} "
        f"A sweep has {', '.join(names)}."
    )


def _text_of(argument: str) -> tuple[str, str]:
    path = expanded(argument)
    if argument.endswith((".yaml", ".yml")) and not path.is_file():
        files = [str(file) for file in path.parent.glob("*.y*ml")]
        raise UsageError(
            f"--sweep names the file {argument}, which does not "
            f"exist{closest(argument, files)}. It must hold settings of a sweep, such as "
            "seeds: 5; give the configuration of the trials as --config."
        )
    return (read_text(path), argument) if os.path.isfile(argument) else (argument, "--sweep")


def _content(text: str, name: str) -> dict[str, Any]:
    content = read_yaml(text, name)
    require(isinstance(content, dict), f"{name} must hold settings of a sweep, such as seeds: 5.")
    for key in content:
        _check_name(str(key), f"{name} has an unknown setting")
    return dict(content)
