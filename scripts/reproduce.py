r"""Train one config with several seeds, and evaluate the final policies.

Appends one JSON line per seed to a file: the mean return of the last 100 training episodes
(stochastic policy) and of the deterministic evaluation of the last checkpoint, the mean `--metric`
of the last three evaluations during training, and the wall-clock and CPU seconds of training.
Prints the mean over the seeds with its 95 % interval (Student's t).

    python scripts/reproduce.py --config ppo.yaml --seeds 1 2 3 4 5 --jobs 2
    python scripts/reproduce.py --warm_start vla_bc.yaml --config vla_ppo.yaml --seeds 1 2 3
    python scripts/reproduce.py --config ppo_push_cube.yaml --metric eval/success_rate \
        --curves scripts/results/curves/tasks.json

The seeds are a sweep (`rl-cli sweep`), which continues the killed sweep of the same command. With
`--warm_start`, each seed first trains that config and continues from it, in its own sweep, because
each begins with another checkpoint; `--warm_as` names the setting that gets the checkpoint.
`--curves` also keeps the evaluations during training for `rl-cli report` (see curves.py).
"""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import torch

from curves import keep
from lightning_rl.extensions.reports.runs import read_run
from scripting import parser_of

STUDENT_T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""97.5 % quantile of Student's t for a number of seeds."""

MEASURED = ("train_return_last_100", "eval_last_three", "eval_return", "eval_length")
MEASURED += ("eval_success", "seconds", "cpu_seconds")


def rl_cli(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "lightning_rl", *arguments], check=True, stdout=subprocess.DEVNULL
    )


def train(
    config: str, seeds: list[int], overrides: list[str], args: argparse.Namespace
) -> list[tuple[dict, Path]]:
    """Train and evaluate; return the results of each seed, and the run directories."""
    settings = ["--config", config, *overrides, "--sweep.seeds", json.dumps(seeds)]
    # Named after its settings, so that the same command finds its sweep again.
    name = f"{Path(config).stem}_{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]}"
    found = sorted(args.output_dir.glob(f"{name}_sweep_*/sweep.yaml"))
    begun = ["--resume", str(found[-1].parent)] if found else [*settings, "--exp_name", name]
    jobs = [] if args.jobs is None else ["--sweep.jobs", str(args.jobs)]
    rl_cli("sweep", *begun, *jobs, "--output_dir", str(args.output_dir))
    sweep = max(args.output_dir.glob(f"{name}_sweep_*/sweep.yaml")).parent
    runs = sorted(path.parent for path in sweep.glob("trial_*_2*/run.json"))
    return [evaluated(config, overrides, run_dir, args) for run_dir in runs]


def evaluated(
    config: str, overrides: list[str], run_dir: Path, args: argparse.Namespace
) -> tuple[dict, Path]:
    """Evaluate the last policy of a trial; return its results and its run directory."""
    written = json.loads((run_dir / "run.json").read_text())
    episodes = ("--data.num_eval_episodes", str(args.episodes))
    rl_cli("test", "--ckpt_path", str(run_dir), *episodes)
    evaluation = json.loads((run_dir / "test.json").read_text())
    seconds = [part["seconds"] for part in (written, *written["earlier"])]
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    statistics = checkpoint["RLDataModule"]["collectors"][0]["statistics"]
    row = {
        "config": Path(config).name,
        "overrides": overrides,
        "seed": written["seed"],
        "env_steps": evaluation["env_steps"],
        "train_return_last_100": mean(statistics["returns"]),
        "train_length_last_100": mean(statistics["lengths"]),
        "eval_last_three": mean(read_run(run_dir, [args.metric]).curve(args.metric)[2][-3:]),
        "eval_return": evaluation["avg_reward"],
        "eval_length": evaluation["avg_length"],
        "eval_success": evaluation["success_rate"],
        "seconds": sum(part["total"] for part in seconds),
        "cpu_seconds": sum(part["cpu"] or 0.0 for part in seconds),
        "gymnasium": gymnasium.__version__,
        "torch": torch.__version__,
    }
    return row, run_dir


def mean(values: list[float] | np.ndarray) -> float | None:
    """Return the average; None without episodes, as in cloning."""
    return float(np.mean(values)) if len(values) else None


def interval(values: list[float]) -> str:
    if len(values) not in STUDENT_T_975:
        return f"{np.mean(values):.3g}"
    half = STUDENT_T_975[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.4g} ± {half:.2g}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--config", default="ppo.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--episodes", type=int, default=20, help="of the final evaluation")
    parser.add_argument("--jobs", type=int, help="seeds at a time; as the cores allow")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/reproduce"))
    parser.add_argument("--warm_start", metavar="CONFIG", help="trained first, with its defaults")
    parser.add_argument("--warm_as", default="trainer.init_from", help="setting of its checkpoint")
    parser.add_argument("--curves", type=Path, help="file that keeps the curves")
    parser.add_argument("--metric", default="eval/avg_reward", help="of the curves")
    parser.add_argument("--name", help="of the curves; the config if not given")
    parser.add_argument("--env", help="name of the env of the curves")
    args, overrides = parser.parse_known_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)

    def run(config: str, seeds: list[int], settings: list[str]) -> list[tuple[dict, Path]]:
        done = train(config, seeds, settings, args)
        with (args.output_dir / "results.jsonl").open("a") as file:
            for row, _ in done:
                print(json.dumps(row), flush=True)
                file.write(json.dumps(row) + "\n")
        if args.curves and config == args.config:
            runs, name = [run_dir for _, run_dir in done], args.name or config
            keep(args.curves, runs, name, args.metric, args.env)
        return done

    if args.warm_start:
        rows = []
        for seed in args.seeds:
            ((_, clone),) = run(args.warm_start, [seed], [])
            rows += run(args.config, [seed], [f"--{args.warm_as}", str(clone), *overrides])
    else:
        rows = run(args.config, args.seeds, overrides)
    rows = [row for row, _ in rows]
    for key in MEASURED:
        if rows[0][key] is not None:
            numbers = interval([row[key] for row in rows])
            print(f"{args.config} {' '.join(overrides)} {key}: {numbers}")


if __name__ == "__main__":
    main()
