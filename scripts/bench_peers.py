"""Measure the training speed of the same PPO, or SAC, in lightning_rl and other libraries.

    python scripts/bench_peers.py --workloads W1 W2 --repeats 3 --output peers

Each library has its own virtual environment, made once in `--venvs`; the runners are in
`scripts/peers`. Each run is a process. In each repeat all libraries run once, in an order that
rotates, so that changes of the machine's speed affect all. The result is env steps per second, end
to end, over the timed iterations after the warm-up; evaluation, checkpoints and loggers are off.
Seeds are 1, 2, ... by repeat.

Our rows list the optimisations used (`computing` of `run.json`). The rows with `-plain` switch
machine-specific optimisations off.

W4's rows also show the cost of compiling. In the first repeat the cache of compiled graphs is empty
(`first start`, from the launch of the process to the end of its first iteration), and filled in
later ones (`second start`). JAX has no cache by default. `compiling` is the first start minus the
start of a run that compiles nothing. These are CPU seconds, and W4 counts env steps per CPU second
as well, because other processes share the core.

Writes `results.json` (every run) and `results.md` (a table per workload, medians over the repeats;
a ratio compares two runs of one repeat).
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.common import CLASSIC, OFF_POLICY, ON_POLICY, W4, WORKLOADS
from scripting import parser_of, processor
from scripting import table as as_table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TORCH = "torch==2.13.0"
"""Installed first in each virtual environment."""
GYMNASIUM = "gymnasium[mujoco]==1.4.0"
OURS = "lightning_rl"
ALL = (*ON_POLICY, *OFF_POLICY, *W4)
TIMEOUT = 900.0
"""Seconds of a run."""
REFERENCES = dict.fromkeys(CLASSIC, "stable-baselines3")
REFERENCES |= dict.fromkeys(OFF_POLICY, "stable-baselines3-sac")
"""Of each workload: the library that the others are compared with; elsewhere the fastest peer."""
ABOUT = {
    "W1": "CartPole-v1, 8 envs × 128 steps, 4 epochs × 4 minibatches",
    "W2": "HalfCheetah-v5, 1 env × 2,048 steps, 10 epochs × 32 minibatches, normalised",
    "W2b": "HalfCheetah-v5, 8 envs × 2,048 steps, 10 epochs × 32 minibatches, normalised",
    "W3": "pendulum in torch, 4,096 envs × 24 steps, 5 epochs × 4 minibatches, 128×128",
    "W4-8": "CartPole in the framework, 8 envs × 128 steps, 4 epochs × 4 minibatches",
    "W4-64": "CartPole in the framework, 64 envs × 128 steps, 4 epochs × 4 minibatches",
    "W4-1024": "CartPole in the framework, 1,024 envs × 16 steps, 4 epochs × 4 minibatches",
    "S1": "SAC, HalfCheetah-v5, 1 env, an update of 256 samples per env step, 256×256",
    "S64": "SAC, pendulum in torch, 64 envs, 8 updates of 256 samples per step of all, 256×256",
}

REQUIREMENTS: dict[str, list[str]] = {
    OURS: ["-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[mujoco]"],
    "stable-baselines3": ["stable-baselines3==2.9.2", GYMNASIUM],
    "sbx": ["sbx-rl==0.28.0", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", GYMNASIUM],
    "rsl_rl": ["rsl-rl-lib==5.5.1"],
    "torchrl": ["torchrl==0.14.1", GYMNASIUM],
    "rejax": [
        *("rejax==0.1.3", "gymnax==0.0.9", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8"),
        *("optax==0.2.8", "distrax==0.1.9", "chex==0.1.92", "gymnasium==1.4.0", "numpy==2.4.6"),
        "tfp-nightly==0.26.0.dev20261027",  # distrax requires some nightly version
    ],
}
"""Packages to install after torch in each virtual environment."""


@dataclass(frozen=True)
class Library:
    venv: str
    script: str
    workloads: tuple[str, ...]
    flags: tuple[str, ...] = ()
    floor: bool = False
    uncompiled: str = ""
    """The row that is the same without compiling, by which W4 knows what that costs."""


ONCE = {"startup_seconds": 1, "first_iteration_seconds": 2, "peak_rss_mb": 0}
"""Numbers that a run has once, and their digits in the tables."""

STARTS = {"first start": 1, "second start": 1, "compiling": 1, "peak MB": 0}
"""The same for W4, in CPU seconds, because other processes share the core."""


def ours(*flags: str, uncompiled: str = "") -> Library:
    workloads = (*ON_POLICY, *W4)
    return Library(OURS, "ours.py", workloads, flags, uncompiled=uncompiled)


def floor(flag: str, *workloads: str) -> Library:
    return Library(OURS, "floors.py", workloads, (flag,), floor=True)


LIBRARIES = {
    "lightning_rl": ours(),
    "lightning_rl-plain": ours("--plain"),
    "lightning_rl-compiled-plain": ours("--compile", "--plain", uncompiled="lightning_rl-plain"),
    "lightning_rl-compiled": ours("--compile", uncompiled="lightning_rl"),
    "rejax": Library("rejax", "rejax_ppo.py", W4),
    "bare": Library(OURS, "bare.py", ON_POLICY),
    "bare-compiled": Library(OURS, "bare.py", ON_POLICY, ("--compile",)),
    "stable-baselines3": Library("stable-baselines3", "sb3.py", CLASSIC),
    "rsl_rl": Library("rsl_rl", "rsl_rl_ppo.py", ("W3",)),
    "rsl_rl-compiled": Library("rsl_rl", "rsl_rl_ppo.py", ("W3",), ("--compile",)),
    "torchrl": Library("torchrl", "torchrl_ppo.py", CLASSIC),
    "sac": Library(OURS, "ours.py", OFF_POLICY),
    "sac-compiled": Library(OURS, "ours.py", OFF_POLICY, ("--compile",)),
    "stable-baselines3-sac": Library("stable-baselines3", "sb3.py", OFF_POLICY),
    "sbx-sac": Library("sbx", "sb3.py", OFF_POLICY, ("--jax",)),
    "floor-env": floor("--env", *ON_POLICY, *OFF_POLICY),
    "floor-unwrapped": floor("--unwrapped", *ON_POLICY, *OFF_POLICY),
    "floor-matmuls": floor("--matmuls", *ALL),
}


def main() -> None:
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    venvs = dict.fromkeys(LIBRARIES[name].venv for name in args.libraries)
    pythons = {venv: prepare(venv, args.venvs.expanduser().absolute() / venv) for venv in venvs}
    about = {"cpu": processor(), "cores": os.cpu_count(), "platform": platform.platform()}
    runs: list[dict[str, Any]] = []
    report = {
        "command": sys.argv,
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": about | {"python": platform.python_version()},
        "runs": runs,
    }
    for workload in args.workloads:
        names = [name for name in args.libraries if workload in LIBRARIES[name].workloads]
        for repeat in range(args.repeats):
            turn = repeat % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                runs.append(run(name, workload, repeat, pythons, args.output))
                (args.output / "results.json").write_text(json.dumps(report, indent=1))
        text = as_markdown(report)
        (args.output / "results.md").write_text(text)
    print(text)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("bench_peers"), metavar="DIR")
    parser.add_argument(
        "--venvs", type=Path, default=Path("~/.cache/lightning_rl_peers"), metavar="DIR"
    )
    return parser.parse_args()


def prepare(venv: str, home: Path) -> Path | str:
    """Make a virtual environment if it is missing; return its interpreter, or the failure."""
    python = home / "bin" / "python"
    requirements = json.dumps([TORCH, *REQUIREMENTS[venv]])
    stamp = home / "requirements.json"
    if stamp.exists() and stamp.read_text() == requirements:
        return python
    print(f"Making {home}", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    steps = [[*pip, TORCH], [*pip, TORCH, *REQUIREMENTS[venv]]]
    if not python.exists():
        steps.insert(0, [sys.executable, "-m", "venv", str(home)])
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode != 0:
            error = f"{' '.join(step)}\n{last_lines(done.stderr)}"
            print(error, file=sys.stderr)
            return error
    stamp.write_text(requirements)
    return python


def run(
    name: str, workload: str, repeat: int, pythons: dict[str, Path | str], output: Path
) -> dict[str, Any]:
    """Run one library once; an error becomes part of the result."""
    library, python = LIBRARIES[name], pythons[LIBRARIES[name].venv]
    row = {"name": name, "key": workload, "repeat": repeat, "load": os.getloadavg()[0]}
    if isinstance(python, str):
        return row | {"error": python}
    command = [str(python), str(HERE / "peers" / library.script), workload, *library.flags]
    command += ["--seed", str(repeat + 1)]
    env = os.environ | {"OMP_NUM_THREADS": str(WORKLOADS[workload].threads)}
    if workload in W4:
        graphs = output.absolute() / "graphs" / f"{workload} {name}".replace(" ", "_")
        if repeat == 0:
            shutil.rmtree(graphs, ignore_errors=True)
        env["TORCHINDUCTOR_CACHE_DIR"] = str(graphs)
    env["PEERS_LAUNCHED"] = repr(time.time())
    print(f"[{repeat + 1}] {workload} {name} ", end="", flush=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:  # MuJoCo writes a log there
            done = subprocess.run(
                command, capture_output=True, text=True, env=env, cwd=scratch, timeout=TIMEOUT
            )
        if done.returncode != 0:
            raise RuntimeError(last_lines(done.stderr))
        row |= json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{row['sps']:,.0f} env steps/s", flush=True)
    except subprocess.TimeoutExpired:
        row["error"] = f"not done in {TIMEOUT} s"
    except (RuntimeError, ValueError, IndexError) as error:
        row["error"] = str(error) or repr(error)
    if "error" in row:
        print(f"failed: {row['error']}", flush=True)
    return row


def last_lines(text: str, count: int = 6) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def as_markdown(report: dict[str, Any]) -> str:
    runs, about = report["runs"], report["machine"]
    torches = sorted({row["torch"] for row in runs if "torch" in row})
    lines = [
        f"{about['cpu']}, {about['cores']} cores; Python {about['python']}; torch "
        f"{', '.join(torches)}. Medians over the repeats, "
        "and of ratios within a repeat; range of env steps/s in brackets. Collect and update are "
        "seconds per iteration; start-up is the time from the launch of the process to its first "
        "iteration, which also compiles; a start is all CPU time of the process to the end of its "
        "first iteration."
    ]
    for key in dict.fromkeys(row["key"] for row in runs):
        rows = [row for row in runs if row["key"] == key]
        example = next((row for row in rows if "settings" in row), None)
        lines += ["", f"## {key}: {ABOUT[key]}", ""]
        if example:
            in_torch = key in ("W3", "S64", *W4)
            versions = example["versions"]
            used = "" if in_torch else f"gymnasium {versions['gymnasium']}, "
            used += f"mujoco {versions['mujoco']}, " if key[:2] in ("W2", "S1") else ""
            lines += [f"{used}{example['threads']} torch threads, {example['device']}.", ""]
        lines += [*table(key, rows), "", *computing(rows)]
    for row in runs:
        if "error" in row:
            title = f"{row['key']} {row['name']} failed:"
            lines += ["", title, "", "```", row["error"], "```"]
    return "\n".join(lines) + "\n"


def table(key: str, rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(row["name"] for row in sorted(rows, key=lambda r: r["repeat"])))
    names.sort(key=lambda name: -(median(rows, name, "sps") or 0.0))
    peers = [n for n in names if LIBRARIES[n].venv != OURS and median(rows, n, "sps")]
    reference = REFERENCES.get(key) or next(iter(peers), "")
    of_w4 = ("steps per CPU s", "÷ per CPU s", *STARTS)
    once = of_w4 if key in W4 else ("start-up s", "first iteration s", "peak MB")
    columns = (
        *("library", "version", "env steps/s", f"÷ {reference or 'peer'}"),
        *("collect s", "update s", *once),
    )
    names.sort(key=lambda name: LIBRARIES[name].floor)
    return as_table(columns, (cells(name, rows, reference, len(columns)) for name in names))


def cells(name: str, rows: list[dict[str, Any]], reference: str, columns: int) -> list[str]:
    good = [row for row in rows if row["name"] == name and "sps" in row]
    if not good:
        return [name, "–", "failed", *["–"] * (columns - 3)]
    floor, sps = LIBRARIES[name].floor, median(rows, name, "sps") or 0.0
    span = f" ({min(r['sps'] for r in good):,.0f}–{max(r['sps'] for r in good):,.0f})"
    title = good[0]["library"]

    def number(field: str, digits: int) -> str:
        return written(median(rows, name, field), digits)

    def compared(field: str) -> str:
        return written(None if floor else ratio(rows, name, reference, field), 2)

    if good[0]["key"] in W4:
        by_cpu = [number("steps_per_cpu_second", 0), compared("steps_per_cpu_second")]
        known = starts(name, rows) | {"peak MB": median(rows, name, "peak_rss_mb")}
        ends = [written(None if floor else known[c], digits) for c, digits in STARTS.items()]
        once = [*by_cpu, *ends]
    elif floor:
        once = ["–"] * len(ONCE)
    else:
        once = [number(field, digits) for field, digits in ONCE.items()]
    return [
        f"**{title}**" if title.startswith(OURS) else title,
        "–" if floor else good[0]["version"],
        f"{sps:,.0f}{span if len(good) > 1 else ''}",
        compared("sps"),
        *(number(f"{part}_seconds", 4) for part in ("collect", "update")),
        *once,
    ]


def written(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def starts(name: str, rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the CPU seconds of the first start, of later ones, and of compiling, in W4."""
    first_rows = [row for row in rows if row["repeat"] == 0]
    later_rows = [row for row in rows if row["repeat"] > 0]
    first = median(first_rows, name, "start_cpu_seconds")
    uncompiled = median(first_rows, LIBRARIES[name].uncompiled, "start_cpu_seconds")
    compiling = median(rows, name, "compile_seconds")
    if compiling is None and first is not None and uncompiled is not None:
        compiling = first - uncompiled
    second = median(later_rows, name, "start_cpu_seconds")
    return {"first start": first, "second start": second, "compiling": compiling}


def computing(rows: list[dict[str, Any]]) -> list[str]:
    """Describe the optimisations of each of our rows, from `run.json`."""
    lines = {}
    for row in rows:
        ways = {k: v for k, v in row.get("computing", {}).items() if v is not None and k != "why"}
        words = {True: "yes", False: "no"}
        said = [f"{k} {words[v] if isinstance(v, bool) else v}" for k, v in ways.items()]
        if said:
            lines[row["library"]] = f"- {row['library']}: {', '.join(said)}"
    return list(lines.values())


def median(rows: list[dict[str, Any]], name: str, field: str) -> float | None:
    values = [row[field] for row in rows if row["name"] == name and row.get(field) is not None]
    return statistics.median(values) if values else None


def ratio(rows: list[dict[str, Any]], name: str, reference: str, field: str) -> float | None:
    """Return the median of the ratios to the reference, each of two runs of one repeat."""
    by_repeat: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.get(field) is not None:
            by_repeat.setdefault(row["repeat"], {})[row["name"]] = row[field]
    pairs = [row for row in by_repeat.values() if name in row and reference in row]
    return statistics.median(p[name] / p[reference] for p in pairs) if pairs else None


if __name__ == "__main__":
    main()
