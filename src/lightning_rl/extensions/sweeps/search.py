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

from lightning_rl.extensions.sweeps.sweep_settings import SweepSettings
from lightning_rl.system.errors import ConfigurationError, closest, require

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


def space_of(given: Mapping[str, Any]) -> Space:
    """Read a search space: `{setting: [value, ...]}`, `{setting: {low: a, high: b, ...}}`."""
    return {name: _distribution(f"sweep.space: {name}", value) for name, value in given.items()}


def _distribution(where: str, value: Any) -> BaseDistribution:
    if isinstance(value, list):
        require(len(value) > 0, f"{where} is an empty list: add values.")
        texts = [json.dumps(one, default=str) for one in value]  # YAML has dates
        twice = next((one for one in texts if texts.count(one) > 1), None)
        require(twice is None, f"{where} has {twice} twice: each value is tried once per seed.")
        return CategoricalDistribution(texts)
    shapes = "a list of values, [0.1, 0.2], or a range, {low: 1.0e-5, high: 1.0e-2, log: true}"
    require(isinstance(value, dict), f"{where} must be {shapes}; got {value!r}.")
    for key in value:
        require(
            key in RANGE,
            f"{where}: a range has no '{key}'; it has {', '.join(RANGE)}{closest(key, RANGE)}.",
        )
    require({"low", "high"} <= set(value), f"{where}: a range needs low and high; got {value!r}.")
    numbers = {key: value[key] for key in ("low", "high", "step") if value.get(key) is not None}
    for key, number in numbers.items():
        cure = " (YAML takes 1e-5 for a text: write 1.0e-5)" if isinstance(number, str) else ""
        require(_is_number(number), f"{where}: {key} must be a number, got {number!r}{cure}.")
    log = value.get("log", False)
    require(isinstance(log, bool), f"{where}: log must be true or false, got {log!r}.")
    whole = all(isinstance(number, int) for number in numbers.values())
    try:
        return (
            IntDistribution(**numbers, log=log) if whole else FloatDistribution(**numbers, log=log)
        )
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type(): excludes bool


def holds(allowed: BaseDistribution, value: Any) -> bool:
    """Return whether a setting allows a value, in Optuna's encoding."""
    if isinstance(allowed, CategoricalDistribution):
        return value in allowed.choices
    assert isinstance(allowed, IntDistribution | FloatDistribution)
    return _is_number(value) and allowed.low <= value <= allowed.high


def encoded(space: Space, point: Point) -> Point:
    """Return a point in Optuna's encoding: choices, which may be lists, as JSON."""
    return {
        name: json.dumps(value, default=str) if _is_choice(space[name]) else value
        for name, value in point.items()
    }


def decoded(space: Space, params: Point) -> Point:
    """Return a point from Optuna's encoding, in the order of its space."""
    return {
        name: json.loads(params[name]) if _is_choice(of) else params[name]
        for name, of in space.items()
    }


def _is_choice(allowed: BaseDistribution) -> bool:
    return isinstance(allowed, CategoricalDistribution)


def ends_of(allowed: BaseDistribution) -> Sequence[Any]:
    """Return all values of a list, or both ends of a range."""
    if isinstance(allowed, CategoricalDistribution):
        return [json.loads(str(one)) for one in allowed.choices]
    assert isinstance(allowed, IntDistribution | FloatDistribution)
    return [allowed.low, allowed.high]


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
            between = "among {}" if _is_choice(space[name]) else "from {} to {}"
            there = (", ".join(map(str, ends)),) if _is_choice(space[name]) else ends
            require(
                holds(space[name], value),
                f"sweep.first: {name} is {point[name]!r}, but sweep.space has it "
                f"{between.format(*there)}.",
            )


def size_of(space: Space) -> int:
    """Return the number of points of a grid."""
    ranges = [name for name, allowed in space.items() if not _is_choice(allowed)]
    require(
        not ranges,
        f"sweep.search: grid tries every value, but {', '.join(ranges)} is a range: list the "
        "values, or choose sweep.search: random.",
    )
    return math.prod(len(ends_of(allowed)) for allowed in space.values())


def grid_point(space: Space, number: int) -> Point:
    """Return a point of a grid, in Optuna's encoding; the last setting changes fastest."""
    choices = [allowed.choices for allowed in space.values()]  # type: ignore[attr-defined]  # all are categorical
    places = np.unravel_index(number, [len(values) for values in choices])
    return {name: of[i] for name, of, i in zip(space, choices, places, strict=True)}


def sampler_of(settings: SweepSettings, point: int) -> optuna.samplers.BaseSampler:
    """Make the sampler of a point from `settings.seed` and the number of the point alone."""
    how = settings.search
    require(
        how not in (GRID, RANDOM) or not settings.search_args,
        f"sweep.search_args: {how} takes none.",
    )
    seed = int(np.random.SeedSequence([settings.seed, point]).generate_state(1)[0])
    if how in (GRID, RANDOM):
        return optuna.samplers.RandomSampler(seed=seed)
    if how == "QMCSampler":
        seed = settings.seed  # one sequence for all points; the journal stores its position
    known = (GRID, RANDOM, *SAMPLERS, *UNPICKLING)
    args = {"seed": seed, **settings.search_args}
    sampler: optuna.samplers.BaseSampler = _made(optuna.samplers, "search", how, args, known)
    return sampler


def pruner_of(settings: SweepSettings) -> optuna.pruners.BasePruner:
    """Build the pruner that ends trials early; without a setting, it does nothing."""
    if settings.pruner is None:
        require(not settings.pruner_args, "sweep.pruner_args needs sweep.pruner: name a pruner.")
        return optuna.pruners.NopPruner()  # with None, Optuna would use its own default
    known = [name for name in optuna.pruners.__all__ if name != "BasePruner"]
    pruner: optuna.pruners.BasePruner = _made(
        optuna.pruners, "pruner", settings.pruner, settings.pruner_args, known
    )
    return pruner


def _made(
    module: Any, setting: str, name: str | None, args: Mapping[str, Any], known: Sequence[str]
) -> Any:
    require(
        name in known,
        f"sweep.{setting} must be one of {', '.join(known)}; got '{name}'"
        f"{closest(str(name), known)}.",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return getattr(module, str(name))(**args)
    except Exception as error:  # each class raises its own errors for wrong arguments
        raise ConfigurationError(
            f"sweep.{setting}: {name} of Optuna takes no {dict(args)}: {error}"
        ) from error
