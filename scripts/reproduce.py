"""Train one config with several seeds, evaluate the final policies.

And append one JSON line per seed to a file.

Reports, per seed, the mean return of the last 100 training episodes (stochastic policy) and of the
deterministic evaluation of the last checkpoint; and over the seeds the mean with its 95 % interval
(Student's t).

    python scripts/reproduce.py --config ppo.yaml --seeds 1 2 3 4 5
    python scripts/reproduce.py --warm_start vla_bc.yaml --config vla_ppo.yaml --seeds 1 2 3

With `--warm_start` each seed is trained by that config first, and goes on from there.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch

STUDENT_T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""97.5 % quantile of Student's t for a number of seeds."""


def rl_cli(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "lightning_rl", *arguments], check=True, stdout=subprocess.DEVNULL
    )


def train(
    config: str, seed: int, overrides: list[str], output_dir: Path, episodes: int
) -> tuple[dict, Path]:
    """Train and evaluate; return what came of it, and the run directory."""
    name = f"{Path(config).stem}_seed{seed}"
    where = ["--exp_name", name, "--output_dir", str(output_dir)]
    start = time.perf_counter()
    rl_cli("fit", "--config", config, "--seed_everything", str(seed), *where, *overrides)
    seconds = time.perf_counter() - start
    run_dir = max(output_dir.glob(f"{name}_2*"), key=lambda path: path.stat().st_mtime)
    rl_cli("validate", "--ckpt_path", str(run_dir), "--data.num_eval_episodes", str(episodes))
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    statistics = checkpoint["RLDataModule"]["collectors"][0]["statistics"]
    row = {
        "config": Path(config).name,
        "overrides": overrides,
        "seed": seed,
        "env_steps": evaluation["env_steps"],
        "train_return_last_100": mean(statistics["returns"]),
        "train_length_last_100": mean(statistics["lengths"]),
        "eval_return": evaluation["avg_reward"],
        "eval_length": evaluation["avg_length"],
        "eval_success": evaluation["success_rate"],
        "seconds": round(seconds, 1),
        "gymnasium": gymnasium.__version__,
        "torch": torch.__version__,
    }
    return row, run_dir


def mean(values: list[float]) -> float | None:
    """Return the average; None where nothing was played, as when demonstrations are cloned."""
    return float(np.mean(values)) if values else None


def interval(values: list[float]) -> str:
    if len(values) not in STUDENT_T_975:
        return f"{np.mean(values):.3g}"
    half = STUDENT_T_975[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.4g} ± {half:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="ppo.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--episodes", type=int, default=20, help="of the final evaluation")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/reproduce"))
    parser.add_argument("--results", type=Path, default=Path("outputs/reproduce/results.jsonl"))
    parser.add_argument("--warm_start", metavar="CONFIG", help="trained first, with its defaults")
    args, overrides = parser.parse_known_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)

    def run(config: str, seed: int, settings: list[str]) -> tuple[dict, Path]:
        row, run_dir = train(config, seed, settings, args.output_dir, args.episodes)
        print(json.dumps(row), flush=True)
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row, run_dir

    rows = []
    for seed in args.seeds:
        start = []
        if args.warm_start:
            start = ["--trainer.init_from", str(run(args.warm_start, seed, [])[1])]
        rows.append(run(args.config, seed, [*start, *overrides])[0])
    for key in ("train_return_last_100", "eval_return", "eval_length", "eval_success", "seconds"):
        if rows[0][key] is None:
            continue
        print(f"{args.config} {' '.join(overrides)} {key}: {interval([row[key] for row in rows])}")


if __name__ == "__main__":
    main()
