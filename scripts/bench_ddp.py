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
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
BAR = 0.9
PARTS = ("collect", "update", "reduction", "cpu")


def main() -> int:
    args = arguments()
    if args.worker:
        work(args)
        return 0
    rows = []
    for repeat in range(args.repeats):
        for workload in args.workloads:
            for processes in args.processes:
                row = launch(workload, processes, repeat, args)
                row["apart"] = apart(workload, processes, args) if processes > 1 else row["sps"]
                rows.append(row)
                print(
                    f"[{repeat + 1}] {workload} × {processes}: {row['sps']:,.0f} env steps/s, "
                    f"apart {row['apart']:,.0f}"
                )
    text = as_markdown(rows, args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print(text)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=("W1", "W3"), default=["W1", "W3"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, help="timed; where not given, the workload's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one repeat of few iterations")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "ddp.md")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.iterations = 1, args.iterations or 5
    return args


def launch(workload: str, processes: int, repeat: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one workload on some processes; return the measurements of rank 0."""
    busy = load()
    (found,) = results([start(workload, processes, args)])
    return found | {"workload": workload, "processes": processes, "repeat": repeat, "load": busy}


def apart(workload: str, processes: int, args: argparse.Namespace) -> float:
    """Return the summed env steps/s of independent processes."""
    return sum(r["sps"] for r in results([start(workload, 1, args) for _ in range(processes)]))


def start(workload: str, processes: int, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start one workload on some processes."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", workload]
    command += ["--processes", str(processes), "--device", args.device]
    command += ["--iterations", str(args.iterations)] if args.iterations else []
    command += ["--compile"] if args.compile else []
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def results(runs: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Wait for runs, and return the measurements of their ranks 0."""
    found = []
    for run in runs:
        output, errors = run.communicate()
        if run.returncode:
            raise SystemExit(errors[-4000:])
        lines = output.splitlines()
        found.append(json.loads(next(line for line in lines if line.startswith('{"sps"'))))
    return found


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


def work(args: argparse.Namespace) -> None:
    """Train on this rank; rank 0 prints the result."""
    import torch
    from common import WORKLOADS
    from lightning.pytorch import Callback, seed_everything
    from lightning_rl_ppo import PendulumEnv

    from lightning_rl import PPO, ActorCritic, GymnasiumEnv, RLDataModule, RLTrainer
    from lightning_rl.system import ranks

    workload = WORKLOADS[args.worker]
    iterations = args.iterations or workload.iterations * 2
    (processes,) = args.processes
    spent = {"reduction": 0.0}

    def now() -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            began = now()
            result = function(*arguments, **options)
            spent["reduction"] += now() - began
            return result

        return call

    for name in ("sum_over_ranks", "max_over_ranks", "gather_over_ranks"):
        setattr(ranks, name, timed(getattr(ranks, name)))

    class Clock(Callback):
        rows: list[dict[str, float]] = []  # noqa: RUF012  # one instance
        ends: list[float] = []  # noqa: RUF012

        used = 0.0

        def on_train_batch_start(self, *_: Any) -> None:
            self.began = now()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.ends.append(now())
            row = {"collect": trainer.datamodule.dataset.collect_seconds}
            row |= {"update": self.ends[-1] - self.began, "cpu": time.process_time() - self.used}
            self.rows.append(row | spent)
            spent["reduction"], self.used = 0.0, time.process_time()

    seed_everything(1, verbose=False)
    clock = Clock()
    env = (
        partial(PendulumEnv, device=args.device)
        if args.worker == "W3"
        else partial(GymnasiumEnv, id=workload.env)
    )
    total = workload.warmup + iterations
    data = RLDataModule(
        env,
        num_envs=workload.num_envs,
        buffer_size=workload.steps,
        total_env_steps=total * workload.env_steps * processes,
        iterations_per_epoch=total,
    )
    policy = ActorCritic(
        data.observation_space, data.action_space, workload.hidden, activation=workload.activation
    )
    model = PPO(
        policy,
        learning_rate=workload.learning_rate,
        n_epochs=workload.epochs,
        batch_size=workload.batch_size,
        ent_coef=workload.ent_coef,
        compile=args.compile,
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLTrainer(
            run_dir=directory,
            logger=False,
            enable_progress_bar=False,
            callbacks=[clock],
            accelerator="cpu" if args.device == "cpu" else "gpu",
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
            limit_val_batches=0,
        )
        trainer.fit(model, data)
    if trainer.is_global_zero:
        seconds = clock.ends[-1] - clock.ends[workload.warmup - 1]
        result = {"sps": iterations * workload.env_steps * processes / seconds}
        for part in PARTS:
            result[part] = statistics.median(row[part] for row in clock.rows[workload.warmup :])
        print(json.dumps(result), flush=True)


def as_markdown(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    worst = max(row["load"] for row in rows)
    about = f"{os.cpu_count()} cores, {args.device}, one thread per process; medians of "
    about += f"{args.repeats} runs each. Before a run others used up to {worst:.0%} of the cores"
    about += ": the machine was busy, so this is no measure of scaling." if worst > 0.1 else "."
    titles = ("workload", "processes", "env steps/s", "scaling", "apart", "collect ms")
    more = ("update ms", "of them reduction ms", "CPU ms")
    lines = [
        "# Weak scaling",
        "",
        about,
        "",
        f"| {' | '.join((*titles, *more))} |",
        "|---" * 9 + "|",
    ]
    for workload in args.workloads:
        alone = None
        for processes in args.processes:
            found = [r for r in rows if (r["workload"], r["processes"]) == (workload, processes)]
            sps = statistics.median(row["sps"] for row in found)
            alone = alone or sps / processes
            parts = [1000 * statistics.median(row[part] for row in found) for part in PARTS]
            scaling = sps / processes / alone
            mark = "" if scaling >= BAR else f" (below {BAR:.0%})"
            independent = statistics.median(row["apart"] for row in found) / processes / alone
            cells = [workload, str(processes), f"{sps:,.0f}", f"{scaling:.0%}{mark}"]
            cells.append(f"{independent:.0%}")
            lines.append(f"| {' | '.join([*cells, *(f'{part:.2f}' for part in parts)])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
