"""Measure the speed-up of a sweep with several trials at a time.

Runs the same twelve short trials one at a time and then several at a time, each pinned to its own
cores. Prints the ratio of the wall times, and the machine's load before either: with other load on
these cores the ratio means nothing.

    python scripts/bench_sweep.py
    python scripts/bench_sweep.py --jobs 4 --total_env_steps 200000
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--total_env_steps", type=int, default=50_000)
    args = parser.parse_args()
    one, several = (wall_clock(jobs, args.trials, args.total_env_steps) for jobs in (1, args.jobs))
    print(f"{args.jobs} at a time take {several / one:.2f} of one at a time")


def wall_clock(jobs: int, trials: int, total_env_steps: int) -> float:
    """Return the seconds of a sweep, with its start."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "lightning_rl", "sweep", "--config", "ppo.yaml"]
        command += ["--sweep.seeds", str(trials), "--sweep.jobs", str(jobs)]
        command += ["--data.total_env_steps", str(total_env_steps), "--output_dir", output]
        load = os.getloadavg()[0]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
    print(f"{jobs} at a time: {seconds:.1f} s (load before: {load:.1f})", flush=True)
    return seconds


if __name__ == "__main__":
    main()
