"""Measure what the Lightning layer costs over the same update in a bare loop.

    python scripts/bench_overhead.py --repeats 3 --iterations 40 --output overhead.json --check

Both sides have the same env, policy, collector, buffer, dataset, losses, fused Adam, clipping,
non-finite check and statistics, and one torch thread. `bare` is `bare_loop` below; `lightning` is
`RLTrainer.fit` with its default callbacks and its TensorBoard logger, which writes every iteration.
The timed part holds no evaluation and no checkpoint.

The two advance in lockstep in one process, an iteration of the one and then the same iteration of
the other, so that a busy machine slows both alike. An iteration is one rollout and its update;
Lightning's reaches from the moment it asks for a rollout to the moment it asks for the next. The
overhead is the median of the differences, pair by pair. Both must end with the same parameters,
bit for bit. Exit status 1 with `--check` if the overhead of a workload exceeds 5 %.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import seed_everything

from lightning_rl import PPO, ActorCritic, GymnasiumEnv, RLDataModule, RLTrainer
from lightning_rl.buffers import RolloutBuffer
from lightning_rl.collectors import SyncCollector
from lightning_rl.data import RolloutDataset

WORKLOADS: dict[str, dict[str, Any]] = {
    "W1": {
        "id": "CartPole-v1",
        "num_envs": 8,
        "buffer_size": 128,
        "n_epochs": 4,
        "batch_size": 256,
    },
    "W2": {
        "id": "Pendulum-v1",
        "num_envs": 1,
        "buffer_size": 2048,
        "n_epochs": 10,
        "batch_size": 64,
    },
}
LIMIT = 0.05
"""Overhead that `--check` allows, as a share of the bare iteration."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs, one seed each")
    parser.add_argument("--iterations", type=int, default=40, help="timed iterations per run")
    parser.add_argument(
        "--warmup", type=int, default=5, help="iterations dropped at the beginning of a run"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--check", action="store_true", help=f"fail where an overhead exceeds {LIMIT:.0%}"
    )
    args = parser.parse_args()
    results = []
    for name in args.workloads:
        runs = [
            race(WORKLOADS[name], args.warmup, args.iterations, seed)
            for seed in range(1, args.repeats + 1)
        ]
        results.append({"workload": name, **WORKLOADS[name], **summarize(WORKLOADS[name], runs)})
    versions = {"torch": torch.__version__, "lightning": lightning.__version__}
    settings = {"repeats": args.repeats, "iterations": args.iterations, "warmup": args.warmup}
    report = {"excluded": "evaluation, checkpoints", **versions, **settings, "workloads": results}
    if args.output:
        args.output.write_text(json.dumps(report, indent=2))
    print(as_table(results))
    return int(args.check and any(row["overhead"] > LIMIT for row in results))


def race(workload: dict[str, Any], warmup: int, iterations: int, seed: int) -> np.ndarray:
    """Train bare and with Lightning from one seed, and return seconds [iterations, 2] of the two.

    Raises:
        AssertionError: where their parameters differ at the end.
    """
    total = warmup + iterations + 1  # the end of the last iteration is not seen by the dataset
    bare_model, bare_data = make_run(workload, total, seed)
    model, data = make_run(workload, total, seed)
    before = [parameter.clone() for parameter in model.policy.parameters()]
    with tempfile.TemporaryDirectory() as directory:
        # All iterations are one epoch, and the checkpoint follows it.
        trainer = RLTrainer(run_dir=directory, accelerator="cpu", limit_val_batches=0)
        data.opponent = bare_loop(bare_model, bare_data, total)
        trainer.fit(model, data)
    same = [
        torch.equal(a, b) for a, b in zip(model.parameters(), bare_model.parameters(), strict=True)
    ]
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert int(model.policy.version) == int(bare_model.policy.version) == total
    assert all(moved), "Some parameters were not trained."
    assert all(same), "The two loops did not do the same: their parameters differ."
    return np.array(data.lockstep.seconds[warmup:])


def make_run(workload: dict[str, Any], iterations: int, seed: int) -> tuple[PPO, "LockstepData"]:
    seed_everything(seed, verbose=False)
    num_envs, buffer_size = workload["num_envs"], workload["buffer_size"]
    data = LockstepData(
        partial(GymnasiumEnv, id=workload["id"]),
        num_envs=num_envs,
        buffer_size=buffer_size,
        total_env_steps=iterations * num_envs * buffer_size,
        iterations_per_epoch=iterations,
    )
    policy = ActorCritic(
        data.observation_space, data.action_space, hidden_sizes=(64, 64), activation="tanh"
    )
    return PPO(
        policy, n_epochs=workload["n_epochs"], batch_size=workload["batch_size"], ent_coef=0.01
    ), data


def bare_loop(ppo: PPO, data: RLDataModule, iterations: int) -> Iterator[None]:
    """Do what `PPO.training_step` does, without a trainer; pause after each iteration."""
    collector = SyncCollector(data._env, ppo.policy, data.buffer_size, data.seed_for("collector"))
    optimizer = ppo.configure_optimizers()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ppo.generator.manual_seed(data.seed_for("shuffle"))
    for rollout in RolloutDataset(collector, RolloutBuffer(), iterations):
        ppo.evaluate_values(rollout)
        ppo.add_advantages(rollout)
        for _ in range(ppo.n_epochs):
            for minibatch in ppo.minibatches(rollout, PPO.FIELDS):
                loss, statistics = ppo.loss(minibatch)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                grad_norm = torch.nn.utils.clip_grad_norm_(parameters, ppo.max_grad_norm)
                statistics = {"loss": loss, **statistics, "grad_norm": grad_norm}
                if ppo.guard.passes(statistics):
                    optimizer.step()
                    ppo.statistics.add(statistics)
        ppo.policy.update_normalization(rollout)
        ppo.policy.version += 1
        ppo.metrics = ppo.statistics.means()
        yield


class LockstepData(RLDataModule):
    """A data module that lets `opponent` do an iteration before each of its own."""

    opponent: Iterator[None]

    def train_dataloader(self) -> "Lockstep":
        self.lockstep = Lockstep(super().train_dataloader(), self.opponent, self.trainer)
        return self.lockstep


class Lockstep:
    """A dataset that times an iteration of the opponent, and then one of whoever reads it."""

    def __init__(
        self, dataset: RolloutDataset, opponent: Iterator[None], trainer: RLTrainer
    ) -> None:
        self.dataset, self.opponent, self.trainer = dataset, opponent, trainer
        self.seconds: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        rollouts = iter(self.dataset)
        for _ in range(len(self)):
            start = time.perf_counter()
            next(self.opponent)
            middle = time.perf_counter()
            yield next(rollouts)
            # TensorBoard writes in a thread of its own; the opponent must not pay for it.
            self.trainer.logger.experiment.flush()
            self.seconds.append((middle - start, time.perf_counter() - middle))


def summarize(workload: dict[str, Any], runs: list[np.ndarray]) -> dict[str, Any]:
    """Take medians over the iterations of all runs, and the range of the overhead over the runs."""
    env_steps = workload["num_envs"] * workload["buffer_size"]
    minibatches = workload["n_epochs"] * -(-env_steps // workload["batch_size"])
    bare, lightning_ = np.median(np.concatenate(runs), axis=0)
    extra = float(np.median(np.diff(np.concatenate(runs))))
    per_run = [float(np.median(np.diff(run)) / np.median(run[:, 0])) for run in runs]
    return {
        "minibatches": minibatches,
        "bare_ms": bare * 1e3,
        "lightning_ms": lightning_ * 1e3,
        "bare_env_steps_per_s": env_steps / bare,
        "lightning_env_steps_per_s": env_steps / lightning_,
        "overhead_ms": extra * 1e3,
        "overhead_us_per_minibatch": extra / minibatches * 1e6,
        "overhead": extra / bare,
        "overhead_range": [min(per_run), max(per_run)],
        "ratio": 1 + extra / bare,
        "bit_identical": True,
    }


def as_table(results: list[dict[str, Any]]) -> str:
    lines = [
        "Timed: one torch thread, default callbacks, TensorBoard; no evaluation, no checkpoint.",
        "Final parameters of the two loops: bit-identical.",
        "",
        "| workload | bare ms | Lightning ms | bare steps/s | Lightning steps/s "
        "| ratio (range over runs) | ms per iteration | µs per minibatch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        low, high = row["overhead_range"]
        lines.append(
            f"| {row['workload']} {row['id']} | {row['bare_ms']:.1f} | {row['lightning_ms']:.1f} "
            f"| {row['bare_env_steps_per_s']:,.0f} | {row['lightning_env_steps_per_s']:,.0f} "
            f"| {row['ratio']:.3f} ({1 + low:.3f}–{1 + high:.3f}) | +{row['overhead_ms']:.2f} "
            f"| +{row['overhead_us_per_minibatch']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
