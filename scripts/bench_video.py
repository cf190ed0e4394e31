"""Measure how much slower training is with a film of every evaluation.

Trains a config with and without, in turns, each in a process of its own, and compares the seconds
of `run.json`. `--check` fails where films cost 10 % or more.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def seconds(config: str, steps: int, *, video: bool) -> tuple[float, int]:
    """Train, and return how long it took and how many films there are."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--data.total_env_steps", str(steps), "--trainer.video", str(video).lower()]
        command = [sys.executable, "-m", "lightning_rl", "fit", "--config", config, *options]
        subprocess.run([*command, "--output_dir", directory], check=True, stdout=subprocess.DEVNULL)
        run_dir = next(Path(directory).iterdir())
        took = json.loads((run_dir / "run.json").read_text())["seconds"]["total"]
        return took, len(list(run_dir.glob("videos/eval_*.mp4")))


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="ppo.yaml")
    parser.add_argument("--steps", type=int, default=500_000, help="env steps of a run")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    ratios = []
    for pair in range(args.pairs):
        order = (False, True) if pair % 2 == 0 else (True, False)
        found = {video: seconds(args.config, args.steps, video=video) for video in order}
        (without, _), (with_films, films) = found[False], found[True]
        ratios.append(with_films / without)
        print(
            f"without {without:.2f} s, with {with_films:.2f} s ({films} films): {ratios[-1]:.3f}",
            flush=True,
        )
    median = statistics.median(ratios)
    print(f"median ratio {median:.3f}")
    if args.check and median >= 1.1:
        sys.exit(1)


if __name__ == "__main__":
    main()
