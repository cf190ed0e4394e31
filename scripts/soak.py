"""Train for a long time, and watch memory and speed.

    python scripts/soak.py --check
    python scripts/soak.py --total-env-steps 200_000
    python scripts/soak.py --background --total-env-steps 40_000_000     # twenty minutes and more

Trains CartPole-v1 with the settings of `configs/ppo.yaml` by the public Python API, with loggers,
evaluations and checkpoints. About every 100,000 env steps it records: env steps, SPS (env steps
per second of wall time since the last record, with evaluations and checkpoints), the same per
second of CPU time, which other load disturbs less, and resident memory. `soak.json` is written at
each record, so that a crash loses little.

The warm-up is the first million env steps, or the first tenth of a run shorter than ten million.
The verdict has two numbers: the slope of resident memory after the warm-up (least squares, MB per
million env steps), and the SPS at the end over the SPS right after the warm-up, each over a stretch
as long as the warm-up.

Exit status 1 with `--check` if memory grows by more than 1 MB per million env steps or SPS falls
below 0.9 of its early value. A run stopped by a signal reports, and ends with status 2.
"""

import json
import os
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_rl import (
    PPO,
    ActorCritic,
    AsyncCollector,
    Collector,
    GymnasiumEnv,
    RLDataModule,
    RLTrainer,
    SyncCollector,
)
from scripting import parser_of, table

CONFIG = Path(__file__).parents[1] / "configs" / "ppo.yaml"
OUTPUT = Path("soak.json")
MAX_GROWTH = 1.0
"""MB of resident memory per million env steps that `--check` allows."""
MIN_SPEED = 0.9
"""Share of the early SPS that `--check` requires at the end."""

Record = dict[str, float]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--total-env-steps", type=int, default=10_000_000)
    parser.add_argument("--background", action="store_true", help="collect by an AsyncCollector")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail above {MAX_GROWTH:g} MB per million steps or below {MIN_SPEED:g} of the SPS",
    )
    args = parser.parse_args()
    recorder = Recorder(args.total_env_steps)
    stopped = train(AsyncCollector if args.background else SyncCollector, recorder)
    result = verdict(recorder.records, args.total_env_steps)
    recorder.write(result | {"stop_signal": stopped})
    columns = {
        "env_steps": ("env steps", ",.0f"),
        "sps": ("SPS", ",.0f"),
        "sps_cpu": ("SPS, CPU time", ",.0f"),
        "rss_mb": ("RSS MB", ".1f"),
    }
    shown = np.unique(np.linspace(0, len(recorder.records) - 1, 10).round().astype(int))
    rows = (
        [format(recorder.records[i][key], form) for key, (_, form) in columns.items()]
        for i in (shown if recorder.records else ())
    )
    print(*table([title for title, _ in columns.values()], rows), "", as_text(result), sep="\n")
    print(f"Written to {OUTPUT}")
    if stopped is not None:
        return 2
    return int(args.check and not result["passed"])


def train(collector: type[Collector], recorder: "Recorder") -> int | None:
    """Train as in the config, and return the signal that stopped the run, or None."""
    config = yaml.safe_load(CONFIG.read_text())
    seed_everything(config["seed_everything"], verbose=False)
    env = config["data"].pop("env")["init_args"]
    changed = {"total_env_steps": recorder.total_env_steps, "collector": collector}
    data = RLDataModule(partial(GymnasiumEnv, **env), **config["data"] | changed)
    settings = config["model"]["init_args"]
    network = settings.pop("policy")["init_args"]
    policy = ActorCritic(data.observation_space, data.action_space, **network)
    trainer = RLTrainer(exp_name="soak", callbacks=[recorder], **config["trainer"])
    trainer.fit(PPO(policy, **settings), data)
    return trainer.stop_signal


class Recorder(Callback):
    """Record the resources of the process, every 100,000 env steps or twenty times a run."""

    def __init__(self, total_env_steps: int) -> None:
        self.total_env_steps = total_env_steps
        self.every = min(100_000, max(1, total_env_steps // 20))
        self.records: list[Record] = []
        self.last = (0, 0.0, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last = (0, time.perf_counter(), time.process_time())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if pl_module.env_steps - self.last[0] >= self.every:
            self.record(pl_module.env_steps)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A short last stretch is only noise.
        if not self.records or pl_module.env_steps - self.last[0] >= self.every / 2:
            self.record(pl_module.env_steps)

    def record(self, env_steps: int) -> None:
        now = (env_steps, time.perf_counter(), time.process_time())
        steps, wall, cpu = (b - a for a, b in zip(self.last, now, strict=True))
        self.last = now
        self.records.append(
            {
                "env_steps": env_steps,
                "steps": steps,
                "sps": steps / wall,
                "sps_cpu": steps / cpu,
                "rss_mb": resident_mb(),
            }
        )
        self.write()

    def write(self, result: dict[str, Any] | None = None) -> None:
        about = {"config": CONFIG.name, "total_env_steps": self.total_env_steps}
        about |= {"python": platform.python_version(), "torch": torch.__version__}
        content = about | {"verdict": result, "records": self.records}
        OUTPUT.write_text(json.dumps(content, indent=2))


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def verdict(records: list[Record], total_env_steps: int) -> dict[str, Any]:
    """Judge the growth of memory and the loss of speed after the warm-up."""
    warmup = min(1_000_000, total_env_steps // 10)
    later = [r for r in records if r["env_steps"] > warmup]
    if len(later) < 3:
        return {"passed": False, "reason": "too few records after the warm-up"}
    steps = np.array([r["env_steps"] for r in later]) / 1e6
    slope = float(np.polyfit(steps, [r["rss_mb"] for r in later], 1)[0])
    end = later[-1]["env_steps"]
    early = [r for r in later if r["env_steps"] <= 2 * warmup] or later[:1]
    late = [r for r in later if r["env_steps"] > end - warmup]
    ratios = {key: speed(late, key) / speed(early, key) for key in ("sps", "sps_cpu")}
    return {
        "warmup_env_steps": warmup,
        "rss_mb_per_million_steps": slope,
        "sps_ratio": ratios["sps"],
        "sps_cpu_ratio": ratios["sps_cpu"],
        "passed": slope <= MAX_GROWTH and ratios["sps"] >= MIN_SPEED,
    }


def speed(records: list[Record], key: str) -> float:
    """Return the env steps of some stretches divided by their seconds."""
    return sum(r["steps"] for r in records) / sum(r["steps"] / r[key] for r in records)


def as_text(result: dict[str, Any]) -> str:
    outcome = "passed" if result["passed"] else "FAILED"
    if "reason" in result:
        return f"{outcome}: {result['reason']}."
    short = result["warmup_env_steps"] < 300_000
    caution = " The run is too short for these limits to mean much." if short else ""
    return (
        f"{outcome}: resident memory {result['rss_mb_per_million_steps']:+.3f} MB per million env "
        f"steps (limit {MAX_GROWTH:g}); SPS at the end / after the warm-up "
        f"{result['sps_ratio']:.3f} (limit {MIN_SPEED:g}), by CPU time "
        f"{result['sps_cpu_ratio']:.3f}.{caution}"
    )


if __name__ == "__main__":
    sys.exit(main())
