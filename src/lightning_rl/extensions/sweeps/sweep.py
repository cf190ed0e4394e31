"""Run `rl-cli sweep`: train with several seeds and settings, resumable, on several machines."""

import gc
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from lightning_rl import ConfigurationError
from lightning_rl.extend.checkpoints import CHECKPOINTS
from lightning_rl.extend.cli import CommandLine, handle_signals
from lightning_rl.extend.errors import check_range, closest, require
from lightning_rl.extend.files import (
    dump_yaml,
    expanded,
    new_run_dir,
    read_text,
    read_yaml,
    tell,
    tell_from_handler,
    write_atomically,
)
from lightning_rl.extensions.reports.comparison import short_names, value_text
from lightning_rl.extensions.reports.runs import NUMBERS, read_columns
from lightning_rl.extensions.reports.statistics import interval_of_iqm, iqm
from lightning_rl.extensions.sweeps.journal import JOURNAL, SweepJournal, Trial, point_count
from lightning_rl.extensions.sweeps.search import (
    GRID,
    RANDOM,
    UNPICKLING,
    Point,
    Space,
    check_first,
    ends_of,
    pruner_of,
    sampler_of,
    space_of,
)
from lightning_rl.extensions.sweeps.sweep_settings import (
    SweepSettings,
    kept_settings,
    sweep_parser,
    sweep_settings,
)
from lightning_rl.extensions.sweeps.trials import POLL_SECONDS, Begin, TrialProcess, usable_cores

SETTINGS, BASE = "sweep.yaml", "base.yaml"
"""Files of a sweep: its settings, and the base configuration of all trials."""

SHARE_OF_READING = 0.02
"""Maximum share of the time for reading curves for the pruner; a curve may have 100,000 rows."""

SAVING_SECONDS = 60.0
"""Seconds that trials may take to save after a signal, before they are killed."""

OWN = (
    *("exp_name", "output_dir", "seed_everything", "data.seed", "trainer.run_dir", "ckpt_path"),
    "config",
)
"""Settings that the sweep sets; a space must not contain them."""

MOST_TRIALS = 100_000
"""Most seeds, trials or jobs of a sweep."""

CHANGEABLE = ("jobs", "trials")
"""Settings that a resumed sweep may change."""

OUTCOMES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def sweep(options: Sequence[str], command_line: CommandLine) -> None:
    """Begin or resume a sweep."""
    sweep_options, fit_options = _apart(options)
    if "-h" in options or "--help" in options:
        sweep_parser().parse_args(["--help"])  # exits
    settings = sweep_settings(sweep_options)
    runner = (
        _new(settings, fit_options, command_line.parse)
        if CommandLine.value_of("--resume", sweep_options) is None
        else _existing(settings, sweep_options, fit_options)
    )
    runner.run(command_line.run)


def _apart(options: Sequence[str]) -> tuple[list[str], list[str]]:
    sweep_options: list[str] = []
    fit_options: list[str] = []
    target = fit_options
    for option in options:
        if option.startswith("-"):
            flag = option.partition("=")[0]
            target = sweep_options if flag.split(".")[0] in ("--sweep", "--resume") else fit_options
        target.append(option)
    return sweep_options, fit_options


def _new(
    settings: SweepSettings,
    fit_options: Sequence[str],
    parse: Callable[[Sequence[str], Sequence[Sequence[str]]], str],
) -> "_Sweep":
    for name in ("--ckpt_path", "--trainer.run_dir", "--seed_everything"):
        cure = {
            "--ckpt_path": "to start trials from a policy, set --trainer.init_from",
            "--seed_everything": "set --sweep.seeds",
        }.get(name, "each trial has its own directory, in --output_dir")
        is_free = CommandLine.value_of(name, fit_options) is None
        require(is_free, f"A sweep takes no {name}: {cure}.")
    require(
        CommandLine.value_of("--config", fit_options) is not None
        or CommandLine.value_of("--model", fit_options) is not None,
        "sweep needs a config for all trials, --config FILE; or --resume last to resume a sweep.",
    )
    # Parse all values of the space now: otherwise a wrong one fails hours later, in its trial.
    text = parse(fit_options, list(_probes(_space_of(settings))))
    base = read_yaml(text, "The configuration")
    if settings.seeds is None:
        settings.seeds = [base["seed_everything"]]
    runner = _Sweep(Path(), settings, text)  # checks the settings before the directory exists
    assert isinstance(settings.seeds, list)
    data_seed = base["data"].get("seed")
    require(
        data_seed is None or len(settings.seeds) == 1,
        f"data.seed is {data_seed} in the configuration: all {len(settings.seeds)} seeds of the "
        "sweep would share the random numbers of envs, samples and shuffling. Remove it "
        "(--data.seed null): --sweep.seeds sets it.",
    )
    runner.directory = new_run_dir(base["output_dir"], f"{base['exp_name']}_sweep")
    runner.directory.mkdir(parents=True, exist_ok=True)
    write_atomically(runner.directory / BASE, lambda file: file.write(text.encode()))
    runner.save_settings()
    return runner


def _space_of(settings: SweepSettings) -> Space:
    for name in settings.space:
        path = ".".join(part for part in name.split(".") if part != "init_args")
        require(path not in OWN, f"sweep.space: {name} is set by the sweep itself.")
    return space_of(settings.space)


def _probes(space: Space) -> Iterator[list[str]]:
    """Yield options that together cover each value of each list, and both ends of each range."""
    # A parse takes 0.2 s: parse as often as the longest list is long.
    values = {name: ends_of(distribution) for name, distribution in space.items()}
    for i in range(max(map(len, values.values()), default=0)):
        yield [f"--{name}={_typed(ends[i % len(ends)])}" for name, ends in values.items()]


def _typed(value: Any) -> str:
    # Below a free mapping, a text without quotes may be read as another value: `off`, `5`.
    is_plain_text = isinstance(value, str) and dump_yaml(value).startswith(value)
    return value if is_plain_text else json.dumps(value)


def _flags(options: Sequence[str]) -> set[str]:
    return {option.partition("=")[0] for option in options if option.startswith("-")}


def _existing(
    typed_settings: SweepSettings, sweep_options: Sequence[str], fit_options: Sequence[str]
) -> "_Sweep":
    allowed = {f"--sweep.{name}" for name in CHANGEABLE}
    unchangeable = (_flags(sweep_options) - allowed - {"--resume"}) | (
        _flags(fit_options) - {"--output_dir", "--trust_code"}
    )
    require(
        not unchangeable,
        f"A resumed sweep keeps its settings: {', '.join(sorted(unchangeable))} cannot be changed, "
        f"but {', '.join(sorted(allowed))} can.",
    )
    output_dir = CommandLine.value_of("--output_dir", fit_options) or "outputs"
    directory = _sweep_directory(str(CommandLine.value_of("--resume", sweep_options)), output_dir)
    settings = kept_settings(directory / SETTINGS)
    require(
        settings.search not in UNPICKLING
        or (CommandLine.value_of("--trust_code", fit_options) or "").lower() == "true",
        f"sweep.search of {directory} is {settings.search}, which unpickles the content of "
        f"{JOURNAL}: that can run code. Add --trust_code true if only you can write there.",
    )
    saved_trials = settings.trials
    for name in CHANGEABLE:
        if f"--sweep.{name}" in _flags(sweep_options):
            setattr(settings, name, getattr(typed_settings, name))
    require(
        settings.trials is None or saved_trials is None or settings.trials >= saved_trials,
        f"sweep.trials was {saved_trials}, and can only grow: got {settings.trials}.",
    )
    return _Sweep(directory, settings, read_text(directory / BASE, directory))


def _sweep_directory(path_or_last: str, output_dir: str) -> Path:
    if path_or_last == "last":
        files = list(expanded(output_dir).glob(f"*/{SETTINGS}"))
        require(len(files) > 0, f"There is no sweep in '{output_dir}': begin one, or set its path.")
        return max(files, key=lambda path: path.stat().st_mtime).parent
    directory = expanded(path_or_last)
    sweep_names = sorted(path.parent.name for path in directory.parent.glob(f"*/{SETTINGS}"))
    earlier = (directory / "sweep.json").is_file()
    require(
        (directory / SETTINGS).is_file(),
        f"No sweep at {directory}: it has no {SETTINGS}{closest(directory.name, sweep_names)}. "
        + ("It was written by an earlier version: begin a new sweep." if earlier else "")
        + ("" if earlier else "Give the directory of a sweep, or last."),
    )
    return directory


@dataclass
class _Running:
    """A trial that runs, and the number of its reported evaluations."""

    trial: Trial
    process: TrialProcess
    reported: int = 0
    pruned: bool = False
    next_check: float = 0.0
    began: float = field(default_factory=time.monotonic)


class _Sweep:
    journal: SweepJournal

    def __init__(self, directory: Path, settings: SweepSettings, text: str) -> None:
        self.directory, self.settings = directory, settings
        base = read_yaml(text, f"{directory / BASE}")
        try:
            trainer = base["trainer"]
            self.metric, self.mode = trainer["best_metric"], trainer["best_mode"]
            threads = int(trainer["num_threads"]) * _count(trainer["devices"])
            most_jobs = max(1, usable_cores() // threads)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigurationError(f"{directory / BASE} is no configuration: {error}.") from error
        self.space = _space_of(settings)
        self._check_seeds()
        self._check_search()
        check_range("sweep.jobs", settings.jobs, minimum=1, maximum=MOST_TRIALS)
        self.jobs = settings.jobs or most_jobs
        self._threads = threads
        self._running: dict[int, _Running] = {}  # by the number of its trial
        self._signal: int | None = None
        self._hurried = False  # by a second signal

    def _check_seeds(self) -> None:
        seeds = self.settings.seeds
        # `true` is an int in Python, and would be one seed.
        if isinstance(seeds, int) and not isinstance(seeds, bool):
            check_range("sweep.seeds", seeds, minimum=1, maximum=MOST_TRIALS)
            seeds = list(range(1, seeds + 1))
        require(
            isinstance(seeds, list) and not any(isinstance(seed, bool) for seed in seeds),
            "seed_everything is true or false in the configuration: set --sweep.seeds.",
        )
        assert isinstance(seeds, list)
        require(len(seeds) > 0, "sweep.seeds is an empty list: give a number of seeds, or seeds.")
        for seed in seeds:
            check_range("sweep.seeds", seed, minimum=0, maximum=2**32 - 1)
        require(len(set(seeds)) == len(seeds), f"sweep.seeds has a seed twice: {seeds}.")
        self.settings.seeds = seeds

    def _check_search(self) -> None:
        settings = self.settings
        ranged = any(isinstance(values, dict) for values in settings.space.values())
        settings.search = settings.search or (RANDOM if ranged else GRID)
        check_first(self.space, settings.first)
        check_range("sweep.seed", settings.seed, minimum=0)
        check_range("sweep.trials", settings.trials, minimum=1, maximum=MOST_TRIALS)
        point_count(settings, self.space)
        sampler_of(settings, 0), pruner_of(settings)  # raise if Optuna lacks them
        require(
            settings.search != GRID or settings.trials is None,
            f"sweep.trials is {settings.trials}, but a grid tries every point: remove it, or "
            "choose sweep.search: random.",
        )
        if settings.search == GRID and settings.seed != SweepSettings.seed:
            reason = "it is of the search, and a grid tries every point"
            tell(f"--sweep.seed {settings.seed} has no effect: {reason}.", sys.stderr)
        require(
            settings.search != GRID or not settings.first,
            "sweep.first is tried before the points of a search, but a grid tries every point: "
            "remove it, or choose sweep.search: random.",
        )

    def save_settings(self) -> None:
        content = dump_yaml(asdict(self.settings)).encode()
        write_atomically(self.directory / SETTINGS, lambda file: file.write(content))

    def open(self) -> None:
        self.journal = SweepJournal(self.directory, self.settings, self.space, self.mode)

    def run(self, begin: Begin) -> None:
        self.open()
        self.journal.enter()
        # Freeze objects: the garbage collector of each fork would otherwise copy all pages.
        gc.freeze()
        try:
            self._run(begin)
        except ConfigurationError:
            tell(f"Resume: rl-cli sweep --resume {self.directory}")
            raise
        finally:
            gc.unfreeze()
            self.journal.leave()
        if self._signal is not None:
            tell(f"Resume: rl-cli sweep --resume {self.directory}")
            sys.exit(128 + self._signal)
        self._print_table()
        failed = self.journal.count(TrialState.FAIL)
        if failed:
            tell(
                f"{failed} of {self.journal.total} trials failed; to try them again: rl-cli "
                f"sweep --resume {self.directory}"
            )
            sys.exit(1)

    def _run(self, begin: Begin) -> None:
        self.save_settings()
        journal = self.journal
        done = journal.count(TrialState.COMPLETE, TrialState.PRUNED)
        tell(f"Sweep directory: {self.directory}")
        done_text = f", {done} of them done" if done else ""
        tell(f"{journal.total} trials{done_text}, {self.jobs} at a time")
        all_begun = False
        with self._signals():
            try:
                while self._signal is None and not (all_begun and not self._running):
                    if len(self._running) < self.jobs and not all_begun:
                        # Fill all jobs before the first pause.
                        trial = journal.claim()
                        if trial is not None:
                            self._begin(trial, begin)
                            continue
                        all_begun = True
                    time.sleep(POLL_SECONDS)
                    for running in list(self._running.values()):
                        ended_now = running.process.ended()
                        self._prune_if_due(running)
                        if ended_now:
                            del self._running[running.trial.number]
                            self._finish(running)
            finally:
                self._end_all()

    def _run_of(self, trial: Trial) -> str | None:
        """Return the run directory of a trial to resume; remove one without a checkpoint."""
        resumable = None
        runs = sorted(self.directory.glob(f"{trial.name}_2*"))
        for path in [*runs, *self.directory.glob(f"{trial.name}.log")]:
            # A link could lead `rmtree`, or the writes of the trial, to other directories.
            is_log = path.suffix == ".log"
            require(
                not path.is_symlink() and (path.is_file() if is_log else path.is_dir()),
                f"{path} is no {'log' if is_log else 'directory'} of a run, but a link or another "
                "kind of file: remove it.",
            )
            if (path / CHECKPOINTS / "last.ckpt").is_file():
                resumable = path.name
            elif not is_log:
                shutil.rmtree(path)
        return resumable

    def _begin(self, trial: Trial, begin: Begin) -> None:
        run = self._run_of(trial)
        if run is None:
            arguments = ["fit", "--config", str(self.directory / BASE)]
            arguments += ["--exp_name", trial.name, "--output_dir", str(self.directory)]
            arguments += ["--seed_everything", str(trial.seed)]
            arguments += [f"--{name}={_typed(value)}" for name, value in trial.point.items()]
        else:
            last = self.directory / run / CHECKPOINTS / "last.ckpt"
            # Trust the configuration, which the sweep wrote, and which may name the user's code.
            arguments = ["fit", "--ckpt_path", str(last), "--trust_code", "true"]
            arguments += ["--output_dir", str(self.directory)]
        verb = "continues" if run else "begins"
        labels = short_names(list(trial.point))
        point_text = "".join(f", {labels[name]} {value_text(trial.point, name)}" for name in labels)
        tell(f"{self._title(trial)} {verb}: seed {trial.seed}{point_text}")
        log = self.directory / f"{trial.name}.log"
        process = TrialProcess(begin, arguments, self._threads, log)
        self._running[trial.number] = _Running(trial, process)

    def _title(self, trial: Trial) -> str:
        return f"trial {trial.number + 1}/{self.journal.total}"

    def _prune_if_due(self, running: _Running) -> None:
        began = time.monotonic()
        if self.settings.pruner is None or running.pruned or began < running.next_check:
            return
        curve = self._curve(running.trial)
        if len(curve) > running.reported:
            running.reported = len(curve)
            if self.journal.report(running.trial, curve):
                running.pruned = True
                running.process.terminate()
        now = time.monotonic()
        # The longer the curve, the rarer the check: reading takes a constant share of the time.
        running.next_check = now + max(0.1, (now - began) / SHARE_OF_READING)

    def _finish(self, running: _Running) -> None:
        trial, code = running.trial, running.process.exit_code or 0
        curve, run = self._curve(trial), self._run_of(trial)
        # A trial that had finished before the signal arrived is not pruned.
        pruned = running.pruned and code != 0
        # -N: killed by signal N; 128 + N: rl-cli saved, and exited with the signal's code.
        ended_by = max(-code, code - 128)
        score, reason = None, ""
        if (code == 0 or pruned) and run is not None:
            scores = [evaluation for _, evaluation in curve if math.isfinite(evaluation)]
            if not curve:
                reason = f"it was not evaluated by {self.metric}"
            elif not math.isfinite(curve[-1][1]):
                reason = f"it diverged: {self.metric} of its last evaluation is not finite"
            elif self.settings.score == "last":
                score = scores[-1]
            else:
                score = max(scores) if self.mode == "max" else min(scores)
        elif ended_by in list(signal.Signals):
            reason = f"ended by {signal.Signals(ended_by).name}"
        else:
            reason = running.process.last_line()
        self.journal.report(trial, curve)  # the pruner compares other trials with it
        self.journal.finish(trial, score, pruned=pruned)
        outcome = f"failed: {reason} (full output: {self.directory / f'{trial.name}.log'})"
        if score is not None:
            outcome = (
                f"{'pruned' if pruned else 'finished'}: {self.metric} {score:.6g} after "
                f"{curve[-1][0]:,} env steps, {time.monotonic() - running.began:.0f} s"
            )
        tell(f"{self._title(trial)} {outcome}")

    def _curve(self, trial: Trial) -> list[tuple[int, float]]:
        """Return env steps and score of each evaluation; inf for a score that is not finite."""
        tables = sorted(self.directory.glob(f"{trial.name}_2*/{NUMBERS}"))
        if not tables:
            return []
        # The names end with the time of the run: the last one is the newest.
        steps, columns = read_columns(tables[-1].parents[1], [self.metric])
        scores = columns[self.metric]
        pairs = zip(steps, scores, strict=True)
        return [(int(step), float(score)) for step, score in pairs if not math.isnan(score)]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if self._signal is not None:
                self._hurried |= number != signal.SIGHUP  # a shell repeats it
                return
            self._signal = number
            hint = " (again to stop them immediately)"
            name = signal.Signals(number).name
            tell_from_handler(f"{name}: the running trials save and stop{hint}")

        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        restore = handle_signals(stops, handle)
        try:
            yield
        finally:
            restore()

    def _end_all(self) -> None:
        for running in self._running.values():
            running.process.terminate()
        # All trials have their signal now, and save in parallel.
        deadline = time.monotonic() + SAVING_SECONDS
        for running in self._running.values():
            while not (running.process.wait(0.1) or self._hurried):
                if time.monotonic() > deadline:
                    break
            running.process.kill()
            running.process.wait(SAVING_SECONDS)  # wait until the system has killed it
        for running in self._running.values():
            # The disk may be full: `claim` later finds trials without an owner.
            with suppress(ConfigurationError):
                if running.process.exit_code == 0:
                    self._finish(running)
                else:
                    self.journal.give_back(running.trial)
        self._running.clear()

    def _print_table(self) -> None:
        console = Console(highlight=False, soft_wrap=True)
        table = Table(title=f"{self.metric}, by the {self.settings.score} evaluation of each trial")
        for name in (
            *short_names(list(self.space)).values(),
            "seeds",
            "score",
            "95 % interval",
            "outcome",
        ):
            table.add_column(name, overflow="fold")  # no name may be cut
        rows = [self._row(point, trials) for point, trials in self.journal.points()]
        best_first = self.mode == "max"
        # Points without a score come last.
        rows.sort(key=lambda row: (row[0] is None, -(row[0] or 0) if best_first else row[0] or 0))
        for _, cells in rows:
            table.add_row(*cells)
        if not console.is_terminal:  # a file has no width: write one line per row
            measurement = console.measure(table, options=console.options.update(max_width=10_000))
            console.width = max(console.width, measurement.maximum)
        console.print(table)
        console.print(f"Written to {self.journal.path}")
        console.print(f"Report:    rl-cli report {self.directory} --output report.html")

    def _row(self, point: Point, trials: list[FrozenTrial]) -> tuple[float | None, list[str]]:
        scores = [trial.value for trial in trials if trial.value is not None]
        centre = iqm([scores]) if scores else None
        low, high = interval_of_iqm([scores]) if len(scores) > 1 else (None, None)
        outcomes = [OUTCOMES[trial.state] for trial in trials]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
        interval = "" if low is None else f"[{low:.6g}, {high:.6g}]"
        values = [value_text(point, name) for name in point]
        score = "" if centre is None else f"{centre:.6g}"
        return centre, [*values, str(len(scores)), score, interval, counts]


def _count(devices: int | str | list[int]) -> int:
    listed = devices.split(",") if isinstance(devices, str) else devices
    if isinstance(listed, list) and len(listed) > 1:
        return len(listed)
    return int(str(devices)) if str(devices).isdigit() else 1
