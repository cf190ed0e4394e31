"""Read the space of a sweep, and make Optuna's samplers and pruners."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import closest, require
from lightning_rl.extensions.sweeps.sweep_settings import SweepSettings

GRID, RANDOM = "grid", "random"
"""Searches that are not classes of Optuna."""

SAMPLERS = ("TPESampler", "GPSampler", "NSGAIISampler", "NSGAIIISampler", "QMCSampler")
"""Samplers that read only numbers and text from a journal."""

UNPICKLING = ("CmaEsSampler",)
"""Samplers that store pickles in the journal, and run code when reading them."""

RANGE = ("low", "high", "log", "step")

Space = dict[str, BaseDistribution]
"""Values by setting: a list of JSON texts, or a range."""

Point = dict[str, Any]
"""One value for each setting of a space."""


def space_of(user_space: Mapping[str, Any]) -> Space:
    """Read a search space: `{setting: [value, ...]}`, `{setting: {low: a, high: b, ...}}`."""
    return {name: _distribution(f"sweep.space: {name}", of) for name, of in user_space.items()}


def _distribution(path: str, value: Any) -> BaseDistribution:
    if isinstance(value, list):
        require(len(value) > 0, f"{path} is an empty list: add values.")
        # Optuna's choices are numbers or text; as JSON, lists are text, too.
        texts = [json.dumps(choice, default=str) for choice in value]  # YAML has dates
        duplicate = next((text for text in texts if texts.count(text) > 1), None)
        require(duplicate is None, f"{path} has {duplicate} twice: a value is tried once per seed.")
        return CategoricalDistribution(texts)
    shapes = "a list of values, [0.1, 0.2], or a range, {low: 1.0e-5, high: 1.0e-2, log: true}"
    require(isinstance(value, dict), f"{path} must be {shapes}; got {value!r}.")
    for key in value:
        require(
            key in RANGE,
            f"{path}: a range has no '{key}'; it has {', '.join(RANGE)}{closest(key, RANGE)}.",
        )
    numbers = {key: value[key] for key in ("low", "high", "step") if value.get(key) is not None}
    require({"low", "high"} <= set(numbers), f"{path}: a range needs low and high; got {value!r}.")
    for key, number in numbers.items():
        cure = " (YAML takes 1e-5 for a text: write 1.0e-5)" if isinstance(number, str) else ""
        require(_is_number(number), f"{path}: {key} must be a number, got {number!r}{cure}.")
    log = value.get("log", False)
    require(isinstance(log, bool), f"{path}: log must be true or false, got {log!r}.")
    # Two integers make a range of integers: a size of 2.5 would fail in its trial.
    ints = all(isinstance(number, int) for number in numbers.values())
    try:
        return (
            IntDistribution(**numbers, log=log) if ints else FloatDistribution(**numbers, log=log)
        )
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _is_number(value: Any) -> bool:
    # type() excludes bool; a comparison, because no float holds each integer.
    return type(value) in (int, float) and abs(value) < 1e308


def holds(distribution: BaseDistribution, value: Any) -> bool:
    """Return whether a setting allows a value, in Optuna's encoding."""
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return _is_number(value) and distribution.low <= value <= distribution.high


def encoded(space: Space, point: Point) -> Point:
    """Return a point in Optuna's encoding: choices, which may be lists, as JSON."""
    return {
        name: json.dumps(value, default=str) if _is_choice(space[name]) else value
        for name, value in point.items()
    }


def decoded(space: Space, params: Point) -> Point:
    """Return a point from Optuna's encoding, in the order of its space."""
    return {
        name: json.loads(params[name]) if _is_choice(distribution) else params[name]
        for name, distribution in space.items()
    }


def _is_choice(distribution: BaseDistribution) -> bool:
    return isinstance(distribution, CategoricalDistribution)


def ends_of(distribution: BaseDistribution) -> Sequence[Any]:
    """Return all values of a list, or both ends of a range."""
    if isinstance(distribution, CategoricalDistribution):
        return [json.loads(str(text)) for text in distribution.choices]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return [distribution.low, distribution.high]


def check_first(space: Space, points: Sequence[Point]) -> None:
    """Refuse first points outside of the space."""
    for point in points:
        unknown = [name for name in point if name not in space]
        require(
            not unknown,
            f"sweep.first has '{', '.join(unknown)}', which is not in sweep.space"
            f"{closest(unknown[0], space) if unknown else ''}.",
        )
        missing = ", ".join(name for name in space if name not in point)
        require(
            not missing,
            f"sweep.first: a point lacks {missing}; a point needs every setting of sweep.space.",
        )
        for name, value in encoded(space, point).items():
            ends = ends_of(space[name])
            allowed = "among {}" if _is_choice(space[name]) else "from {} to {}"
            ends_shown = (", ".join(map(str, ends)),) if _is_choice(space[name]) else ends
            require(
                holds(space[name], value),
                f"sweep.first: {name} is {point[name]!r}, but sweep.space has it "
                f"{allowed.format(*ends_shown)}.",
            )


def size_of(space: Space) -> int:
    """Return the number of points of a grid."""
    ranges = [name for name, distribution in space.items() if not _is_choice(distribution)]
    require(
        not ranges,
        f"sweep.search: grid tries every value, but {', '.join(ranges)} is a range: list the "
        "values, or choose sweep.search: random.",
    )
    return math.prod(len(ends_of(distribution)) for distribution in space.values())


def grid_point(space: Space, number: int) -> Point:
    """Return a point of a grid, in Optuna's encoding; the last setting changes fastest."""
    choices = [distribution.choices for distribution in space.values()]  # type: ignore[attr-defined]  # all are categorical
    indices = np.unravel_index(number, [len(choice) for choice in choices])
    return {name: values[i] for name, values, i in zip(space, choices, indices, strict=True)}


def sampler_of(settings: SweepSettings, point: int) -> optuna.samplers.BaseSampler:
    """Make the sampler of a point from `settings.seed` and the number of the point alone."""
    search = settings.search
    require(
        search not in (GRID, RANDOM) or not settings.search_args,
        f"sweep.search_args: {search} takes none.",
    )
    seed = int(np.random.SeedSequence([settings.seed, point]).generate_state(1)[0])
    if search in (GRID, RANDOM):
        return optuna.samplers.RandomSampler(seed=seed)
    if search == "QMCSampler":
        seed = settings.seed  # one sequence for all points; the journal stores its position
    names = (GRID, RANDOM, *SAMPLERS, *UNPICKLING)
    # `search_args` may replace the seed.
    args = {"seed": seed, **settings.search_args}
    sampler: optuna.samplers.BaseSampler = _built(optuna.samplers, "search", search, args, names)
    return sampler


def pruner_of(settings: SweepSettings) -> optuna.pruners.BasePruner:
    """Build the pruner that ends trials early; without a setting, it does nothing."""
    if settings.pruner is None:
        require(not settings.pruner_args, "sweep.pruner_args needs sweep.pruner: name a pruner.")
        return optuna.pruners.NopPruner()  # with None, Optuna would use its own default
    pruners = [name for name in optuna.pruners.__all__ if name != "BasePruner"]
    pruner: optuna.pruners.BasePruner = _built(
        optuna.pruners, "pruner", settings.pruner, settings.pruner_args, pruners
    )
    return pruner


def _built(
    module: Any, setting: str, name: str | None, args: Mapping[str, Any], allowed: Sequence[str]
) -> Any:
    require(
        name in allowed,
        f"sweep.{setting} must be one of {', '.join(allowed)}; got '{name}'"
        f"{closest(str(name), allowed)}.",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return getattr(module, str(name))(**args)
    except Exception as error:  # each class raises its own errors for wrong arguments
        raise ConfigurationError(
            f"sweep.{setting}: {name} of Optuna takes no {dict(args)}: {error}"
        ) from error
