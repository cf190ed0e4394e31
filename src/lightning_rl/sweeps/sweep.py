"""Run `rl-cli sweep`: train by several seeds and settings, and go on after a kill."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_rl.cli.arguments import value_of
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.reports.runs import MANIFEST, NUMBERS, read_columns
from lightning_rl.reports.statistics import interval_of_iqm, iqm
from lightning_rl.sweeps.ray_trials import LOCAL, RayTrials
from lightning_rl.sweeps.search import (
    GRID,
    RANDOM,
    Point,
    Range,
    Search,
    Space,
    check_first,
    space_of,
)
from lightning_rl.sweeps.sweep_settings import (
    TRIALS,
    SweepSettings,
    kept_settings,
    sweep_parser,
    sweep_settings,
)
from lightning_rl.sweeps.trials import (
    POLL_SECONDS,
    Begin,
    LocalTrials,
    Place,
    RunningTrial,
    usable_cores,
)
from lightning_rl.system.errors import ConfigurationError, check_range, closest, require
from lightning_rl.system.files import expanded, lock_file, read_json, read_text, write_atomically
from lightning_rl.system.plain_yaml import read_yaml
from lightning_rl.system.runs import CHECKPOINTS, new_run_dir

STATE, BASE = "sweep.json", "base.yaml"
"""Files of a sweep: what became of its trials, and the configuration that all begin with."""

SHARE_OF_READING = 0.02
"""Of the time, at most, that reading curves for the pruner takes; a curve may have 100,000 rows."""

SAVING_SECONDS = 60.0
"""How long trials may take to save once a signal has come, before they are killed."""

LOSSES = 3
"""How often in a row a trial may be lost with its machine before it has come any further."""

ROOM_SECONDS = 10.0
"""After which it is said that a trial waits for room."""

OWN = ("exp_name", "output_dir", "seed_everything", "trainer.run_dir", "ckpt_path", "config")
"""Settings that a space must not have: the sweep sets them."""

CHANGEABLE = ("jobs", "cores_per_trial", "gpus_per_trial", "address", "trials")
"""Of the sweep, what may be said anew when it is resumed."""


Parse = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
"""Checks options of `fit`, alone and with each of several others, and returns the configuration."""


@dataclass
class Trial:
    """A run of a sweep: a point of its space, and a seed.

    Attributes:
        outcome: waiting, running, finished, pruned, or `failed: <why>`.
        score: of its evaluation; None until there is one.
    """

    number: int
    point: int
    seed: int
    outcome: str = "waiting"
    score: float | None = None
    env_steps: int | None = None
    seconds: float = 0.0
    run: str | None = None

    @property
    def name(self) -> str:
        """First part of the name of its run directory."""
        return f"trial_{self.number:03d}_seed{self.seed}"

    @property
    def done(self) -> bool:
        """Whether it needs no more training."""
        return self.outcome in ("finished", "pruned")


def sweep(options: Sequence[str], parse: Parse, begin: Begin) -> None:
    """Run a sweep, or go on with one.

    Args:
        options: of the command line: `--sweep...` and `--resume`; the others are those of `fit`.
        parse: checks options of `fit`.
        begin: runs `rl-cli fit`, in a process of its own.

    Raises:
        ConfigurationError: for what cannot be swept, before a trial begins.
    """
    own, rest = _apart(options)
    if "-h" in options or "--help" in options:
        sweep_parser().parse_args(["--help"])  # which ends the process
    settings = sweep_settings(own)
    resumed = value_of("--resume", own)
    if resumed is None:
        made = _new(settings, rest, parse)
        with made.place(begin) as place:
            made.make_directory()
            with _alone_in(made.directory):
                made.run(place)
        return
    directory = _resumable(resumed, own, rest)
    with _alone_in(directory):  # before it is read, or written
        made = _resumed(directory, settings, own)
        with made.place(begin) as place:
            made.save()
            made.run(place)


def _apart(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of the sweep, and those of its trials."""
    own: list[str] = []
    rest: list[str] = []
    into = rest
    for option in options:
        if option.startswith("-"):
            flag = option.partition("=")[0]
            into = own if flag.split(".")[0] in ("--sweep", "--resume") else rest
        into.append(option)
    return own, rest


def _new(settings: SweepSettings, rest: Sequence[str], parse: Parse) -> "_Sweep":
    """Check everything, and make a sweep that has no directory yet."""
    for name in ("--ckpt_path", "--trainer.run_dir", "--seed_everything"):
        cure = {
            "--ckpt_path": "trials begin with a policy by --trainer.init_from",
            "--seed_everything": "say --sweep.seeds",
        }.get(name, "each trial has a directory of its own, below --output_dir")
        require(value_of(name, rest) is None, f"A sweep takes no {name}: {cure}.")
    require(
        value_of("--config", rest) is not None or value_of("--model", rest) is not None,
        "sweep needs a config, which all trials begin with: --config FILE; or --resume last, to go "
        f"on with a sweep. Shipped: {', '.join(shipped_configs())}.",
    )
    space = space_of(settings.space)
    for name in space:
        path = ".".join(part for part in name.split(".") if part != "init_args")
        require(path not in OWN, f"sweep.space: {name} is set by the sweep itself.")
    text = parse(rest, list(_probes(space)))
    check_first(space, settings.first)
    base = read_yaml(text, "The configuration")
    seeds = settings.seeds if settings.seeds is not None else [base["seed_everything"]]
    if isinstance(seeds, int):
        check_range("sweep.seeds", seeds, least=1)
        seeds = list(range(1, seeds + 1))
    require(
        not any(isinstance(seed, bool) for seed in seeds),
        "seed_everything is true or false in the configuration: say --sweep.seeds.",
    )
    require(len(seeds) > 0, "sweep.seeds is an empty list: give a number of seeds, or seeds.")
    for seed in seeds:
        check_range("sweep.seeds", seed, least=0, most=2**32 - 1)
    require(len(set(seeds)) == len(seeds), f"sweep.seeds has a seed twice: {seeds}.")
    settings.seeds = seeds
    ranged = any(isinstance(values, Range) for values in space.values())
    settings.search = settings.search or (RANDOM if ranged else GRID)
    return _Sweep(Path(), settings, text)  # which refuses what does not go together


def _probes(space: Space) -> Iterator[list[str]]:
    """Yield options that together give each setting each of its values, and both ends of a range.

    A parse takes 0.2 s. There are as many as the longest list has values, not one for each value.
    """
    values = {
        name: (of.low, of.high) if isinstance(of, Range) else of for name, of in space.items()
    }
    for i in range(max(map(len, values.values()), default=0)):
        yield [f"--{name}={_typed(of[i % len(of)])}" for name, of in values.items()]


def _typed(value: Any) -> str:
    """Return a value as it is typed behind an option: YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _flags(options: Sequence[str]) -> set[str]:
    return {option.partition("=")[0] for option in options if option.startswith("-")}


def _resumable(given: str, own: Sequence[str], rest: Sequence[str]) -> Path:
    """Return the directory of a sweep that is to go on as it was begun."""
    allowed = {"--resume", *(f"--sweep.{name}" for name in CHANGEABLE)}
    wrong = sorted((_flags(own) - allowed) | (_flags(rest) - {"--output_dir"}))
    require(
        not wrong,
        f"A sweep is resumed as it was begun: {', '.join(wrong)} cannot be changed, but "
        f"{', '.join(sorted(allowed - {'--resume'}))} can.",
    )
    return _found(given, value_of("--output_dir", rest) or "outputs")


def _resumed(directory: Path, settings: SweepSettings, own: Sequence[str]) -> "_Sweep":
    """Read how far a sweep has come."""
    state = _state_of(directory / STATE)
    kept = kept_settings(state["settings"])
    before = kept.trials
    for name in CHANGEABLE:
        if f"--sweep.{name}" in _flags(own):
            setattr(kept, name, getattr(settings, name))
    require(
        kept.trials is None or before is None or kept.trials >= before,
        f"sweep.trials was {before}, and can only grow: got {kept.trials}.",
    )
    return _Sweep(directory, kept, read_text(directory / BASE, directory), state)


def _found(given: str, output_dir: str) -> Path:
    if given == "last":
        found = list(expanded(output_dir).glob(f"*/{STATE}"))
        require(len(found) > 0, f"There is no sweep in '{output_dir}': begin one, or set its path.")
        return max(found, key=lambda path: path.stat().st_mtime).parent
    directory = expanded(given)
    there = sorted(path.parent.name for path in directory.parent.glob(f"*/{STATE}"))
    require(
        (directory / STATE).is_file(),
        f"No sweep at {directory}: it has no {STATE}{closest(directory.name, there)}. Give the "
        "directory of a sweep, or last.",
    )
    return directory


def _state_of(path: Path) -> dict[str, Any]:
    try:
        state = read_json(path, path.parent)
        known = {one.name for one in fields(SweepSettings)}
        whole = set(state["settings"]) <= known and all(
            isinstance(state[name], list) for name in ("trials", "points")
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Begin a new sweep.") from error
    require(whole, f"{path} is of another version of lightning_rl. Begin a new sweep.")
    return state


def _restored(trial: Trial, kept: Any, path: Path) -> Trial:
    """Return a trial with what became of it. What names its directory is not taken from a file."""
    try:
        found = Trial(**kept)
    except TypeError as error:
        raise ConfigurationError(f"{path} has a trial that is none: {error}.") from error
    runs = rf"{trial.name}_2\w*"
    require(
        (found.number, found.point, found.seed) == (trial.number, trial.point, trial.seed)
        and isinstance(found.outcome, str)
        and isinstance(found.score, int | float | None)
        and isinstance(found.env_steps, int | None)
        and isinstance(found.seconds, int | float)
        and (found.run is None or re.fullmatch(runs, str(found.run)) is not None),
        f"{path} was changed: trial {trial.number} of this sweep has point {trial.point} and seed "
        f"{trial.seed}, and its run a name like {trial.name}_2..., got {kept}. Begin a new sweep.",
    )
    return replace(found, number=trial.number, point=trial.point, seed=trial.seed)


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    path = directory / ".lock"
    refusal = f"Sweep {directory} is being run by {{owner}}: wait for it, or end it."
    descriptor = lock_file(path, refusal)
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


class _Sweep:
    """Trials, what became of them, and those that run.

    Args:
        directory: where they and `sweep.json` are.
        settings: of the sweep.
        text: configuration of all trials.
        state: of `sweep.json`, where this goes on with one.
    """

    def __init__(
        self,
        directory: Path,
        settings: SweepSettings,
        text: str,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory, self.settings = directory, settings
        self._text, self._base = text, read_yaml(text, f"{directory / BASE}")
        trainer = self._base["trainer"]
        self.metric, self.mode = trainer["best_metric"], trainer["best_mode"]
        self._check_cores(trainer["num_threads"], trainer["devices"])
        self._check_gpus(trainer["accelerator"])
        self.search = Search(
            space_of(settings.space),
            settings.search or GRID,
            settings.search_args,
            settings.pruner,
            settings.pruner_args,
            self.mode,
            settings.seed,
        )
        check_range("sweep.trials", settings.trials, least=1)
        require(
            settings.search != GRID or settings.trials is None,
            f"sweep.trials is {settings.trials}, but a grid tries every point: leave it out, or "
            "choose sweep.search: random.",
        )
        require(
            settings.search != GRID or not settings.first,
            "sweep.first is tried before what a search chooses, and a grid tries every point: "
            "leave it out, or choose sweep.search: random.",
        )
        asked = [] if state is None else [point for point in state["points"] if point is not None]
        for point in asked:
            require(
                isinstance(point, dict) and point.keys() == self.search.space.keys(),
                f"{directory / STATE} was changed: {point!r} is no point of its space.",
            )
        self.points = list(self.search.points(settings.trials or TRIALS, settings.first, asked))
        seeds = settings.seeds
        assert isinstance(seeds, list)
        numbered = [(point, seed) for point in range(len(self.points)) for seed in seeds]
        self.trials = [Trial(i, *one) for i, one in enumerate(numbered)]
        for i, kept in enumerate([] if state is None else state["trials"][: len(self.trials)]):
            self.trials[i] = _restored(self.trials[i], kept, directory / STATE)
        self._running: dict[int, _Running] = {}
        self._losses: dict[int, tuple[float, int]] = {}
        self._signal: int | None = None
        self._hurried = False  # by a second one

    def _check_cores(self, num_threads: int, devices: Any) -> None:
        """Work out how many trials run at a time, and on how many cores each."""
        given = self.settings
        ranks = _count(devices)
        threads = num_threads * ranks
        self.cores = threads if given.cores_per_trial is None else given.cores_per_trial
        check_range("sweep.cores_per_trial", self.cores, least=0)
        check_range("sweep.jobs", given.jobs, least=1)
        require(
            self.cores == 0 or threads <= self.cores,
            f"sweep.cores_per_trial is {self.cores}, and trainer.num_threads {num_threads}"
            f"{f' in each of {ranks} processes (trainer.devices)' * (ranks > 1)}: its threads "
            f"would wait for each other. Give it {threads}, or 0, which pins none.",
        )
        usable = usable_cores()
        wanted = (given.jobs or 1) * self.cores
        require(
            given.address not in (None, LOCAL) or wanted <= usable,
            f"sweep.jobs {given.jobs or 1} of {self.cores} cores each (sweep.cores_per_trial) are "
            f"{wanted}, and this process may use {usable}: fewer of them, or "
            "sweep.cores_per_trial 0, which pins none.",
        )

    def _check_gpus(self, accelerator: str) -> None:
        """Refuse GPUs that are not dealt out, and trials that would look for one in vain."""
        given = self.settings
        check_range("sweep.gpus_per_trial", given.gpus_per_trial, least=0)
        require(
            given.address is not None or given.gpus_per_trial == 0,
            f"sweep.gpus_per_trial is {given.gpus_per_trial:g}, and GPUs are dealt out by Ray: set "
            "sweep.address, to local for this machine's.",
        )
        require(
            given.address is None or accelerator not in ("gpu", "cuda") or given.gpus_per_trial > 0,
            f"trainer.accelerator is {accelerator}, and Ray shows a trial only the GPUs that it "
            "keeps for it: set sweep.gpus_per_trial, to 1 or to a share of one.",
        )

    def place(self, begin: Begin) -> Place:
        """Return where its trials run."""
        given = self.settings
        if given.address is None:
            jobs = given.jobs or max(1, usable_cores() // max(1, self.cores))
            return LocalTrials(begin, jobs, self.cores)
        return RayTrials(given.address, given.jobs, self.cores, given.gpus_per_trial)

    def make_directory(self) -> None:
        """Make its directory, and write down what it is to do."""
        base = self._base
        self.directory = new_run_dir(base["output_dir"], f"{base['exp_name']}_sweep")
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomically(self.directory / BASE, lambda file: file.write(self._text.encode()))
        self.save()

    def save(self) -> None:
        """Write down what became of the trials."""
        state = {
            "settings": asdict(self.settings),
            "metric": self.metric,
            "mode": self.mode,
            "points": self.points,
            "trials": [asdict(trial) for trial in self.trials],
        }
        content = json.dumps(state, indent=1).encode()
        write_atomically(self.directory / STATE, lambda file: file.write(content))

    def run(self, place: Place) -> None:
        """Run what is left, and print the table; leave with 1 where a trial has failed."""
        self._take_stock()
        done = sum(trial.done for trial in self.trials)
        left = f", {done} of them done" if done else ""
        print(f"Sweep directory: {self.directory}")
        print(f"{len(self.trials)} trials{left}, {place.jobs} at a time{place.words}", flush=True)
        with self._signals():
            try:
                self._run(place)
            except ConfigurationError:
                self._print_how_to_resume()
                raise
            finally:
                self._end_all()
        if self._signal is not None:
            self._print_how_to_resume()
            sys.exit(128 + self._signal)
        self._print_table()
        failed = [trial for trial in self.trials if trial.outcome.startswith("failed")]
        if failed:
            print(
                f"{len(failed)} of {len(self.trials)} trials failed; to try them again: rl-cli "
                f"sweep --resume {self.directory}",
                flush=True,
            )
            sys.exit(1)

    def _print_how_to_resume(self) -> None:
        print(f"Resume: rl-cli sweep --resume {self.directory}", flush=True)

    def _take_stock(self) -> None:
        """See how far trials came that were not noted, and tell the search of those that are."""
        for trial in self.trials:
            if not trial.done and trial.outcome != "waiting":
                trial.outcome = "waiting"
                trial.run = self._run_of(trial)
                if trial.run is not None and self._outcome_of(trial) == "finished":
                    self._note(trial, "finished")
        for trial in self.trials:
            if trial.done:
                _, known = self.search.begin(self.points[trial.point])
                self.search.report(known, self._curve(trial))
                self.search.end(known, trial.score, pruned=trial.outcome == "pruned")
        self.save()

    def _run_of(self, trial: Trial, *, remove: bool = True) -> str | None:
        """Return the run directory that a trial can go on in; remove those without a checkpoint."""
        kept = None
        for directory in sorted(self.directory.glob(f"{trial.name}_2*")):
            require(
                directory.is_dir() and not directory.is_symlink(),
                f"{directory} is no directory of a run, but a link or a file: remove it.",
            )
            if (directory / CHECKPOINTS / "last.ckpt").is_file():
                kept = directory.name
            elif remove:
                shutil.rmtree(directory)
        return kept

    def _outcome_of(self, trial: Trial) -> str:
        try:
            path = self.directory / str(trial.run) / MANIFEST
            return str(read_json(path, self.directory)["outcome"])
        except (OSError, ConfigurationError, KeyError):
            return "unknown"

    def _run(self, place: Place) -> None:
        waiting = [trial for trial in self.trials if not trial.done]
        while (waiting or self._running) and self._signal is None:
            place.check()
            while waiting and len(self._running) < place.jobs:
                trial = waiting.pop(0)
                self._running[trial.number] = self._begin(trial, place)
            time.sleep(POLL_SECONDS)
            for running in list(self._running.values()):
                ended = running.process.ended()
                self._tell_of(running)
                self._look_at(running)
                if not ended:
                    continue
                del self._running[running.trial.number]
                if self._goes_back(running):
                    waiting.insert(0, running.trial)
                else:
                    self._finish(running)

    def _begin(self, trial: Trial, place: Place) -> "_Running":
        point, known = self.search.begin(self.points[trial.point])
        self.points[trial.point] = point
        if trial.run is None:
            arguments = ["fit", "--config", str(self.directory / BASE)]
            arguments += ["--exp_name", trial.name, "--output_dir", str(self.directory)]
            arguments += ["--seed_everything", str(trial.seed)]
            arguments += [f"--{name}={_typed(value)}" for name, value in point.items()]
        else:
            last = self.directory / trial.run / CHECKPOINTS / "last.ckpt"
            # The configuration in it is ours, and may name code of the user's.
            arguments = ["fit", "--ckpt_path", str(last), "--trust_code", "true"]
            arguments += ["--output_dir", str(self.directory)]
        trial.outcome = "running"
        self.save()
        again = "goes on" if trial.run else "begins"
        told = f", {_words(point)}" if point else ""
        news = f"{self._title(trial)} {again}: seed {trial.seed}{told}"
        process = place.begin(arguments, self.directory / f"{trial.name}.log")
        running = _Running(trial, process, known, news)
        self._tell_of(running)
        return running

    def _tell_of(self, running: "_Running") -> None:
        """Say once that a trial has begun, and where; or that it waits for room."""
        where = running.process.where
        if where is not None and running.news:
            print(f"{running.news}{where}", flush=True)
            running.news = ""
            running.began = time.monotonic()
        elif where is None and not running.waits:
            running.waits = time.monotonic() > running.began + ROOM_SECONDS
            if running.waits:
                print(f"{self._title(running.trial)} waits for a node with room for it", flush=True)

    def _goes_back(self, running: "_Running") -> bool:
        """Return whether a trial that was lost with its machine is tried again, where it was."""
        trial, why = running.trial, running.process.lost
        if why is None:
            return False
        trial.run = self._run_of(trial, remove=False)  # what is seen of it here may be old
        before, times = self._losses.get(trial.number, (0.0, 0))
        last = self.directory / str(trial.run) / CHECKPOINTS / "last.ckpt"
        saved = last.stat().st_mtime if trial.run else 0.0
        times = times + 1 if saved == before else 1
        self._losses[trial.number] = saved, times
        if times >= LOSSES:
            return False
        trial.outcome = "waiting"
        trial.seconds += running.seconds
        self.search.end(running.known, None)
        self.save()
        where = running.process.where or ""
        title = self._title(trial)
        print(f"{title} was lost{where}, and goes back to the queue: {why}", flush=True)
        return True

    def _title(self, trial: Trial) -> str:
        return f"trial {trial.number + 1}/{len(self.trials)}"

    def _look_at(self, running: "_Running") -> None:
        """Ask the pruner about new evaluations."""
        if running.known is None or running.pruned or time.monotonic() < running.next_look:
            return
        began = time.monotonic()
        curve = self._curve(running.trial)
        new = curve[running.reported :]
        running.reported = len(curve)
        if new and self.search.report(running.known, new):
            running.pruned = True
            running.process.terminate()
        now = time.monotonic()
        running.next_look = now + max(0.1, (now - began) / SHARE_OF_READING)

    def _finish(self, running: "_Running") -> None:
        """Note what came of a trial."""
        trial, code = running.trial, running.process.exit_code
        trial.seconds += running.seconds
        trial.run = self._run_of(trial)
        if code == 0 and trial.run is not None:
            self._note(trial, "finished")
        elif running.pruned and trial.run is not None:
            self._note(trial, "pruned")
        elif code is not None and (code < 0 or code > 128):
            name = signal.Signals(-code if code < 0 else code - 128).name
            trial.outcome = f"failed: ended by {name}"
        elif running.process.lost is not None:
            trial.outcome = f"failed: lost {LOSSES} times in a row: {running.process.lost}"
        else:
            trial.outcome = f"failed: {running.process.last_line()}"
        if trial.done and trial.score is None:
            trial.outcome = f"failed: it was not evaluated by {self.metric}"
        new = self._curve(trial)[running.reported :]
        if new:
            self.search.report(running.known, new)
        self.search.end(running.known, trial.score, pruned=trial.outcome == "pruned")
        self.save()
        print(f"{self._title(trial)} {self._told(trial)}", flush=True)

    def _told(self, trial: Trial) -> str:
        if not trial.done:
            return f"{trial.outcome} (all of it: {self.directory / f'{trial.name}.log'})"
        return (
            f"{trial.outcome}: {self.metric} {trial.score:.6g} after {trial.env_steps:,} env "
            f"steps, {trial.seconds:.0f} s"
        )

    def _note(self, trial: Trial, outcome: str) -> None:
        trial.outcome = outcome
        curve = self._curve(trial)
        if curve:
            better = max if self.mode == "max" else min
            scores = [score for _, score in curve]
            trial.score = scores[-1] if self.settings.score == "last" else better(scores)
            trial.env_steps = curve[-1][0]

    def _curve(self, trial: Trial) -> list[tuple[int, float]]:
        """Return (env steps, score) of the evaluations so far."""
        found = sorted(self.directory.glob(f"{trial.name}_2*/{NUMBERS}"))
        if not found:
            return []
        steps, columns = read_columns(found[-1].parents[1], [self.metric])
        scores = columns[self.metric]
        pairs = zip(steps, scores, strict=True)
        return [(int(at), float(one)) for at, one in pairs if math.isfinite(one)]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Have a signal end the sweep, and a second one end it at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._signal is not None:
                self._hurried = True
                return
            self._signal = number
            again = " (again to end them at once)"
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: the trials that run save, and end{again}\n".encode())

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """Leave no process: have each save, and kill those that take too long."""
        for running in self._running.values():
            running.process.terminate()
        deadline = time.monotonic() + SAVING_SECONDS
        for running in self._running.values():
            with suppress(ConfigurationError):  # its node says again what ends the sweep
                while not (running.process.wait(0.1) or self._hurried):
                    if time.monotonic() > deadline:
                        break
                running.process.kill()
                running.process.wait(SAVING_SECONDS)  # for the system to do so
            running.trial.seconds += running.seconds
            running.trial.run = self._run_of(running.trial)
        if self._running:
            self.save()
        self._running.clear()

    def _print_table(self) -> None:
        console = Console(highlight=False, soft_wrap=True)
        table = Table(title=f"{self.metric}, by the {self.settings.score} evaluation of each trial")
        settings = list(self.search.space)
        for name in (*_short(settings).values(), "seeds", "score", "95 % interval", "outcome"):
            table.add_column(name, overflow="fold")  # a name that is cut short is none
        rows = [self._row(i, point) for i, point in enumerate(self.points) if point is not None]
        best_first = self.mode == "max"
        rows.sort(key=lambda row: (row[0] is None, -(row[0] or 0) if best_first else row[0] or 0))
        for _, cells in rows:
            table.add_row(*cells)
        if not console.is_terminal:  # a file has no width, and rows in one line are read by tools
            whole = console.measure(table, options=console.options.update(max_width=10_000))
            console.width = max(console.width, whole.maximum)
        console.print(table)
        console.print(f"Written to {self.directory / STATE}")
        console.print(f"Report:    rl-cli report {self.directory} --output report.html")

    def _row(self, i: int, point: Point) -> tuple[float | None, list[str]]:
        trials = [trial for trial in self.trials if trial.point == i]
        scores = [trial.score for trial in trials if trial.done and trial.score is not None]
        centre = iqm([scores]) if scores else None
        low, high = interval_of_iqm([scores]) if len(scores) > 1 else (None, None)
        outcomes = [trial.outcome.partition(":")[0] for trial in trials]
        told = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
        interval = "" if low is None else f"[{low:.6g}, {high:.6g}]"
        values = [_typed(_rounded(value)) for value in point.values()]
        shown = "" if centre is None else f"{centre:.6g}"
        return centre, [*values, str(len(scores)), shown, interval, told]


@dataclass
class _Running:
    """A trial that runs; what the search knows it by, and how far it was told.

    Attributes:
        news: what is said when it begins; empty once it has been said.
        waits: whether it was said that it waits for room.
    """

    trial: Trial
    process: RunningTrial
    known: Any
    news: str
    waits: bool = False
    reported: int = 0
    pruned: bool = False
    next_look: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has run."""
        if self.process.where is None:
            return 0.0
        return round(time.monotonic() - self.began, 1)


def _count(devices: int | str | list[int]) -> int:
    """Return how many processes `trainer.devices` starts; 1 where it leaves that open, as auto."""
    listed = devices.split(",") if isinstance(devices, str) else devices
    if isinstance(listed, list) and len(listed) > 1:
        return len(listed)
    return int(str(devices)) if str(devices).isdigit() else 1


def _rounded(value: Any) -> Any:
    """Return a number by as many digits as tell it from others."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _words(point: Point) -> str:
    names = _short(list(point))
    return ", ".join(f"{names[name]} {_typed(_rounded(value))}" for name, value in point.items())


def _short(names: Sequence[str]) -> dict[str, str]:
    """Return the last part of each setting's path, or all of it where two have the same."""
    last = {name: re.split(r"\.", name)[-1] for name in names}
    ends = list(last.values())
    return {name: end if ends.count(end) == 1 else name for name, end in last.items()}
