"""Measure the cost of learning from stale rollouts, and compare corrections.

    python scripts/staleness_sweep.py
    python scripts/staleness_sweep.py --seeds 1 2 3 --env-steps 60_000

Trains Pendulum-v1 by PPO for each max_staleness and each `off_policy_correction`, for equal numbers
of env steps, and compares the average return of 50 deterministic evaluation episodes at the end.
With max_staleness 0 no rollout is stale, and one column stands for all corrections.

A collector on a fast machine may never lag, so the lag is forced: before each update the learner
waits until the collector has filled all allowed rollouts (`Lagging`). Except for the first few,
every rollout is trained on exactly max_staleness updates after its weights were published, at any
speed of the machine, and a run is reproducible.

The table and the picture (needs matplotlib) give the mean over the seeds and its 95 % interval, by
Student's t. Results are written after each run.
"""

import argparse
import json
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, seed_everything
from tensordict import TensorDict

from lightning_rl import PPO, ActorCritic, AsyncCollector, GymnasiumEnv, RLDataModule, RLTrainer

CORRECTIONS = ("bypass", "decoupled", "vtrace")
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile for 1, 2, ... degrees of freedom."""
NUM_ENVS, NUM_STEPS = 8, 256
SETTINGS = {
    "learning_rate": 1e-3,
    "lr_schedule": "linear",
    "n_epochs": 10,
    "batch_size": 128,
    "gamma": 0.9,
}

Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--env-steps", type=int, default=120_000, help="of each run")
    parser.add_argument(
        "--output", type=Path, default=Path("scripts/results/staleness.md"), help="and .json, .png"
    )
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    runs: list[Run] = []
    for seed in args.seeds:
        for staleness in args.staleness:
            for correction in CORRECTIONS if staleness else CORRECTIONS[1:2]:
                runs.append(train(staleness, correction, seed, args.env_steps))
                print(json.dumps({k: v for k, v in runs[-1].items() if k != "curve"}), flush=True)
                write(runs, args.env_steps, args.output)
    plot(runs, args.output.with_suffix(".png"))


class Lagging(AsyncCollector):
    """Let the learner continue only when the collector is as far ahead as allowed."""

    def collect(self) -> TensorDict:
        first = self.env_steps == 0
        rollout = super().collect()
        ahead = 0 if first else self.max_staleness  # the collector pauses until the first update
        while self._buffer.statistics()["queue_depth"] < ahead and not self._buffer.closed:
            time.sleep(0.001)
        return rollout


class Curve(Callback):
    """Keep the average return of the last 100 episodes, and the lag, of each iteration."""

    def __init__(self) -> None:
        self.returns: list[float] = []
        self.lags: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        returns = trainer.datamodule.collector.statistics.returns
        self.returns.append(float(np.mean(returns)) if returns else float("nan"))
        self.lags.append(float(module.metrics.get("async/staleness_max", 0.0)))


def train(staleness: int, correction: str, seed: int, env_steps: int) -> Run:
    seed_everything(seed, verbose=False)
    data = RLDataModule(
        partial(GymnasiumEnv, id="Pendulum-v1"),
        num_envs=NUM_ENVS,
        buffer_size=NUM_STEPS,
        total_env_steps=env_steps,
        collector=partial(Lagging, max_staleness=staleness),
        iterations_per_epoch=-(-env_steps // (NUM_ENVS * NUM_STEPS)),
        num_eval_episodes=50,
    )
    policy = ActorCritic(data.observation_space, data.action_space)
    module = PPO(policy, off_policy_correction=correction, **SETTINGS)  # type: ignore[arg-type]
    curve = Curve()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        RLTrainer(
            run_dir=scratch,
            logger=False,
            callbacks=[curve],
            enable_checkpointing=False,
            enable_progress_bar=False,
            accelerator="cpu",
        ).fit(module, data)
    return {
        "max_staleness": staleness,
        "correction": correction,
        "seed": seed,
        "final_return": module.evaluation["avg_reward"],
        "mean_lag": float(np.mean(curve.lags)),
        "seconds": time.perf_counter() - start,
        "curve": curve.returns,
    }


def cells(runs: list[Run]) -> dict[tuple[int, str], list[Run]]:
    """Group the runs by setting; runs without staleness appear under every correction."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        for correction in CORRECTIONS if run["max_staleness"] == 0 else (run["correction"],):
            groups.setdefault((run["max_staleness"], correction), []).append(run)
    return groups


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), float("nan")
    t = STUDENT_T[n - 2] if n - 2 < len(STUDENT_T) else 1.96
    return float(np.mean(values)), t * float(np.std(values, ddof=1)) / n**0.5


def write(runs: list[Run], env_steps: int, path: Path) -> None:
    groups = cells(runs)
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        f"Final return on Pendulum-v1 after {env_steps:,} env steps: mean of the seeds "
        f"{', '.join(map(str, seeds))} with its 95 % interval. PPO, {NUM_ENVS} envs x {NUM_STEPS} "
        "steps per rollout. The lag is forced to its bound (`scripts/staleness_sweep.py`).",
        "",
        f"| max_staleness | mean lag, updates | {' | '.join(CORRECTIONS)} |",
        f"| ---: | ---: {'| ---: ' * len(CORRECTIONS)}|",
    ]
    for staleness in sorted({key[0] for key in groups}):
        row = [groups.get((staleness, correction), []) for correction in CORRECTIONS]
        lag = np.mean([run["mean_lag"] for group in row for run in group])
        texts = []
        for group in row:
            mean, half = interval([run["final_return"] for run in group] or [float("nan")])
            texts.append(f"{mean:.0f} ± {half:.0f}")
        lines.append(f"| {staleness} | {lag:.2f} | {' | '.join(texts)} |")
    lines += ["", "With max_staleness 0 nothing is stale, and all corrections are plain PPO."]
    path.write_text("\n".join(lines) + "\n")
    content = {"env": "Pendulum-v1", "env_steps": env_steps, "settings": SETTINGS, "runs": runs}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1))


def plot(runs: list[Run], path: Path) -> None:
    """Draw the learning curves, one panel per correction."""
    try:
        import matplotlib
    except ImportError:
        print(f"No {path.name}: matplotlib is not installed (pip install matplotlib).")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(CORRECTIONS), sharey=True, figsize=(10, 3.4), layout="constrained"
    )
    for panel, correction in zip(panels, CORRECTIONS, strict=True):
        for (staleness, kind), group in sorted(cells(runs).items()):
            if kind != correction:
                continue
            curves = np.array([run["curve"] for run in group])
            steps = np.arange(1, curves.shape[1] + 1) * NUM_ENVS * NUM_STEPS / 1000
            halves = [interval(list(column)) for column in curves.T]
            mean, half = np.array(halves).T
            panel.plot(steps, mean, label=f"max_staleness {staleness}")
            panel.fill_between(steps, mean - half, mean + half, alpha=0.2)
        panel.set_title(correction)
        panel.set_xlabel("thousand env steps")
    panels[0].set_ylabel("return of the last 100 episodes")
    panels[0].legend(loc="upper left")
    figure.suptitle("Pendulum-v1: mean over seeds, 95 % intervals", fontsize=10)
    figure.savefig(path, dpi=150)
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
