r"""Train SAC on some envs and seeds, with one config or several, and keep the curves.

    python scripts/sac_curves.py --ids HalfCheetah-v5 Hopper-v5 --seeds 1 2 3
    python scripts/sac_curves.py --configs sac.yaml sac_best.yaml
    python scripts/sac_curves.py --configs sac_best.yaml --label perceptrons \
        --model.policy.init_args.network perceptron             # one part less
    python scripts/sac_curves.py --total_env_steps 1_000_000    # goes on from what was reached

All runs have 5,000 random first env steps, and 10 deterministic evaluation episodes every 10,000
env steps. Other options, such as `--model.tau 0.01`, are settings of our runs, and `--label` names
these. A stopped run of ours, or one with fewer env steps than requested, continues from its last
checkpoint with its replay, bit for bit. A run of Stable-Baselines3 (`--peer`, an interpreter that
has it) uses the settings of `configs/sac.yaml`; it is skipped if the file of curves already holds
that many env steps.

The script does not use `rl-cli sweep`: a sweep has one budget, but these runs continue to larger
ones, alternately with the runs of the peer.

Writes the file of `--curves`, which `rl-cli report` draws (see curves.py), and prints a table, with
the CPU seconds, including evaluations, of our runs in `--output_dir`.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from curves import written

HERE = Path(__file__).resolve().parent
PEER = "Stable-Baselines3, SAC"
BUFFER_SIZE = 16
"""Env steps of an iteration, in configs/sac.yaml and its variants."""
Curves = dict[str, dict[str, dict[str, list[list[float]]]]]


def main() -> None:
    args = arguments()
    kept_in = {"metric": "eval/avg_reward", "curves": {}}
    if args.curves.exists():
        kept_in = json.loads(args.curves.read_text())
    curves: Curves = kept_in["curves"]
    for seed in args.seeds:
        for env_id in args.ids:
            runs: list[tuple[str, Any]] = [
                (library_of(config, args.label), partial(ours, config)) for config in args.configs
            ]
            runs += [(PEER, peer)] if args.peer else []
            for library, train in runs:
                kept = curves.setdefault(library, {}).setdefault(env_id, {})
                if reached(kept.get(str(seed), [])) < args.total_env_steps:
                    kept[str(seed)] = train(env_id, seed, args)
                    args.curves.parent.mkdir(parents=True, exist_ok=True)
                    args.curves.write_text(written(kept_in))
                    print(library, env_id, seed, kept[str(seed)][-1], flush=True)
    print(table(curves, args))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", default=["sac.yaml"])
    parser.add_argument("--label", default="", help="of runs with settings of their own")
    parser.add_argument("--ids", nargs="+", default=["HalfCheetah-v5", "Hopper-v5"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--total_env_steps", type=int, default=100_000)
    parser.add_argument("--random_env_steps", type=int, default=5_000)
    parser.add_argument("--evaluate_every", type=int, default=10_000, help="env steps")
    parser.add_argument("--peer", help="an interpreter that has stable-baselines3")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/sac_curves"))
    parser.add_argument("--curves", type=Path, default=HERE / "results/curves/off_policy.json")
    args, settings = parser.parse_known_args()
    if settings and not args.label:
        parser.error(f"--label names runs with settings of their own: {' '.join(settings)}")
    args.settings = settings
    return args


def library_of(config: str, label: str) -> str:
    """Return the name of a config's curves."""
    return ", ".join(filter(None, (Path(config).name, label)))


def run_name(config: str, env_id: str, seed: int | str, label: str) -> str:
    return "_".join(
        filter(None, (Path(config).stem, label.replace(" ", "_"), env_id, f"seed{seed}"))
    )


def ours(config: str, env_id: str, seed: int, args: argparse.Namespace) -> list[list[float]]:
    """Train, or continue, by the command line; return the points of the run's evaluations."""
    name = run_name(config, env_id, seed, args.label)
    found = sorted(args.output_dir.glob(f"{name}_2*/checkpoints/last.ckpt"))
    command = [sys.executable, "-m", "lightning_rl", "fit"]
    if found:
        command += ["--ckpt_path", str(found[-1])]
    else:
        command += ["--config", config, "--seed_everything", str(seed), *args.settings]
        command += ["--exp_name", name, "--output_dir", str(args.output_dir)]
        command += ["--data.env.id", env_id, "--trainer.num_threads", "1"]
        command += ["--data.iterations_per_epoch", str(args.evaluate_every // BUFFER_SIZE)]
        command += ["--model.random_env_steps", str(args.random_env_steps)]
    command += ["--data.total_env_steps", str(args.total_env_steps)]  # the last option counts
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    points = {}
    for numbers in sorted(args.output_dir.glob(f"{name}_2*/logs/metrics.csv")):
        with numbers.open() as file:
            for row in csv.DictReader(file):
                if row.get("eval/avg_reward"):
                    points[int(float(row["env_steps"]))] = float(row["eval/avg_reward"])
    return [[step, round(value, 2)] for step, value in sorted(points.items())]


def peer(env_id: str, seed: int, args: argparse.Namespace) -> list[list[float]]:
    """Train Stable-Baselines3; return the points of its evaluations."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "curve.jsonl")
        command = [args.peer, str(HERE / "reference_sb3.py"), "--algorithm", "sac"]
        for option in ("total_env_steps", "random_env_steps", "evaluate_every"):
            command += [f"--{option}", str(getattr(args, option))]
        command += ["--id", env_id, "--seed", str(seed), "--output", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=scratch)
        curve: list[list[float]] = json.loads(output.read_text())["curve"]
        return curve


def reached(curve: list[list[float]]) -> float:
    """Return the env steps of a curve's last point."""
    return curve[-1][0] if curve else 0


def cpu_seconds(library: str, env_id: str, args: argparse.Namespace) -> str:
    """Return the average CPU seconds of 1,000 env steps in the runs here; "-" without runs."""
    of_config = {library_of(config, args.label): config for config in args.configs}
    if library not in of_config:
        return "-"
    name = run_name(of_config[library], env_id, "*", args.label)
    each = []
    for run in args.output_dir.glob(f"{name}_2*/run.json"):
        written = json.loads(run.read_text())
        cpu = [part["seconds"]["cpu"] for part in (written, *written["earlier"])]
        if None not in cpu:  # None: the run continues
            each.append(1_000 * sum(cpu) / written["env_steps"])
    return f"{np.mean(each):.2f}" if each else "-"


def table(curves: Curves, args: argparse.Namespace) -> str:
    """Return a line per env and library: the returns of each seed at the budget, and their mean.

    Each return is the mean of the last three evaluations, which is less noisy than one.
    """
    lines = [
        "| env | library | by seed | mean | CPU s per 1,000 env steps |",
        "|---|---|---|---|---|",
    ]
    for env_id in args.ids:
        for library, envs in curves.items():
            seeds = {
                seed: np.mean([value for at, value in curve if at <= args.total_env_steps][-3:])
                for seed, curve in envs.get(env_id, {}).items()
                if reached(curve) >= args.total_env_steps
            }
            if seeds:
                each = ", ".join(f"{seeds[seed]:,.0f}" for seed in sorted(seeds))
                mean = np.mean(list(seeds.values()))
                cpu = cpu_seconds(library, env_id, args)
                lines.append(f"| {env_id} | {library} | {each} | {mean:,.0f} | {cpu} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
