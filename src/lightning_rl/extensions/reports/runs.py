"""Read the files of a run: settings, manifest, metrics, evaluation, videos."""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.collectors import logged_values
from lightning_rl.extend.errors import closest, require
from lightning_rl.extend.files import open_file, read_json, read_text, read_yaml

MANIFEST, EVALUATION, NUMBERS = "run.json", "evaluation.json", Path("logs", "metrics.csv")
"""Files of a run: manifest (marks a run directory), last evaluation, and metrics."""

SHOWN = ("episodes", "env_steps", "avg_reward", "success_rate")
"""Numbers of an evaluation that a report shows unchanged."""

SPEED = "charts/SPS"
"""Metric for the training time: env steps of an iteration divided by its seconds."""


CURVES = ".json"
"""Suffix of a file of curves."""

MOST_BYTES, MOST_ROWS = 2**28, 10**6
"""Limits of a table of metrics; a hundred thousand iterations take about 70 MB."""


@dataclass
class RunRecord:
    """Content of a run's files.

    Attributes:
        path: run directory.
        settings: by dotted path.
        manifest: manifest of `run.json`; empty without the file.
        evaluation: evaluation of `evaluation.json`; None without the file.
        env_steps: env steps of the rows [P] with at least one requested metric.
        seconds: training time up to these rows [P], without evaluations; NaN if unknown.
        metrics: requested metrics of the run, by name: values [P], NaN for rows without a value,
            inf for a number that is not finite.
        films: newest last.
    """

    path: Path
    settings: dict[str, Any]
    manifest: dict[str, Any]
    evaluation: dict[str, Any] | None
    env_steps: np.ndarray
    seconds: np.ndarray
    metrics: dict[str, np.ndarray]
    films: list[Path] = field(default_factory=list)

    @property
    def seed(self) -> int | None:
        """Seed of the run; None if the manifest has none."""
        seed = self.manifest.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def env(self) -> str:
        """Id of the env within its wrappers, or its class."""
        place = "data.env"
        while any(f"{name}.".startswith(f"{place}.init_args.env.") for name in self.settings):
            place += ".init_args.env"
        names = (f"{place}.init_args.id", f"{place}.id", f"{place}.class_path", place)
        env = next((self.settings[name] for name in names if self.settings.get(name)), None)
        return "unknown" if env is None else str(env).rpartition(".")[2]

    def of_all_parts(self, name: str) -> float | None:
        """Return seconds (total, evaluation or cpu) of the run and its earlier, resumed parts."""
        # A resumed run lists its earlier parts in its manifest.
        parts = [*(self.manifest.get("earlier") or []), self.manifest]
        seconds = [(part.get("seconds") or {}).get(name) for part in parts]
        times = [float(time) for time in seconds if time]
        return sum(times) if times else None

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return env steps [E], seconds [E] and finite values [E] of a metric."""
        values = self.metrics.get(metric, np.full(len(self.env_steps), np.nan))
        is_finite = np.isfinite(values)
        return self.env_steps[is_finite], self.seconds[is_finite], values[is_finite]


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the given run directories and files of curves, and the runs below directories.

    Raises:
        ConfigurationError: if a path has no run.
    """
    unique_runs: dict[Path, Path] = {}
    for path in map(Path, paths):
        # A run directory counts itself; other directories are searched.
        if path.is_dir():
            below = sorted(manifest.parent for manifest in path.rglob(MANIFEST))
            runs = [path] if (path / MANIFEST).is_file() else below
        elif path.suffix == CURVES and path.is_file():
            runs = [path]
        else:
            runs = []
        if not runs:
            parent = path.parent
            siblings = [file.name for file in parent.iterdir()] if parent.is_dir() else []
            missing = f"does not exist{closest(path.name, siblings)}"
            raise ConfigurationError(
                f"No run at {path}: it {'holds no run' if path.is_dir() else missing}. Give run "
                f"directories (with a {MANIFEST}), the directory of a sweep, a directory that "
                "contains runs, such as outputs, or a .json file of curves."
            )
        for run in runs:
            unique_runs.setdefault(run.resolve(), run)  # each run once, even if given by two paths
    return list(unique_runs.values())


def read_run(path: Path, metrics: Sequence[str]) -> RunRecord:
    """Read the files of a run; skip `metrics` that the run lacks.

    Raises:
        ConfigurationError: for a file that cannot be read, naming the file and the line.
    """
    # The speed gives the training time, whichever metrics are compared.
    steps, columns = read_columns(path, [*metrics, SPEED])
    seconds = _seconds(steps, columns.pop(SPEED))
    curves = {name: values for name, values in columns.items() if not np.isnan(values).all()}
    # Rows of other metrics are left out after all rows have counted towards the time.
    rows = np.zeros(len(steps), bool)
    for values in curves.values():
        rows |= ~np.isnan(values)
    return RunRecord(
        path=path,
        settings=_settings_of(path),
        manifest=_manifest(path / MANIFEST),
        evaluation=_evaluation(path / EVALUATION),
        env_steps=steps[rows],
        seconds=seconds[rows],
        metrics={name: values[rows] for name, values in curves.items()},
        films=_films(path),
    )


def read_curves(path: Path, metric: str) -> list[RunRecord]:
    """Read curves of runs without a directory, for example of another library.

    The file holds `{"metric": metric, "curves": {name: {env: {seed: [[env steps, value], ...]}}}}`.
    Each point may have the seconds of training as its third number.

    Raises:
        ConfigurationError: for another form or another metric.
    """
    content = read_json(path)
    records = []
    try:
        y_metric = content["metric"]
        for name, envs in content["curves"].items():
            for env, seeds in envs.items():
                for seed, points in seeds.items():
                    steps, values, *times = np.array(points, float).T
                    (seconds,) = times or [np.full_like(steps, np.nan)]
                    # Interpolation needs steps that rise.
                    if not len(steps) or not (np.diff(steps, prepend=0.0) >= 0).all():
                        raise ValueError(f"env steps of {name}, {env}, {seed} do not rise")
                    records.append(
                        RunRecord(
                            path=path / name / env / f"seed {seed}",
                            settings={"exp_name": name, "name": name, "data.env.id": env},
                            manifest={"seed": int(seed)},
                            evaluation=None,
                            env_steps=steps,
                            seconds=seconds,
                            metrics={y_metric: values},
                        )
                    )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no file of curves ({type(error).__name__}: {error}). It must hold "
            '{"metric": "eval/avg_reward", "curves": {name: {env: {seed: [[env steps, value], '
            "...]}}}}."
        ) from error
    require(y_metric == metric, f"{path} has {y_metric}, not {metric}: set --metric {y_metric}.")
    return records


def _films(path: Path) -> list[Path]:
    times = {}
    # A video may be a link: refuse those that lead out of the run.
    for film in (path / "videos").glob("*.mp4"):
        with open_file(film, path, sys.maxsize) as file:
            times[film] = os.fstat(file.fileno()).st_mtime_ns
    return sorted(times, key=lambda film: times[film])


def read_columns(run: Path, names: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read env steps [P] and columns [P] of a run's table of metrics.

    An empty cell is NaN, a number that is not finite is inf, a missing column is all NaN. An
    incomplete last line is skipped.

    Raises:
        ConfigurationError: for a missing or damaged table, naming the line.
    """
    path = run / NUMBERS
    rows: list[list[float]] = []
    lines = None
    try:
        with io.TextIOWrapper(open_file(path, run, MOST_BYTES), newline="") as file:
            # A run that still goes on may have written half of its last line.
            lines = csv.reader(line for line in file if line.endswith("\n"))
            header = next(lines, ["env_steps"])
            at = [header.index(name) if name in header else None for name in ("env_steps", *names)]
            if at[0] is None:
                raise ValueError("it has no column env_steps")
            for cells in lines:
                rows.append([np.nan if i is None else _cell(cells[i]) for i in at])
                if not math.isfinite(rows[-1][0]):
                    raise ValueError(f"env_steps is {cells[at[0]]!r}")
                if len(rows) > MOST_ROWS:
                    raise ValueError(f"it has more than {MOST_ROWS:,} rows")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path} does not exist: the run ended before its first iteration, or wrote no metrics "
            "(trainer.logger: false)."
        ) from error
    except (OSError, ValueError, IndexError, csv.Error, UnicodeDecodeError) as error:
        place = f", line {lines.line_num}" if lines is not None else ""
        raise ConfigurationError(
            f"{path} cannot be read{place}: {error}. Leave the run out, or correct the line of the "
            "table."
        ) from error
    table = np.array(rows, float).reshape(len(rows), 1 + len(names))
    return table[:, 0], {name: table[:, i] for i, name in enumerate(names, 1)}


def _cell(text: str) -> float:
    if not text:
        return math.nan
    return value if math.isfinite(value := float(text)) else math.inf


def _seconds(env_steps: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """Return the training seconds [P]; rows of evaluations have no speed and are interpolated."""
    has_speed = (speed > 0) & np.isfinite(speed)
    if not has_speed.any():
        return np.full(len(env_steps), np.nan)
    # The speed leaves evaluations out, and so does the time.
    speeds = np.interp(env_steps, env_steps[has_speed], speed[has_speed])
    seconds: np.ndarray = np.cumsum(np.diff(env_steps, prepend=0.0) / speeds)
    return seconds


def _settings_of(path: Path) -> dict[str, Any]:
    # The command line writes config.yaml; the logger of a run in Python writes hparams.yaml.
    for file in (path / "config.yaml", path / "logs" / "hparams.yaml"):
        try:
            content = read_yaml(read_text(file, path), str(file))
        except FileNotFoundError:
            continue
        if isinstance(content, Mapping):
            return dict(_flat(content))
    return {}


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            is_scalar = isinstance(value, str | int | float | None)
            # Lists become text, so that settings can be compared and shown.
            text = "" if is_scalar else json.dumps(value, default=str, skipkeys=True)
            yield f"{above}{name}", value if is_scalar else text


def _evaluation(path: Path) -> dict[str, Any] | None:
    try:
        content = read_json(path, path.parent)
    except FileNotFoundError:
        return None
    try:
        values = logged_values(content)
        values |= {name: float(content[name]) for name in ("episodes", "env_steps")}
        invalid = [name for name, value in values.items() if not math.isfinite(value)]
        # `float` above accepts a number written as a text, which a report would show as it is.
        invalid += [name for name in SHOWN if isinstance(content[name], str)]
        if "eval/ci95_low" not in values:
            invalid.append("ci95")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigurationError(
            f"{path} is damaged ({type(error).__name__}: {error}): run rl-cli validate again, or "
            "remove the file."
        ) from error
    if invalid:
        raise ConfigurationError(
            f"{path} has {', '.join(invalid)} that are not finite: the run diverged, and has no "
            "score."
        )
    return content


def _manifest(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, path.parent)
    except FileNotFoundError:
        return {}
    outcome = content.get("outcome")
    require(isinstance(outcome, str | None), f"{path} is damaged: its outcome is {outcome!r}.")
    earlier = content.get("earlier") or []
    # `None` fails the check below.
    parts = [content, *earlier] if isinstance(earlier, list) else [None]
    for part in parts:
        for name in ("seconds", "peak_memory"):
            times = part.get(name) if isinstance(part, dict) else 0
            if not isinstance(times, dict | None) or not all(
                isinstance(number, float | int | None) and abs(number or 0) < sys.float_info.max
                for number in (times or {}).values()
            ):
                raise ConfigurationError(f"{path} is damaged: its {name} are {times!r}.")
    return content
