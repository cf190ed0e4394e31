"""Train `sac_fetch_push.yaml` on some seeds, and print the success of each.

    export MUJOCO_GL=egl
    python scripts/fetch_push.py fetch_push --seeds 1 2 3
    python scripts/fetch_push.py fetch_push --seeds 1 --data.total_env_steps 100_000

The same command continues a killed one: each seed has a run directory, and resumes from its last
checkpoint. Options of `rl-cli fit` follow its own. Needs the environment of
constraints-robots.txt.
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--config", default="sac_fetch_push.yaml")
    arguments, options = parser.parse_known_args()
    for seed in arguments.seeds:
        run_dir = arguments.directory / f"seed_{seed}"
        train(run_dir, arguments.config, seed, options)
        with next(run_dir.rglob("metrics.csv")).open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("eval/success_rate")]
        shown = [f"{int(r['env_steps']):,}: {float(r['eval/success_rate']):.2f}" for r in rows]
        print(f"seed {seed}: {', '.join(shown)}", flush=True)


def train(run_dir: Path, config: str, seed: int, options: list[str]) -> None:
    """Train one seed in a directory, or continue there."""
    begun = (run_dir / "checkpoints" / "last.ckpt").exists()
    if begun:
        own = ["--ckpt_path", str(run_dir), "--trust_code", "true"]
    else:
        own = [
            "--config",
            config,
            "--seed_everything",
            str(seed),
            "--trainer.run_dir",
            str(run_dir),
        ]
    command = [sys.executable, "-m", "lightning_rl", "fit", *own, *options]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
