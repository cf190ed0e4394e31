"""Measure residual SAC on a half-good clone of PushCube.

    python scripts/residual_push_cube.py --seeds 1 2 3

Clones the expert (configs/push_cube_bc.yaml), trains configs/sac_residual_push_cube.yaml on the
clone, and the same SAC without a base. Prints the success of each over 1,000 episodes, and the CPU
seconds of each training run, evaluations included. Options of `rl-cli` for the runs of SAC follow.
"""

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

from lightning_rl import PushCube
from lightning_rl.checkpoints.loading import load_trained
from lightning_rl.cli.app import run
from lightning_rl.collectors.evaluation import run_episodes

EPISODES = 1_000
SCRATCH = {
    "class_path": "SquashedActorCritic",
    "init_args": {
        "hidden_sizes": [128, 128],
        "critic_normalization": "layer",
        "normalize_observation": True,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--scratch", action="store_true", help="also SAC without a base")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    args, options = parser.parse_known_args()
    for seed in args.seeds:
        clone = trained("push_cube_bc.yaml", seed, args.output_dir)
        found = {"clone": clone}
        base = ["--model.policy.checkpoint", clone["run"]]
        residual = "sac_residual_push_cube.yaml", seed, args.output_dir
        found["residual"] = trained(*residual, *base, *options)
        if args.scratch:
            found["scratch"] = trained(*residual, "--model.policy", json.dumps(SCRATCH), *options)
        print(json.dumps({"seed": seed} | found), flush=True)


def trained(config: str, seed: int, output_dir: Path, *options: str) -> dict[str, Any]:
    """Train by a shipped config; return success, CPU seconds, and the evaluations of the run."""
    run_dir, begun = output_dir / f"{Path(config).stem}_{time.monotonic_ns()}", time.process_time()
    fixed = ["--seed_everything", str(seed), "--trainer.run_dir", str(run_dir)]
    run(["fit", "--config", config, *fixed, *options])
    seconds = time.process_time() - begun
    policy = load_trained(run_dir).policy
    seeds = range(1_000_000, 1_000_000 + EPISODES)
    played = run_episodes(policy, PushCube(EPISODES), seeds, deterministic=True)
    success = sum(bool(one["success"]) for one in played) / EPISODES
    return {"success": success, "seconds": round(seconds), "run": str(run_dir), **curve(run_dir)}


def curve(run_dir: Path) -> dict[str, list[float]]:
    """Return the success of the evaluations during a run."""
    with (run_dir / "logs" / "metrics.csv").open() as file:
        rows = [row.get("eval/success_rate") for row in csv.DictReader(file)]
    return {"evaluations": [float(one) for one in rows if one]}


if __name__ == "__main__":
    main()
