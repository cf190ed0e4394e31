"""Compare runs: aggregate over the seeds of runs with the same settings."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.collectors import logged_values
from lightning_rl.extend.errors import closest, require
from lightning_rl.extensions.reports.runs import CURVES, RunRecord, find_runs, read_curves, read_run
from lightning_rl.extensions.reports.statistics import (
    interval_of_improvement,
    interval_of_iqm,
    iqm,
    iqm_curve,
    probability_of_improvement,
)

METRIC = "eval/avg_reward"
"""Default metric of a comparison."""

SHOWN_TOO = (METRIC, "eval/success_rate", "eval/avg_length")
"""Metrics with curves besides the compared metric, if the runs have them."""

OF_A_RUN = ("exp_name", "output_dir", "seed_everything", "data.seed", "trainer.run_dir")
"""Settings that may differ within a group."""

MOST_POINTS = 40_000
"""Maximum points of all curves of a metric together, to keep the page of a hundred runs small."""

FEWEST_POINTS, ENOUGH_POINTS = 50, 300
"""Minimum and maximum points of one curve."""

PROTOCOL = ("eval_env", "eval_events", "eval_deterministic", "max_eval_episode_steps")
"""Settings of the evaluations of a run, which its score must have, too; its episodes are free."""

LONGEST_NAME = 60
"""Maximum characters of a group name made of settings."""

COMPARED = 8
"""Maximum groups for pairwise comparison; with more, only the best is compared with others."""

ENOUGH_STEPS = 0.99
"""Share of the longest run's env steps from which a run counts as equally long."""

ABSENT = "–"
"""Text of a missing value."""


@dataclass
class Curve:
    """A metric of a group over env steps [T]; NaN if unknown.

    Attributes:
        env_steps: [T].
        seconds: mean training time of the runs [T].
        centre: interquartile mean of the runs [T].
        low, high: ends of its 95 % interval [T].
        runs: number of runs that reached the env steps [T].
    """

    env_steps: np.ndarray
    seconds: np.ndarray
    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: np.ndarray


@dataclass
class Group:
    """Runs with the same settings and different seeds.

    Attributes:
        name: made of the settings that differ from other groups.
        settings: settings that differ between groups.
        scores: scores of each run, in the compared metric.
        score: interquartile mean of the scores.
        interval: its 95 % interval; None for one run.
        curves: by metric.
    """

    name: str
    settings: dict[str, Any]
    runs: list[RunRecord]
    scores: list[float] = field(default_factory=list)
    score: float = float("nan")
    interval: tuple[float, float] | None = None
    curves: dict[str, Curve] = field(default_factory=dict)


@dataclass
class Comparison:
    """Groups of runs in one env.

    Attributes:
        metric: compared metric.
        scored_by: source of the scores, in words.
        groups: best first.
        improvements: (group, other, P(a run of group is better than a run of other), its interval).
        left_out: runs that could not be read or scored, with the reason.
        notes: warnings about the scores.
        metrics: with curves.
    """

    env: str
    metric: str
    higher_is_better: bool
    scored_by: str
    groups: list[Group]
    improvements: list[tuple[str, str, float, tuple[float, float]]]
    left_out: list[tuple[Path, str]]
    metrics: list[str]
    notes: list[str] = field(default_factory=list)


def compare(
    paths: Iterable[str | Path], metric: str = METRIC, group_by: Sequence[str] | None = None
) -> Comparison:
    """Read runs and compare them.

    Args:
        paths: run directories, directories that contain runs, or files of curves (see
            `lightning_rl.extensions.reports.runs.read_curves`).
        metric: metric of the evaluation: `eval/...`.
        group_by: settings, by their paths or the ends of their paths; runs that agree in them form
            a group. Default: all settings except those that name a run and its seed.

    Raises:
        ConfigurationError: for no runs, runs without the metric, several envs, or an unknown
            setting.
    """
    envs, left_out = _by_env(paths, metric)
    each = "; ".join(f"{env}: {runs[0].path} ({len(runs)} runs)" for env, runs in envs.items())
    # Returns of different envs have no common scale.
    require(
        len(envs) == 1,
        f"These runs have {len(envs)} envs with different returns: {each}. Compare runs of one "
        "env.",
    )
    ((env, runs),) = envs.items()
    return _compared(env, runs, left_out, metric, group_by)


def compare_each(
    paths: Iterable[str | Path], metric: str = METRIC, group_by: Sequence[str] | None = None
) -> list[Comparison]:
    """Compare the runs of each env by themselves, as `compare` does."""
    envs, left_out = _by_env(paths, metric)
    # Runs left out have no known env: the first comparison names them.
    compared = [_compared(env, runs, [], metric, group_by) for env, runs in envs.items()]
    compared[0].left_out = left_out
    return compared


def _compared(
    env: str,
    runs: list[RunRecord],
    left_out: list[tuple[Path, str]],
    metric: str,
    group_by: Sequence[str] | None,
) -> Comparison:
    # A run whose best checkpoint is the lowest value says how to read the metric.
    higher = not any(
        run.settings.get("trainer.best_metric") == metric
        and run.settings.get("trainer.best_mode") == "min"
        for run in runs
    )
    groups = _grouped(runs, group_by)
    names = dict.fromkeys([metric, *SHOWN_TOO])
    metrics = [name for name in names if any(len(run.curve(name)[0]) for run in runs)]
    # The final evaluation has more episodes, but all runs must have one of their last weights.
    evaluated = all(_evaluated(run, metric) is not None for run in runs)
    max_points = max(FEWEST_POINTS, min(ENOUGH_POINTS, MOST_POINTS // len(runs)))
    for group in groups:
        run_scores = [
            _evaluated(run, metric) if evaluated else float(run.curve(metric)[2][-1])
            for run in group.runs
        ]
        group.scores = [score for score in run_scores if score is not None]
        group.score = iqm([group.scores])
        group.interval = interval_of_iqm([group.scores]) if len(group.scores) > 1 else None
        group.curves = {name: aggregated(group.runs, name, max_points) for name in metrics}
    groups.sort(key=lambda group: group.score, reverse=higher)
    return Comparison(
        env=env,
        metric=metric,
        higher_is_better=higher,
        scored_by="evaluation.json of each run" if evaluated else "last evaluation of training",
        groups=groups,
        improvements=_improvements(groups, higher),
        left_out=left_out,
        metrics=metrics,
        notes=_notes(groups, metric),
    )


def _notes(groups: Sequence[Group], metric: str) -> list[str]:
    notes = []
    ends = {run.path: run.curve(metric)[0][-1] for group in groups for run in group.runs}
    shortest, longest = min(ends, key=lambda path: ends[path]), max(ends, key=lambda p: ends[p])
    if ends[shortest] < ENOUGH_STEPS * ends[longest]:
        notes.append(
            f"Runs of unequal length are compared: {shortest} has {ends[shortest]:,.0f} env steps, "
            f"{longest} has {ends[longest]:,.0f}."
        )
    for run in (run for group in groups for run in group.runs):
        if differ := _other_settings(run):
            notes.append(
                f"evaluation.json of {run.path} has other settings than the evaluations of its "
                f"training ({', '.join(differ)}): it scores no run."
            )
    for group in groups:
        by_seed: dict[int | None, list[str]] = {}
        for run in group.runs:
            by_seed.setdefault(run.seed, []).append(str(run.path))
        for seed, paths in by_seed.items():
            if seed is not None and len(paths) > 1:
                notes.append(
                    f"Group {group.name} has seed {seed} {len(paths)} times ({', '.join(paths)}): "
                    "these runs are not independent, and intervals are too narrow."
                )
        # `inf` stands for any number that is not finite, see `RunRecord`.
        for run in group.runs:
            steps = run.env_steps[np.isinf(run.metrics[metric])]
            if len(steps):
                notes.append(
                    f"{run.path} has {metric} that is not finite at {steps[0]:,.0f} env steps: "
                    "curves skip such evaluations."
                )
    return notes


def _read(paths: Sequence[Path], metric: str) -> tuple[list[RunRecord], list[tuple[Path, str]]]:
    runs: list[RunRecord] = []
    left_out: list[tuple[Path, str]] = []
    for path in paths:
        if path.suffix == CURVES:
            runs += read_curves(path, metric)
            continue
        try:
            run = read_run(path, list(dict.fromkeys([metric, *SHOWN_TOO])))
        except ConfigurationError as error:
            left_out.append((path, str(error)))
            continue
        values = run.metrics.get(metric, np.empty(0))
        # NaN marks rows of other metrics; `inf` a diverged run.
        values = values[~np.isnan(values)]
        if len(values) and np.isfinite(values[-1]):
            runs.append(run)
        elif len(values):
            left_out.append(
                (path, f"{path}: {metric} of its last evaluation is not finite. The run diverged.")
            )
        else:
            names = ", ".join(run.metrics) or "no evaluation"
            end = run.manifest.get("outcome", "without an end")
            left_out.append(
                (path, f"{path} has no {metric}, but {names}; it is {end}. Set another --metric.")
            )
    return runs, left_out


def _by_env(
    paths: Iterable[str | Path], metric: str
) -> tuple[dict[str, list[RunRecord]], list[tuple[Path, str]]]:
    runs, left_out = _read(find_runs(paths), metric)
    if not runs:
        reasons = "\n".join(reason for _, reason in left_out[:5])
        tail = f"\nand {len(left_out) - 5} more" if len(left_out) > 5 else ""
        raise ConfigurationError(f"None of the {len(left_out)} runs can be shown.\n{reasons}{tail}")
    envs: dict[str, list[RunRecord]] = {}
    for run in runs:
        envs.setdefault(run.env, []).append(run)
    return envs, left_out


def _grouped(runs: Sequence[RunRecord], group_by: Sequence[str] | None) -> list[Group]:
    setting_names = sorted({name for run in runs for name in run.settings})
    group_paths = None if group_by is None else [_path_of(name, setting_names) for name in group_by]
    grouped: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {
            name: run.settings.get(name)
            for name in (setting_names if group_paths is None else group_paths)
            if group_paths is not None or name not in OF_A_RUN
        }
        # As JSON text, because lists and dicts are no keys.
        grouped.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    members = list(grouped.values())
    differ = [
        name
        for name in setting_names
        if name not in OF_A_RUN
        and len({value_text(runs[0].settings, name) for runs in members}) > 1
    ]
    names = _names(members, group_paths if group_paths is not None else differ)
    return [
        Group(name, {setting: value_text(runs[0].settings, setting) for setting in differ}, runs)
        for name, runs in zip(names, members, strict=True)
    ]


def _path_of(name: str, paths: Sequence[str]) -> str:
    # The end of a path suffices: `learning_rate` for model.init_args.learning_rate.
    matches = [path for path in paths if f".{path}".endswith(f".{name}")]
    if len(matches) != 1:
        several = f"it may be {', '.join(matches)}" if matches else "no run has it"
        ends = {path.rpartition(".")[2] for path in paths} | set(paths)
        raise ConfigurationError(
            f"--group_by {name}: {several}{'' if matches else closest(name, ends)}."
        )
    return matches[0]


def value_text(settings: Mapping[str, Any], name: str) -> str:
    """Return the value of a setting as a short text; a class without its module."""
    if name not in settings:
        return ABSENT
    value = settings[name]
    if name.endswith("class_path"):
        return str(value).rpartition(".")[2]
    if isinstance(value, float):
        return f"{value:.6g}"  # a search draws numbers with sixteen digits
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _names(members: Sequence[Sequence[RunRecord]], settings: Sequence[str]) -> list[str]:
    name_sets = [
        {str(run.settings.get("exp_name", run.path.name)) for run in runs} for runs in members
    ]
    if all(len(names) == 1 for names in name_sets):
        labels = [next(iter(names)) for names in name_sets]
    else:
        labels = [f"settings {i + 1}" for i in range(len(members))]
    short = short_names(settings)
    by_settings = [
        ", ".join(
            value_text(runs[0].settings, name)
            if name == "name"  # of a file of curves
            else f"{short[name]} {value_text(runs[0].settings, name)}"
            for name in settings
        )
        for runs in members
    ]
    # Settings are the best names, unless they are too long or not unique.
    longest = max(map(len, by_settings))
    if len(set(by_settings)) == len(members) and 0 < longest <= LONGEST_NAME:
        return by_settings
    if len(set(labels)) < len(labels):
        labels = [f"{name} ({i + 1})" for i, name in enumerate(labels)]
    return labels


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Map each setting's path to its last part, or to more parts if names would be equal."""
    names = {path: path.removesuffix(".class_path").replace(".init_args", "") for path in paths}
    short = {}
    for path, words in names.items():
        parts = words.split(".")
        # The shortest end that no other path has.
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        rivals = [other for other in names.values() if other != words]
        short[path] = next(
            (end for end in ends if not any(f".{o}".endswith(f".{end}") for o in rivals)), words
        )
    return short


def _evaluated(run: RunRecord, metric: str) -> float | None:
    evaluation = run.evaluation
    # An evaluation of an earlier checkpoint, or in another env, does not score the whole run.
    if evaluation is None or evaluation.get("env_steps", 0) < run.curve(metric)[0][-1]:
        return None
    return None if _other_settings(run) else logged_values(evaluation).get(metric)


def _other_settings(run: RunRecord) -> list[str]:
    judged, trained = (run.evaluation or {}).get("protocol"), run.manifest.get("protocol")
    if not (isinstance(judged, dict) and isinstance(trained, dict)):
        return []  # written before there were protocols
    return [f"data.{name}" for name in PROTOCOL if judged.get(name) != trained.get(name)]


def aggregated(runs: Sequence[RunRecord], metric: str, max_points: int = ENOUGH_POINTS) -> Curve:
    """Aggregate a metric over R runs, at all env steps at which a run was evaluated.

    Other runs are interpolated between their evaluations, and left out further than half of the
    median distance between two evaluations before their first and after their last one. At most
    `max_points` points are returned, including the last.
    """
    curves = [curve for run in runs if len((curve := run.curve(metric))[0])]
    steps = np.unique(np.concatenate([curve[0] for curve in curves]) if curves else np.empty(0))
    steps = thinned(steps, max_points)
    at = [_at(steps, *curve) for curve in curves]
    values = np.array([value for _, value in at]).reshape(len(curves), len(steps))
    seconds = np.array([second for second, _ in at]).reshape(len(curves), len(steps))
    is_reached = ~np.isnan(values)
    result = np.full((3, len(steps)), np.nan)
    for pattern in np.unique(is_reached, axis=1).T:  # points that the same runs reached
        columns = (is_reached == pattern[:, None]).all(axis=0)
        # Bootstrap all points with the same runs together: one call per pattern.
        result[:, columns] = iqm_curve(values[np.ix_(pattern, columns)])
    counts = is_reached.sum(axis=0)
    total_seconds = np.where(is_reached, seconds, 0.0).sum(axis=0)
    return Curve(
        env_steps=steps,
        seconds=total_seconds / np.maximum(counts, 1),
        centre=result[0],
        low=result[1],
        high=result[2],
        runs=counts,
    )


def thinned(values: np.ndarray, max_points: int) -> np.ndarray:
    """Return at most `max_points` evenly spaced values of [T], including the first and the last."""
    count = min(max_points, len(values))
    points: np.ndarray = values[np.linspace(0, len(values) - 1, count).round().astype(int)]
    return points


def _at(
    steps: np.ndarray, run_steps: np.ndarray, seconds: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    # A run counts up to half a gap beyond its ends; further out nothing is known of it.
    reach = np.median(np.diff(run_steps)) / 2 if len(run_steps) > 1 else 0
    is_reached = np.abs(steps - steps.clip(run_steps[0], run_steps[-1])) < max(reach, 1)
    return tuple(  # type: ignore[return-value]  # of two
        np.where(is_reached, np.interp(steps, run_steps, y), np.nan) for y in (seconds, values)
    )


def _improvements(
    groups: Sequence[Group], higher: bool
) -> list[tuple[str, str, float, tuple[float, float]]]:
    pairs = list(combinations(groups, 2))
    # Eight groups have 28 pairs, enough for one table.
    if len(groups) > COMPARED:
        pairs = [(groups[0], other) for other in groups[1:]]
    sign = 1.0 if higher else -1.0
    improvements = []
    for group, other in pairs:
        if len(group.scores) < 2 or len(other.scores) < 2:
            continue  # one run gives no distribution
        x, y = ([[sign * score for score in side.scores]] for side in (group, other))
        improvements.append(
            (
                group.name,
                other.name,
                probability_of_improvement(x, y),
                interval_of_improvement(x, y),
            )
        )
    return improvements
