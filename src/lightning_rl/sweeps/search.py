"""Choose the settings of a sweep's trials: all of a grid, at random, or as Optuna's samplers do."""

import inspect
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, cast

from lightning_rl.system.errors import ConfigurationError, closest, require

GRID, RANDOM = "grid", "random"
"""The searches that need no package."""

RANGE = ("low", "high", "log", "step")
"""What a range may say of itself."""

INSTALL = "pip install 'lightning-rl[sweep]'"


@dataclass(frozen=True)
class Range:
    """Numbers between two, both included; whole ones where both are whole.

    Args:
        low: the least.
        high: the largest.
        log: draw the logarithm uniformly.
        step: between two of the numbers; None for any.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def _ends(self) -> tuple[int, int]:
        return int(self.low), int(self.high)

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, generator: random.Random) -> float:
        """Draw a number."""
        low, high = self.low, self.high
        if self.step is not None:
            return low + self.step * generator.randrange(int((high - low) / self.step + 1e-9) + 1)
        if not self.log:
            return generator.randint(*self._ends) if self.whole else generator.uniform(low, high)
        if self.whole:  # as wide a share for the ends as for those between
            drawn = math.exp(generator.uniform(math.log(low - 0.5), math.log(high + 0.5)))
            return min(max(round(drawn), low), high)
        return min(max(math.exp(generator.uniform(math.log(low), math.log(high))), low), high)


Space = Mapping[str, Sequence[Any] | Range]
"""By the path of a setting: the values to choose from, or a range."""

Point = dict[str, Any]
"""A value for each setting of a space."""


def space_of(given: Mapping[str, Any]) -> Space:
    """Read a search space.

    Args:
        given: `{setting: [value, ...]}`, or `{setting: {low: a, high: b, log: true, step: c}}`.

    Raises:
        ConfigurationError: for what is neither, naming the setting.
    """
    return {name: _values_of(name, value) for name, value in given.items()}


def check_first(space: Space, points: Sequence[Mapping[str, Any]]) -> None:
    """Refuse points to begin with that are none of a space.

    Raises:
        ConfigurationError: naming the setting.
    """
    for point in points:
        unknown = [name for name in point if name not in space]
        require(
            not unknown,
            f"sweep.first has '{', '.join(unknown)}', which is not in sweep.space"
            f"{closest(unknown[0], space) if unknown else ''}.",
        )
        missing = ", ".join(name for name in space if name not in point)
        require(not missing, f"sweep.first: a point has no {missing}; it needs all of the space.")
        for name, value in point.items():
            allowed = space[name]
            if isinstance(allowed, Range):
                number = isinstance(value, int | float) and not isinstance(value, bool)
                require(
                    number and allowed.low <= value <= allowed.high,
                    f"sweep.first: {name} is {value!r}, and sweep.space has it from {allowed.low} "
                    f"to {allowed.high}.",
                )
            else:
                require(
                    value in allowed,
                    f"sweep.first: {name} is {value!r}, and sweep.space has it among "
                    f"{', '.join(map(str, allowed))}.",
                )


def _values_of(name: str, value: Any) -> Sequence[Any] | Range:
    where = f"sweep.space: {name}"
    if isinstance(value, list):
        require(len(value) > 0, f"{where} is an empty list: give the values to choose from.")
        seen = [json.dumps(one) for one in value]
        twice = next((one for one in seen if seen.count(one) > 1), None)
        require(twice is None, f"{where} has {twice} twice: each value is tried once a seed.")
        return value
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
        wrong = isinstance(number, bool) or not isinstance(number, int | float)
        cure = " (YAML takes 1e-5 for a text: write 1.0e-5)" if isinstance(number, str) else ""
        require(not wrong, f"{where}: {key} must be a number, got {number!r}{cure}.")
    log = value.get("log", False)
    require(isinstance(log, bool), f"{where}: log must be true or false, got {log!r}.")
    chosen = Range(value["low"], value["high"], log, value.get("step"))
    require(
        chosen.low < chosen.high,
        f"{where}: low must be below high, got {chosen.low} and {chosen.high}.",
    )
    require(not log or chosen.low > 0, f"{where}: with log, low must be positive: {chosen.low}.")
    require(not (log and chosen.step), f"{where}: log and step do not go together.")
    require(chosen.step is None or chosen.step > 0, f"{where}: step must be positive.")
    return chosen


class Search:
    """Hand out points of a space, and learn what came of them.

    Args:
        space: to choose from.
        how: `grid`, `random`, or a class of `optuna.samplers`.
        how_args: of that class.
        pruner: a class of `optuna.pruners`, or None to let all trials run to their end.
        pruner_args: of that class.
        mode: whether the largest or the smallest score is the best.
        seed: of what is drawn.

    Raises:
        ConfigurationError: where these do not go together, or Optuna is not installed.
    """

    def __init__(
        self,
        space: Space,
        how: str,
        how_args: Mapping[str, Any],
        pruner: str | None,
        pruner_args: Mapping[str, Any],
        mode: str,
        seed: int,
    ) -> None:
        self.space, self.how = space, how
        ranges = [name for name, values in space.items() if isinstance(values, Range)]
        require(
            how != GRID or not ranges,
            f"sweep.search: grid tries every value, and {', '.join(ranges)} has no end of them: "
            "list the values, or choose sweep.search: random.",
        )
        self._generator = random.Random(seed)
        self._samples = how not in (GRID, RANDOM)
        require(self._samples or not how_args, f"sweep.search_args: {how} takes none.")
        require(bool(pruner) or not pruner_args, "sweep.pruner_args are of no pruner: name one.")
        self._study: Any = None
        if self._samples or pruner:
            self._study = _study(how, how_args, pruner, pruner_args, mode, seed, self._samples)

    def __len__(self) -> int:
        """Return how many points a grid has."""
        return math.prod(len(cast(Sequence[Any], values)) for values in self.space.values())

    def points(
        self, count: int, first: Sequence[Point] = (), asked: Sequence[Point] = ()
    ) -> Iterator[Point | None]:
        """Yield the points that are known beforehand; None where a sampler is asked in its turn.

        Args:
            count: of the points of a search that is no grid.
            first: points that come before those of a search that is no grid.
            asked: what earlier calls have yielded, or a sampler has chosen; none at first.
        """
        if self.how == GRID:
            every = product(*(cast(Sequence[Any], values) for values in self.space.values()))
            yield from (dict(zip(self.space, values, strict=True)) for values in every)
        elif self._samples:
            yield from islice([*(asked or first), *[None] * count], count)
        else:
            yield from islice([*first, *(self._drawn() for _ in range(count))], count)

    def _drawn(self) -> Point:
        return {
            name: values.draw(self._generator)
            if isinstance(values, Range)
            else self._generator.choice(values)
            for name, values in self.space.items()
        }

    def begin(self, point: Point | None) -> tuple[Point, Any]:
        """Return the point of a trial that begins, and what `report` and `end` know it by.

        Args:
            point: None to have the sampler choose.
        """
        if self._study is None:
            assert point is not None
            return point, None
        if point is not None:
            self._study.enqueue_trial(
                {name: self._kept(name, value) for name, value in point.items()}
            )
        trial = self._study.ask()
        return {name: self._suggested(trial, name) for name in self.space}, trial

    def _kept(self, name: str, value: Any) -> Any:
        """Return a value as Optuna keeps it: choices as text, which may be lists."""
        return value if isinstance(self.space[name], Range) else json.dumps(value)

    def _suggested(self, trial: Any, name: str) -> Any:
        values = self.space[name]
        if not isinstance(values, Range):
            return json.loads(trial.suggest_categorical(name, [json.dumps(one) for one in values]))
        suggest = trial.suggest_int if values.whole else trial.suggest_float
        step = (1 if values.whole else None) if values.step is None else values.step
        return suggest(name, values.low, values.high, log=values.log, step=step)

    def report(self, trial: Any, curve: Sequence[tuple[int, float]]) -> bool:
        """Tell the pruner of evaluations [(env steps, score)]; return whether the trial may end."""
        if trial is None:
            return False
        for env_steps, score in curve:
            trial.report(score, env_steps)
        return bool(trial.should_prune())

    def end(self, trial: Any, score: float | None, *, pruned: bool = False) -> None:
        """Tell the sampler of the score of a trial; None for one that has failed."""
        if trial is None:
            return
        from optuna.trial import TrialState

        if score is None:
            self._study.tell(trial, state=TrialState.FAIL)
        elif pruned:
            self._study.tell(trial, state=TrialState.PRUNED)  # by its last report
        else:
            self._study.tell(trial, score)


def _study(
    how: str,
    how_args: Mapping[str, Any],
    pruner: str | None,
    pruner_args: Mapping[str, Any],
    mode: str,
    seed: int,
    samples: bool,
) -> Any:
    """Make a study of Optuna's, held in memory: the sweep keeps what came of its trials."""
    try:
        import optuna
    except ImportError as error:
        wanted = f"sweep.search: {how}" if samples else f"sweep.pruner: {pruner}"
        raise ConfigurationError(
            f"{wanted} is Optuna's, which is not installed: {INSTALL}. Without it there are "
            "sweep.search: grid and random, and no pruning."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweep says what it does itself
    made: dict[str, Any] = {
        "sampler": optuna.samplers.RandomSampler(seed=seed),
        "pruner": optuna.pruners.NopPruner(),  # a study that is given none has one of Optuna's own
    }
    if samples:
        args = {"seed": seed, **how_args} if _takes_seed(optuna.samplers, how) else how_args
        made["sampler"] = _made(optuna.samplers, "search", how, args, (GRID, RANDOM))
    if pruner:
        made["pruner"] = _made(optuna.pruners, "pruner", pruner, pruner_args)
    made["direction"] = "maximize" if mode == "max" else "minimize"
    return optuna.create_study(**made)


def _takes_seed(module: Any, name: str) -> bool:
    found = getattr(module, name, None)
    # Its signature, not its code: Optuna wraps the constructors of some.
    return isinstance(found, type) and "seed" in inspect.signature(found).parameters


def _made(
    module: Any, setting: str, name: str, args: Mapping[str, Any], ours: Sequence[str] = ()
) -> Any:
    """Make an object of a class of Optuna's."""
    bases = ("BaseSampler", "BasePruner", "GridSampler", "PartialFixedSampler")
    known = [*ours, *(one for one in module.__all__ if one[0].isupper() and one not in bases)]
    require(
        name in known,
        f"sweep.{setting} must be one of {', '.join(known)}; got '{name}'{closest(name, known)}.",
    )
    try:
        return getattr(module, name)(**args)
    except Exception as error:  # each has words of its own for what it does not take
        raise ConfigurationError(
            f"sweep.{setting}: {name} of Optuna takes no {dict(args)}: {error}"
        ) from error
