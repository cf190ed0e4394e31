"""Measure the cost of filming every evaluation.

Trains a config with and without films, alternately, each in its own process. Compares the seconds
of `run.json`, and the processor time, which other load does not change. Both include start-up, the
encoding thread and the packages of the extra. `--check` fails if films cost 10 % or more.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def measure(config: str, steps: int, *, video: bool) -> dict[str, float]:
    """Train; return the seconds, the processor seconds, and the number of films."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--data.total_env_steps", str(steps), "--trainer.video", str(video).lower()]
        command = [sys.executable, "-m", "lightning_rl", "fit", "--config", config, *options]
        before = os.times()
        subprocess.run([*command, "--output_dir", directory], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        run_dir = next(Path(directory).iterdir())
        return {
            "wall": json.loads((run_dir / "run.json").read_text())["seconds"]["total"],
            "processor": after.children_user
            + after.children_system
            - before.children_user
            - before.children_system,
            "films": len(list(run_dir.glob("videos/eval_*.mp4"))),
        }


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="ppo.yaml")
    parser.add_argument("--steps", type=int, default=500_000, help="env steps of a run")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    pairs = []
    for pair in range(args.pairs):
        order = (False, True) if pair % 2 == 0 else (True, False)
        found = {video: measure(args.config, args.steps, video=video) for video in order}
        pairs.append({key: found[True][key] / found[False][key] for key in ("wall", "processor")})
        print(f"without {found[False]}, with {found[True]}: {pairs[-1]}", flush=True)
    medians = {key: statistics.median(pair[key] for pair in pairs) for key in pairs[0]}
    print(f"median ratios {medians}")
    if args.check and min(medians.values()) >= 1.1:
        sys.exit(1)


if __name__ == "__main__":
    main()
