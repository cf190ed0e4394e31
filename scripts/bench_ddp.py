"""Measure weak scaling: env steps per second of two processes relative to twice one process.

    python scripts/bench_ddp.py                 # W1 and W3 of bench_peers.py, on CPU
    python scripts/bench_ddp.py --quick
    python scripts/bench_ddp.py --device cuda --processes 1 2 4 8

Every process has the envs, the rollouts and the minibatches of the workload, and one thread. Each
run is launched by Lightning, as by `rl-cli fit --trainer.devices`. Numbers of processes alternate;
the table has medians over the repeats.

`apart` is the sum of as many independent processes that train at the same time: an upper bound,
because cores share caches, memory and power. The reduction is the time in sums and gathers over
ranks, with the wait for the slower rank; it is part of the update, and of the collection if
episodes are counted. CPU is the processor time of rank 0, per iteration: other load hardly changes
it. Writes `results/ddp.md`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peers.common import WORKLOADS
from scripting import parser_of, table

HERE = Path(__file__).resolve().parent
BAR = 0.9
PARTS = ("collect", "update", "reduction", "cpu")
COLUMNS = (
    *("workload", "processes", "env steps/s", "scaling", "apart"),
    *("collect ms", "update ms", "of them reduction ms", "CPU ms"),
)

Row = dict[str, Any]


def main() -> None:
    args = arguments()
    repeats = 1 if args.quick else 3
    rows = []
    for repeat in range(repeats):
        for workload in ("W1", "W3"):
            for processes in args.processes:
                busy = load()
                (row,) = results([start(workload, processes, args)])
                row |= {"workload": workload, "processes": processes, "load": busy}
                row["apart"] = row["sps"]
                if processes > 1:
                    alone = results([start(workload, 1, args) for _ in range(processes)])
                    row["apart"] = sum(run["sps"] for run in alone)
                rows.append(row)
                print(
                    f"[{repeat + 1}] {workload} × {processes}: {row['sps']:,.0f} env steps/s, "
                    f"apart {row['apart']:,.0f}"
                )
    text = as_markdown(rows, args.device, repeats)
    args.output.write_text(text)
    print(text)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="one repeat of few iterations")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "ddp.md")
    return parser.parse_args()


def start(workload: str, processes: int, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start one workload on some processes."""
    iterations = 5 if args.quick else 2 * WORKLOADS[workload].iterations
    command = [sys.executable, str(HERE / "peers" / "ours.py"), workload]
    command += ["--processes", str(processes), "--iterations", str(iterations)]
    return subprocess.Popen(
        [*command, "--threads", "1", "--device", args.device],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def results(runs: list[subprocess.Popen[str]]) -> list[Row]:
    """Wait for runs, and return the measurements of their ranks 0, in seconds per iteration."""
    rows = []
    for run in runs:
        output, errors = run.communicate()
        if run.returncode:
            raise SystemExit(errors[-4000:])
        row = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        iterations = row["settings"]["iterations"]
        cpu = row["env_steps"] / row["steps_per_cpu_second"] / iterations
        rows.append({"sps": row["sps"], "cpu": cpu} | {p: row[f"{p}_seconds"] for p in PARTS[:3]})
    return rows


def load() -> float:
    """Return the share of the cores that other processes use, over a second."""

    def busy() -> tuple[int, int]:
        times = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(times) - times[3] - times[4], sum(times)

    try:
        before = busy()
        time.sleep(1.0)
        after = busy()
    except OSError:
        return 0.0
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def as_markdown(rows: list[Row], device: str, repeats: int) -> str:
    worst = max(row["load"] for row in rows)
    about = f"{os.cpu_count()} cores, {device}, one thread per process; medians of "
    about += f"{repeats} runs each. Before a run others used up to {worst:.0%} of the cores"
    about += ": the machine was busy, so this is no measure of scaling." if worst > 0.1 else "."
    cells = []
    alone: dict[str, float] = {}  # by workload, with the fewest processes
    for workload, processes in dict.fromkeys((row["workload"], row["processes"]) for row in rows):
        runs = [r for r in rows if (r["workload"], r["processes"]) == (workload, processes)]
        medians = {
            key: statistics.median(run[key] for run in runs) for key in ("sps", "apart", *PARTS)
        }
        sps = medians["sps"] / processes
        scaling = sps / alone.setdefault(workload, sps)
        mark = "" if scaling >= BAR else f" (below {BAR:.0%})"
        apart = medians["apart"] / processes / alone[workload]
        shares = f"{scaling:.0%}{mark}", f"{apart:.0%}"
        milliseconds = (f"{1000 * medians[part]:.2f}" for part in PARTS)
        cells.append([workload, processes, f"{medians['sps']:,.0f}", *shares, *milliseconds])
    return "\n".join(["# Weak scaling", "", about, "", *table(COLUMNS, cells)]) + "\n"


if __name__ == "__main__":
    main()
