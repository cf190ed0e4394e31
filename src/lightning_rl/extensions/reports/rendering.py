"""Render a comparison as a self-contained page, as Markdown, or as JSON."""

import base64
import html
import json
import math
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from lightning_rl.extend.checkpoints import own_version
from lightning_rl.extensions.reports.comparison import (
    ABSENT,
    Comparison,
    Group,
    short_names,
    thinned,
)
from lightning_rl.extensions.reports.runs import RunRecord

MIB = 2**20
"""Bytes of a mebibyte."""

CURVE_POINTS = 200
"""Maximum points of one run's curve."""

TITLES = {
    "eval/avg_reward": "Return of an episode",
    "eval/success_rate": "Success rate",
    "eval/avg_length": "Length of an episode, env steps",
}
"""Titles of the axes."""

METHOD = (
    "Scores and curves are interquartile means over the runs of a group, with 95 % intervals by "
    "the stratified percentile bootstrap (Agarwal et al. 2021, as in rliable). Training time "
    "covers collection and updates, without evaluations."
)
"""Description of the statistics, for the reports."""


def as_data(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values, for `--format json`."""
    return {
        "version": own_version(),
        "env": comparison.env,
        "metric": comparison.metric,
        "higher_is_better": comparison.higher_is_better,
        "scored_by": comparison.scored_by,
        "metrics": {name: TITLES.get(name, name) for name in comparison.metrics},
        "groups": [_group_data(group, comparison.metrics) for group in comparison.groups],
        "improvements": [
            {"group": group, "other": other, "probability": share, "interval": list(interval)}
            for group, other, share, interval in comparison.improvements
        ],
        "notes": comparison.notes,
        "left_out": [{"run": str(path), "reason": reason} for path, reason in comparison.left_out],
    }


def _group_data(group: Group, metrics: Sequence[str]) -> dict[str, Any]:
    return {
        "name": group.name,
        "settings": group.settings,
        "score": group.score,
        "interval": None if group.interval is None else list(group.interval),
        "curves": {
            name: {key: _plain(values) for key, values in vars(group.curves[name]).items()}
            for name in metrics
        },
        "costs": costs_of(group.runs),
        "runs": [
            _run_data(run, score, metrics)
            for run, score in zip(group.runs, group.scores, strict=True)
        ],
    }


def _run_data(run: RunRecord, score: float, metrics: Sequence[str]) -> dict[str, Any]:
    columns = ("env_steps", "seconds", "values")
    # Thinned, because a page holds the curves of all runs.
    curves = {
        name: {
            key: _plain(thinned(values, CURVE_POINTS))
            for key, values in zip(columns, run.curve(name), strict=True)
        }
        for name in metrics
    }
    evaluation = run.evaluation or {}
    return {
        "path": str(run.path),
        "seed": run.seed,
        "outcome": run.manifest.get("outcome"),
        "score": score,
        "costs": costs_of([run]),
        "evaluation": {
            name: evaluation.get(name)
            for name in ("episodes", "avg_reward", "ci95", "success_rate", "env_steps")
        }
        if evaluation
        else None,
        "curves": curves,
    }


def _plain(values: np.ndarray) -> list[float | int | None]:
    # JSON has no NaN; six digits keep the page small.
    return [
        None if not math.isfinite(x) else int(x) if float(x).is_integer() else float(f"{x:.6g}")
        for x in values.tolist()
    ]


def costs_of(runs: Sequence[RunRecord]) -> dict[str, float | None]:
    """Return the costs of runs, each a mean over the runs that report it."""

    def mean(values: list[float | None]) -> float | None:
        reported = [value for value in values if value is not None and not math.isnan(value)]
        return float(np.mean(reported)) if reported else None

    memory = [run.manifest.get("peak_memory") or {} for run in runs]
    # Time and steps of the last row are those of the whole run.
    ends = [(run.env_steps[-1], run.seconds[-1]) for run in runs if len(run.env_steps)]
    return {
        "sps": mean([float(steps / seconds) if seconds else None for steps, seconds in ends]),
        "seconds": mean([run.of_all_parts("total") for run in runs]),
        "evaluation_seconds": mean([run.of_all_parts("evaluation") for run in runs]),
        "cpu_seconds": mean([run.of_all_parts("cpu") for run in runs]),
        "memory": mean([usage.get("process") for usage in memory]),
        "gpu_memory": mean([usage.get("cuda") for usage in memory]),
    }


Table = tuple[str, list[str], list[list[str]]]
"""Title, column names, and rows of cells."""


def tables_of(comparison: Comparison) -> list[Table]:
    """Return the tables of a report as text."""
    groups = comparison.groups
    tables: list[Table] = [
        (
            f"Final evaluation: {TITLES.get(comparison.metric, comparison.metric)}",
            ["group", "score", "95 % interval", "mean", "lowest to highest", "runs", "env steps"],
            [_score_row(group, comparison.metric) for group in groups],
        )
    ]
    if comparison.improvements:
        rows = [
            [group, other, f"{share:.2f}", f"[{low:.2f}, {high:.2f}]"]
            for group, other, share, (low, high) in comparison.improvements
        ]
        names = ["a run of", "is better than one of", "with probability", "95 % interval"]
        tables.append(("Probability of improvement", names, rows))
    if groups[0].settings:
        # The shortest names that stay unique.
        short = short_names(list(groups[0].settings))
        rows = [
            [short[name], *(group.settings[name] for group in groups)]
            for name in groups[0].settings
        ]
        if len(groups) > len(rows):  # the longer side becomes the rows
            columns = ["group", *(row[0] for row in rows)]
            rows = [[group.name, *group.settings.values()] for group in groups]
        else:
            columns = ["setting", *(group.name for group in groups)]
        tables.append(("Settings that differ", columns, rows))
    columns = ["group", "env steps/s", "wall clock", "evaluations", "CPU time", "memory", "GPU"]
    tables.append(("Speed and memory", columns, [_cost_row(group) for group in groups]))
    columns = ["run", "group", "seed", "outcome", "score", "best", "env steps", "evaluation.json"]
    rows = [
        _run_row(run, group, score, comparison)
        for group in groups
        for run, score in zip(group.runs, group.scores, strict=True)
    ]
    tables.append(("Runs", columns, rows))
    if comparison.notes:
        tables.append(("Notes", ["note"], [[note] for note in comparison.notes]))
    if comparison.left_out:
        rows = [[str(path), reason] for path, reason in comparison.left_out]
        tables.append(("Left out", ["run", "why"], rows))
    return tables


def _score_row(group: Group, metric: str) -> list[str]:
    low, high = group.interval or (None, None)
    return [
        group.name,
        number(group.score),
        "one run" if low is None else f"[{number(low)}, {number(high)}]",
        number(float(np.mean(group.scores))),
        f"{number(min(group.scores))} to {number(max(group.scores))}",
        str(len(group.runs)),
        number(float(group.curves[metric].env_steps[-1])),
    ]


def _cost_row(group: Group) -> list[str]:
    costs = costs_of(group.runs)
    return [
        group.name,
        number(costs["sps"]),
        *(duration(costs[name]) for name in ("seconds", "evaluation_seconds", "cpu_seconds")),
        *(_size(costs[name]) for name in ("memory", "gpu_memory")),
    ]


def _run_row(run: RunRecord, group: Group, score: float, comparison: Comparison) -> list[str]:
    steps, _, values = run.curve(comparison.metric)
    best = values.max() if comparison.higher_is_better else values.min()
    # Only runs that were evaluated have this cell.
    cell = ABSENT
    if run.evaluation is not None:
        low, high = run.evaluation["ci95"]
        cell = (
            f"{number(run.evaluation['avg_reward'])} [{number(low)}, {number(high)}], "
            f"{run.evaluation['episodes']} episodes at {number(run.evaluation.get('env_steps'))}"
        )
    return [
        run.path.name,
        group.name,
        ABSENT if run.seed is None else str(run.seed),
        str(run.manifest.get("outcome", "unknown")),
        number(score),
        number(float(best)),
        number(float(steps[-1])),
        cell,
    ]


def number(value: float | None) -> str:
    """Return a number as text, with few digits; None or NaN: unknown."""
    if value is None or math.isnan(value):
        return ABSENT
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Return seconds as text with a fitting unit; None: unknown."""
    if seconds is None:
        return ABSENT
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"


def _size(size: float | None) -> str:
    return ABSENT if size is None else f"{size / MIB:,.0f} MiB"


def as_markdown(comparison: Comparison) -> str:
    """Return the tables of a report as Markdown."""
    lines = [f"# {_title(comparison)}", "", f"{_summary(comparison)} {METHOD}", ""]
    for title, columns, rows in tables_of(comparison):
        lines += [f"## {title}", "", _row(columns), _row(["---"] * len(columns))]
        lines += [*map(_row, rows), ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    # A pipe would end the cell, and a line break the row.
    texts = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(texts)} |"


def _title(comparison: Comparison) -> str:
    return f"{comparison.env}: {TITLES.get(comparison.metric, comparison.metric).lower()}"


def _summary(comparison: Comparison) -> str:
    count = sum(len(group.runs) for group in comparison.groups)
    groups = len(comparison.groups)
    runs = "1 run" if count == 1 else f"{count} runs"
    of = "" if groups == 1 else f" in {groups} groups of equal settings"
    return f"{runs}{of}, scored by the {comparison.scored_by}."


def as_page(comparison: Comparison, output: Path, films_mib: float) -> str:
    """Return a self-contained HTML page for `output`, with at most `films_mib` MiB of videos."""
    template = (files("lightning_rl.extensions.reports") / "page.html").read_text(encoding="utf-8")
    # `allow_nan`: a number that is not finite would end the script of the page, so fail here.
    data = json.dumps(as_data(comparison), separators=(",", ":"), allow_nan=False)
    title = html.escape(_title(comparison))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = {
        "title": title,
        "summary": html.escape(_summary(comparison)),
        "method": html.escape(METHOD),
        "made": f"lightning_rl {html.escape(own_version())}, {now}",
        "tables": "\n".join(_sections(comparison)),
        "films": _films(comparison, output, films_mib),
        "data": data.replace("<", "\\u003c"),  # so that no value can close the script tag
    }
    # The template marks its places by HTML comments.
    for name, text in parts.items():
        template = template.replace(f"<!--{name}-->", text)
    return template


def _sections(comparison: Comparison) -> Iterator[str]:
    for title, columns, rows in tables_of(comparison):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        # The script of the page draws the bars of these numbers.
        bar = "<td class=bar></td>" if title.startswith(("Final", "Probability")) else ""
        head += "<th></th>" * bool(bar)
        body = "".join(f"<tr>{''.join(map(_cell, row))}{bar}</tr>\n" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
        table = f'<div class="scroll">{table}</div>'
        if len(rows) > 12:
            table = f"<details><summary>{len(rows)} rows</summary>{table}</details>"
        yield f"<section><h2>{html.escape(title)}</h2>{table}</section>"


def _cell(text: str) -> str:
    # Numbers are aligned to the right.
    numeric = text[:1].isdigit() or text[:1] in ("[", "-") or text == ABSENT
    return f"<td{' class=n' if numeric and len(text) < 30 else ''}>{html.escape(text)}</td>"


def _films(comparison: Comparison, output: Path, films_mib: float) -> str:
    remaining = films_mib * MIB
    figures = []
    for group in comparison.groups:
        for run in group.runs:
            if not run.films:
                continue
            # The newest video shows the last policy; when the page is full, further ones are
            # linked.
            film = run.films[-1]
            size = film.stat().st_size
            if size <= remaining:
                remaining -= size
                source = f"data:video/mp4;base64,{base64.b64encode(film.read_bytes()).decode()}"
                preload = "metadata"  # show the first frame
            else:
                preload = "none"
                # Relative, so that the report moves together with the runs.
                source = quote(os.path.relpath(film, output.absolute().parent))
            name = html.escape(f"{group.name}, {run.path.name}: {film.name}")
            figures.append(
                f'<figure><video controls preload="{preload}" src="{source}"></video>'
                f"<figcaption>{name}</figcaption></figure>"
            )
    if not figures:
        return ""
    return f'<section><h2>Films</h2><div class="films">{"".join(figures)}</div></section>'
