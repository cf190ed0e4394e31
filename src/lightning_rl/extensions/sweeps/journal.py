"""Store the trials of a sweep in Optuna's journal."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import reason_of, require
from lightning_rl.extend.files import lock_file, open_file, writing
from lightning_rl.extensions.sweeps.search import (
    GRID,
    Point,
    Space,
    decoded,
    encoded,
    grid_point,
    holds,
    pruner_of,
    sampler_of,
    size_of,
)
from lightning_rl.extensions.sweeps.sweep_settings import TRIALS, SweepSettings

JOURNAL, LOCK = "journal.log", ".lock"
"""Files of a sweep: its journal, and the lock of the process that runs it."""

NAME = "sweep"
"""Name of Optuna's study in the journal."""

MOST_BYTES = 2**28
"""Maximum bytes of a journal; a trial with a hundred evaluations takes 30 kB."""


@dataclass
class Trial:
    """A run of a sweep: a point of its space, and a seed.

    `number`: the seeds of a point have consecutive numbers. `asked`: Optuna's trial; a repeated
    trial has a new one.
    """

    number: int
    seed: int
    point: Point
    asked: optuna.Trial

    @property
    def name(self) -> str:
        return f"trial_{self.number:03d}_seed{self.seed}"


class _NoLock(JournalFileOpenLock):
    """No lock, because Optuna's lock file would survive a kill; `SweepJournal` has its own."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class SweepJournal:
    """Trials of a sweep, which one process runs; it locks a file, so that no other one does.

    Each trial is checked against the space and the seeds, because other users may have written the
    journal.
    """

    def __init__(self, directory: Path, settings: SweepSettings, space: Space, mode: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweep itself prints its progress
        self.path = directory / JOURNAL
        self._directory, self._settings, self._space = directory, settings, space
        assert isinstance(settings.seeds, list)
        self._seeds: list[int] = settings.seeds
        self.total = point_count(settings, space) * len(self._seeds)
        self._lock: int | None = None
        direction = StudyDirection.MAXIMIZE if mode == "max" else StudyDirection.MINIMIZE
        if self.path.exists():
            open_file(self.path, directory, MOST_BYTES).close()
        with self._open():
            _drop_cut_off_line(self.path)
            no_lock = _NoLock(str(self.path))
            storage = JournalStorage(JournalFileBackend(str(self.path), lock_obj=no_lock))
            if NAME not in optuna.get_all_study_names(storage):
                optuna.create_study(storage=storage, study_name=NAME, direction=direction)
            self._study = optuna.load_study(
                study_name=NAME,
                storage=storage,
                sampler=sampler_of(settings, 0),
                pruner=pruner_of(settings),
            )
            other_mode = self._study.direction != direction
            self.trials()
        require(not other_mode, f"{self.path} belongs to a sweep with another trainer.best_mode.")

    @contextmanager
    def _open(self) -> Iterator[None]:
        try:
            with writing(self.path):
                yield
        except ConfigurationError:
            raise
        # Optuna replays lines without checks, and a damaged last one only at the next: any error.
        except Exception as error:
            raise ConfigurationError(
                f"{self.path} cannot be read: {type(error).__name__}: {reason_of(error)}. Begin a "
                "new sweep."
            ) from error

    def trials(self) -> dict[int, FrozenTrial]:
        """Return the latest attempt of each started trial, by its number."""
        latest: dict[int, FrozenTrial] = {}
        for attempt in self._study.get_trials(deepcopy=False):
            require(
                self._is_ours(attempt, len(latest)),
                f"{self.path} was changed: it has a trial that does not belong to this sweep: "
                f"{attempt.user_attrs} {attempt.params}. Begin a new sweep.",
            )
            latest[self._number(attempt)] = attempt
        return latest

    def _number(self, trial: FrozenTrial) -> int:
        attrs = trial.user_attrs
        return int(attrs["point"] * len(self._seeds) + self._seeds.index(attrs["seed"]))

    def _is_ours(self, trial: FrozenTrial, started: int) -> bool:
        attrs = trial.user_attrs
        params = [*trial.system_attrs.get("fixed_params", {}).items(), *trial.params.items()]
        return (
            # type(), because isinstance takes True for an int.
            type(attrs.get("point")) is int
            and attrs["point"] >= 0
            and type(attrs.get("seed")) is int
            and attrs["seed"] in self._seeds
            # Trials begin in order: this process did not write one beyond the begun ones.
            and self._number(trial) <= min(started, self.total - 1)
            and all(name in self._space and holds(self._space[name], x) for name, x in params)
            and all(self._space[name] == setting for name, setting in trial.distributions.items())
            and (trial.values is None or [type(score) for score in trial.values] == [float])
            and (trial.values is not None or trial.state != TrialState.COMPLETE)
            and all(type(step) is int for step in trial.intermediate_values)
            and all(type(score) is float for score in trial.intermediate_values.values())
        )

    def enter(self) -> None:
        """Lock the sweep, and queue the trials again that failed or were interrupted."""
        running = (
            f"Sweep {self._directory} is being run by {{owner}}: wait until it ends, or stop it."
        )
        self._lock = lock_file(self._directory / LOCK, running)
        with self._open():
            for trial in self.trials().values():
                # With the lock held, no process runs a trial that the journal calls running.
                if trial.state in (TrialState.FAIL, TrialState.RUNNING):
                    self._queue_again(trial)

    def leave(self) -> None:
        """Unlock the sweep."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def claim(self) -> Trial | None:
        """Return the next trial to run; None if all have begun."""
        with self._open():
            trials = self.trials()
            if not any(trial.state == TrialState.WAITING for trial in trials.values()):
                if len(trials) >= self.total:
                    return None
                self._queue_next(trials)
            return self._ask()

    def _ask(self) -> Trial:
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        # Each point has its own sampler: its random numbers depend only on the journal.
        self._study.sampler = sampler_of(self._settings, waiting[0].user_attrs["point"])
        try:
            trial = self._study.ask(self._space)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigurationError(
                f"sweep.search: {self._settings.search} of Optuna fails: {error}"
            ) from error
        seed = trial.user_attrs["seed"]
        number = trial.user_attrs["point"] * len(self._seeds) + self._seeds.index(seed)
        return Trial(number, seed, decoded(self._space, trial.params), trial)

    def _queue_next(self, trials: dict[int, FrozenTrial]) -> None:
        point, seed = divmod(len(trials), len(self._seeds))
        settings = self._settings
        params: Point = {}  # left to the sampler
        if seed > 0:
            # Further seeds of a point repeat the parameters of its first seed.
            params = trials[len(trials) - seed].params
        elif settings.search == GRID:
            params = grid_point(self._space, point)
        elif point < len(settings.first):
            params = encoded(self._space, settings.first[point])
        self._study.enqueue_trial(params, {"point": point, "seed": self._seeds[seed]})

    def _queue_again(self, trial: FrozenTrial) -> None:
        if trial.state == TrialState.RUNNING:
            self._study.tell(trial.number, state=TrialState.FAIL)
        # Optuna cannot restart a trial: queue a new one with the same parameters.
        params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        attrs = {name: trial.user_attrs[name] for name in ("point", "seed")}
        self._study.enqueue_trial(params, attrs)

    def report(self, trial: Trial, curve: Sequence[tuple[int, float]]) -> bool:
        if self._settings.pruner is None:
            return False
        with self._open():
            reported = self.trials()[trial.number].intermediate_values
            for env_steps, score in curve:
                # Optuna ignores a second report of a step, with a warning.
                if env_steps not in reported and math.isfinite(score):
                    trial.asked.report(score, env_steps)
            return bool(trial.asked.should_prune())

    def finish(self, trial: Trial, score: float | None, *, pruned: bool) -> None:
        state = TrialState.FAIL
        if score is not None:
            # Optuna scores a pruned trial by its last report.
            state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        with self._open():
            self._study.tell(trial.asked, None if pruned else score, state=state)

    def give_back(self, trial: Trial) -> None:
        """Queue an interrupted trial again, to be resumed."""
        with self._open():
            self._queue_again(self.trials()[trial.number])

    def count(self, *states: TrialState) -> int:
        return sum(trial.state in states for trial in self.trials().values())

    def points(self) -> list[tuple[Point, list[FrozenTrial]]]:
        """Return the tried points, each with the trials of its seeds."""
        by_point: dict[int, list[FrozenTrial]] = {}
        for trial in self.trials().values():
            by_point.setdefault(trial.user_attrs["point"], []).append(trial)
        return [(decoded(self._space, seeds[0].params), seeds) for seeds in by_point.values()]


def point_count(settings: SweepSettings, space: Space) -> int:
    """Return the number of points that a sweep tries."""
    return size_of(space) if settings.search == GRID else settings.trials or TRIALS


def _drop_cut_off_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        # A process that was killed may have written half of its last line.
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if size and file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
