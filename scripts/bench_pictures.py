"""Measure the speed-up of compiled updates for a policy with images.

    python scripts/bench_pictures.py                 # configs/ppo_push_cube_pixels.yaml
    python scripts/bench_pictures.py --config sac_push_cube_pixels.yaml --iterations 30
    python scripts/bench_pictures.py --model.max_grad_norm 1.0       # any setting of the run

Runs `--pairs` pairs, eager and compiled, on one thread, with `--iterations` iterations each (SAC
needs more than its random first steps take). The result of a run is the median of
`charts/SPS_update`, env steps per second of updates, over its second half, after compiling. Prints
the ratio of each pair.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml

from lightning_rl.cli.config_files import find_config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="ppo_push_cube_pixels.yaml")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    args, settings = parser.parse_known_args()
    ratios = []
    for pair in range(args.pairs):
        # Pairs alternate in order, because the machine's speed may change.
        speeds = dict.fromkeys(((False, True), (True, False))[pair % 2], 0.0)
        for compiled in speeds:
            speeds[compiled] = updates_per_second(args, settings, compiled)
        ratios.append(speeds[True] / speeds[False])
        print(
            f"pair {pair + 1}: eager {speeds[False]:,.0f}, compiled {speeds[True]:,.0f} env steps "
            f"per second of updates, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"compiled is {np.median(ratios):.2f} times as fast as eager (median)")


def updates_per_second(args: argparse.Namespace, settings: list[str], compiled: bool) -> float:
    """Return the median env steps per second of updates, over a run's second half."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "lightning_rl", "fit", "--config", args.config, *settings]
        command += ["--model.compile", str(compiled).lower(), "--output_dir", scratch]
        command += ["--data.num_eval_episodes", "1", "--data.iterations_per_epoch", "1000"]
        command += ["--data.total_env_steps", str(args.iterations * steps_of_an_iteration(args))]
        command += ["--trainer.num_threads", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(scratch).glob("*/logs/metrics.csv")
        with metrics.open() as file:
            speeds = [row["charts/SPS_update"] for row in csv.DictReader(file)]
    each = [float(speed) for speed in speeds if speed]
    return float(np.median(each[len(each) // 2 :]))


def steps_of_an_iteration(args: argparse.Namespace) -> int:
    """Return the env steps of an iteration in the config."""
    data = yaml.safe_load(Path(find_config(args.config)).read_text())["data"]
    return int(data["num_envs"] * data["buffer_size"])


if __name__ == "__main__":
    main()
