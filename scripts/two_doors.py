"""Measure flow policies on TwoDoors: the clone, PPO by Flow-SDE, and steering the noise.

    python scripts/two_doors.py --seeds 1 2 3

Prints success over 4,000 starts, and the CPU seconds of each training run, evaluation included. The
clone and PPO act by the ODE from drawn noise, the steered policies by the mean of their noise, the
Gaussian by its mode.
"""

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from lightning_rl import ActionChunk
from lightning_rl.cli.app import run
from lightning_rl.deploy.loading import load_trained
from lightning_rl.extensions.tasks.probes import TwoDoors
from scripting import parser_of

STARTS = 4_000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for seed in args.seeds:
            print(json.dumps({"seed": seed} | measured(seed)), flush=True)


def measured(seed: int) -> dict[str, Any]:
    """Return success and CPU seconds of each run of one seed, in the working directory."""
    clone, seconds = trained("two_doors_bc.yaml", seed)
    rows = {"clone": {"success": success(clone), "seconds": seconds}}
    base = ("--model.policy.checkpoint", str(clone))
    for name, config, *options in (
        ("Gaussian clone", "two_doors_bc.yaml", "--model.policy.head", "gaussian"),
        ("PPO", "two_doors_ppo.yaml", "--trainer.init_from", str(clone)),
        ("steered by PPO", "two_doors_noise.yaml", *base),
        ("steered by NoiseSAC", "sac_two_doors_noise.yaml", *base),
    ):
        run_dir, seconds = trained(config, seed, *options)
        rows[name] = {"success": success(run_dir), "seconds": seconds}
    return rows


def trained(config: str, seed: int, *options: str) -> tuple[Path, float]:
    """Train by a shipped config; return the run directory and its CPU seconds."""
    name, begun = f"run{time.monotonic_ns()}", time.process_time()
    few = ["--data.num_eval_episodes", "1", "--model.compile", "false", "--exp_name", name]
    run(["fit", "--config", config, "--seed_everything", str(seed), *few, *options])
    (place,) = Path("outputs").glob(f"{name}_*")
    return place, round(time.process_time() - begun, 1)


def success(place: Path) -> float:
    """Return the success of the policy of a run."""
    policy = load_trained(place).policy
    env = partial(ActionChunk, env=TwoDoors, chunk_size=TwoDoors.length)(STARTS)
    td = TensorDict({"observation": env.reset(seed=1_000_000)[0]}, [STARTS])
    if getattr(policy, "noise_size", 0):
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(STARTS, policy.noise_size, generator=generator)
        with torch.no_grad():
            action = policy.decode(policy.features(td), noise)
    else:
        action = policy.get_action(td, deterministic=True)["action"]
    return float(env.step(action)[4]["success"].float().mean())


if __name__ == "__main__":
    main()
