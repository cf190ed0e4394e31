"""Keep the evaluations of finished runs in a file of curves, which `rl-cli report` draws.

A run replaces the curve of the same name, env and seed.
"""

import json
from collections.abc import Iterable
from pathlib import Path


def keep(file: Path, runs: Iterable[Path], name: str, metric: str, env: str | None = None) -> None:
    """Add the curves of runs to a file, under a name and an env (as the runs call it)."""
    from lightning_rl.extensions.reports.runs import find_runs, read_run

    for path in find_runs(runs):
        run = read_run(path, [metric])
        steps, _, values = run.curve(metric)
        if not len(steps):
            raise SystemExit(f"{path} has no {metric}.")
        points = dict(zip(steps.astype(int).tolist(), values.tolist(), strict=True))
        add(file, points, name, metric, env or run.env, run.seed)


def add(
    file: Path, points: dict[int, float], name: str, metric: str, env: str, seed: int | None
) -> None:
    """Add the curve of a run, values by env steps; other libraries' runs have no other file."""
    kept = json.loads(file.read_text()) if file.exists() else {"metric": metric, "curves": {}}
    if kept["metric"] != metric:
        raise SystemExit(f"{file} keeps {kept['metric']}, not {metric}.")
    seeds = kept["curves"].setdefault(name, {}).setdefault(env, {})
    seeds[str(seed)] = [[at, float(f"{value:.5g}")] for at, value in points.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(written(kept))


def written(kept: dict) -> str:
    """Return the text of a file of curves, with one line for each run."""
    names = []
    for name, envs in kept["curves"].items():
        each = []
        for env, seeds in envs.items():
            lines = [f"   {json.dumps(seed)}: {json.dumps(seeds[seed])}" for seed in sorted(seeds)]
            each.append(f"  {json.dumps(env)}: {{\n" + ",\n".join(lines) + "}")
        names.append(f" {json.dumps(name)}: {{\n" + ",\n".join(each) + "}")
    head = f'{{"metric": {json.dumps(kept["metric"])}, "curves": {{\n'
    return head + ",\n".join(names) + "}}\n"
