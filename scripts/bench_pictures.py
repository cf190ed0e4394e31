"""Measure the speed-up of compiled updates for a policy with images.

    python scripts/bench_pictures.py                 # configs/ppo_push_cube_pixels.yaml
    python scripts/bench_pictures.py --config sac_push_cube_pixels.yaml --iterations 30
    python scripts/bench_pictures.py --model.max_grad_norm 1.0       # any setting of the run
    python scripts/bench_pictures.py --config sac_push_cube_pixels.yaml --pairs 1 --draws

Runs `--pairs` pairs, eager and compiled, on one thread, with `--iterations` iterations each (SAC
needs more than its random first steps take). The result of a run is the median of
`charts/SPS_update`, env steps per second of updates, over its second half, after compiling. Prints
the ratio of each pair. `--draws` also times drawing a minibatch from a replay of the config's
pictures, next to an update: what prefetching minibatches could hide at most.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import yaml

import lightning_rl
from lightning_rl import ReplayBuffer
from lightning_rl.cli.config_files import find_config
from lightning_rl.envs.tasks import Pictures
from lightning_rl.rollout.contract import allocate_rollout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="ppo_push_cube_pixels.yaml")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--draws", action="store_true")
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
    if args.draws:
        config = yaml.safe_load(Path(find_config(args.config)).read_text())
        model = config["model"]["init_args"]
        update = 1.0 / (max(speeds.values()) * model["updates_per_env_step"])
        draw = seconds_of_a_draw(config["data"]["env"], model["batch_size"], model["n_steps"])
        print(
            f"drawing {model['batch_size']} samples: {1e3 * draw:.1f} ms, {draw / update:.1%} of "
            f"the {1e3 * update:.0f} ms of an update"
        )


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


def seconds_of_a_draw(env: dict, batch_size: int, n_steps: int) -> float:
    """Return the median seconds of drawing a minibatch, from 5,000 steps of a task's pictures."""
    torch.set_num_threads(1)
    task = getattr(lightning_rl, env["class_path"])(
        8, pictures=Pictures(**env["init_args"]["pictures"])
    )
    spaces = task.single_observation_space, task.single_action_space
    replay = ReplayBuffer(*spaces, 8, capacity=5_000)
    rollout = allocate_rollout(*spaces, 8, 624, extra_fields={"continues": ((), torch.bool)})
    rollout["observation"].random_(256)
    replay.extend(rollout)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in replay.batches(16, batch_size, n_steps=n_steps):
            pass
        times.append((time.perf_counter() - started) / 16)
    return float(np.median(times))


def steps_of_an_iteration(args: argparse.Namespace) -> int:
    """Return the env steps of an iteration in the config."""
    data = yaml.safe_load(Path(find_config(args.config)).read_text())["data"]
    return int(data["num_envs"] * data["buffer_size"])


if __name__ == "__main__":
    main()
