"""Measure IQL, AWAC and BehaviorCloning on mixed data of PushCube, and SAC from there.

    python scripts/offline_push_cube.py outputs/offline                # three seeds
    python scripts/offline_push_cube.py outputs/offline --seeds 1 --without online

The dataset has 200 episodes of the task's expert and 800 of a half-trained SAC. A run that is
finished is not repeated. Prints a JSON line for the data and for each seed: returns and successes
of 200 episodes, and the env steps after which SAC first has a success of .95 in an evaluation.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_rl import read_episodes
from lightning_rl.cli.app import run

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RECORD = Path(__file__).with_name("record_demonstrations.py")
EPISODES = {"expert": 200, "half": 800}
HALF_ENV_STEPS = 60_000
ENOUGH = 0.95
EVALUATED = 200
NETWORKS = ("hidden_sizes=[256, 256]", "critic_normalization=layer")
"""The networks of `iql_push_cube.yaml`, for SAC."""

OF_POLICY = ("policy", "learning_rate", "lr_schedule", "batch_size")
"""The settings that behaviour cloning shares with IQL."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--without", nargs="*", default=[], choices=("offline", "online"))
    args = parser.parse_args()
    data = args.folder / "push_cube_mixed"
    print(json.dumps(recorded(args.folder, data)), flush=True)
    for seed in args.seeds:
        found: dict[str, Any] = {"seed": seed}
        if "offline" not in args.without:
            for name, config in offline_configs(args.folder, data).items():
                found[name] = learnt(args.folder / f"{name}_{seed}", config, seed)
        if "online" not in args.without:
            base = args.folder / f"iql_{seed}"
            found |= online(args.folder, seed, base)
        print(json.dumps(found), flush=True)


def recorded(folder: Path, data: Path) -> dict[str, Any]:
    """Record the dataset, unless it is there; return the mean of each part."""
    half = folder / "half"
    if not data.exists():
        fit(half, CONFIGS / "sac_push_cube.yaml", 1, "--data.total_env_steps", str(HALF_ENV_STEPS))
        for part, count in EPISODES.items():
            own = [] if part == "expert" else ["--run", str(half)]
            command = [sys.executable, str(RECORD), str(data), "--task", "PushCube"]
            subprocess.run([*command, "--episodes", str(count), *own], check=True)
    episodes = read_episodes(data)
    returns = np.array([float(episode.reward.sum()) for episode in episodes])
    success = np.array([bool(episode.success) for episode in episodes])
    split = EPISODES["expert"]
    parts = {"data": slice(None), "expert": slice(split), "half": slice(split, None)}
    found = {
        name: {"return": round(returns[part].mean(), 2), "success": success[part].mean()}
        for name, part in parts.items()
    }
    return found | {"env_steps": sum(episodes.lengths)}


def offline_configs(folder: Path, data: Path) -> dict[str, Path]:
    """Write the configs of the three algorithms on the dataset."""
    configs = {
        name: yaml.safe_load((CONFIGS / f"{name}_push_cube.yaml").read_text())
        for name in ("iql", "awac")
    }
    clone = yaml.safe_load((CONFIGS / "iql_push_cube.yaml").read_text())
    shared = {name: clone["model"]["init_args"][name] for name in OF_POLICY}
    clone["model"] = {"class_path": "BehaviorCloning", "init_args": {**shared, "n_epochs": 1}}
    files = {}
    for name, config in {**configs, "clone": clone}.items():
        config["data"]["collector"]["init_args"]["path"] = str(data.absolute())
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump(config))
    return files


def fit(run_dir: Path, config: Path, seed: int, *options: str) -> None:
    """Train in a directory, unless this is done; note the CPU seconds there."""
    if (run_dir / "cpu_seconds").exists():
        return
    begun = time.process_time()
    shown = ["--trainer.run_dir", str(run_dir), "--trainer.enable_progress_bar", "false"]
    run(["fit", "--config", str(config), "--seed_everything", str(seed), *shown, *options])
    (run_dir / "cpu_seconds").write_text(f"{time.process_time() - begun:.1f}")


def learnt(run_dir: Path, config: Path, seed: int) -> dict[str, float]:
    """Train on the dataset; return the last policy's return and success, and the CPU seconds."""
    fit(run_dir, config, seed)
    report = run_dir / "evaluation.json"
    if not report.exists():
        count = ["--data.num_eval_episodes", str(EVALUATED)]
        run(["validate", "--ckpt_path", str(run_dir), *count])
    found = json.loads(report.read_text())
    return {
        "return": round(found["avg_reward"], 2),
        "success": found["success_rate"],
        "cpu_s": float((run_dir / "cpu_seconds").read_text()),
    }


def online(folder: Path, seed: int, base: Path) -> dict[str, Any]:
    """Train SAC from IQL's policy and critics, and from nothing, until a success of .95."""
    found = {}
    stop = {"monitor": "eval/success_rate", "mode": "max", "stopping_threshold": ENOUGH}
    callback = {"class_path": "EarlyStopping", "init_args": {**stop, "patience": 1000}}
    options = ["--trainer.callbacks", json.dumps([callback]), "--data.iterations_per_epoch", "20"]
    options += [f"--model.policy.init_args.{setting}" for setting in NETWORKS]
    start = ["--trainer.init_from", str(base), "--model.random_env_steps", "0"]
    start += ["--model.learning_starts", "5_000"]
    for name, more in {"sac": [], "iql_sac": start}.items():
        run_dir = folder / f"{name}_{seed}"
        fit(run_dir, CONFIGS / "sac_push_cube.yaml", seed, *options, *more)
        found[name] = curve(run_dir) | {"cpu_s": float((run_dir / "cpu_seconds").read_text())}
    return found


def curve(run_dir: Path) -> dict[str, Any]:
    """Return the successes of the evaluations, and the env steps of the first one of .95."""
    with (run_dir / "logs" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("eval/success_rate")]
    points = [(int(float(row["env_steps"])), float(row["eval/success_rate"])) for row in rows]
    enough = [step for step, success in points if success >= ENOUGH]
    return {"first": enough[0] if enough else None, "curve": points}


if __name__ == "__main__":
    main()
