"""Measure the overhead of the Lightning layer over the same update in a bare loop.

    python scripts/bench_overhead.py --check

Both have the same env, policy, collector, buffer, dataset, losses, fused Adam, clipping, non-finite
check and statistics, and one torch thread. `bare` is `bare_loop` below. `lightning` is
`RLTrainer.fit` with its default callbacks and its TensorBoard logger, which writes each iteration.
The timed part has no evaluation and no checkpoint.

Both alternate in one process, minibatch by minibatch, so that a busy machine slows both equally. An
iteration (one rollout and its update) of M minibatches has M turns. The first turn lasts from the
last minibatch of the previous iteration to the first one of this iteration: counters, callbacks,
logger, rollout, values and advantages. The time of an iteration is the median of the first turns +
(M - 1) * the median of the others; its overhead is the same of the differences, turn by turn. The
clock is the CPU time of the process with all its threads, which other processes disturb less than
wall time. Both loops must end with the same parameters, bit for bit.

Exit status 1 with `--check` if the overhead of a workload exceeds 5 % in CPU time.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from tensordict import TensorDict

from lightning_rl import PPO, ActorCritic, GymnasiumEnv, RLDataModule, RLTrainer
from lightning_rl.collectors import CollectorContext, SyncCollector
from lightning_rl.optim.update import is_finite
from lightning_rl.training.data import RolloutDataset
from scripting import parser_of, table

WORKLOADS: dict[str, dict[str, Any]] = {
    "W1": {"env": "CartPole-v1", "num_envs": 8, "steps": 128, "n_epochs": 4, "batch_size": 256},
    "W2": {"env": "Pendulum-v1", "num_envs": 1, "steps": 2048, "n_epochs": 10, "batch_size": 64},
}
COLUMNS = ("workload", "bare ms", "Lightning ms", "ratio (of each run)")
LIMIT = 0.05
"""Overhead that `--check` allows, as a share of the bare iteration."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3, help="runs, one seed each")
    parser.add_argument("--iterations", type=int, default=30, help="timed iterations of a run")
    parser.add_argument("--warmup", type=int, default=3, help="iterations dropped before them")
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT:.0%}%")
    args = parser.parse_args()
    print("Per iteration; default callbacks and TensorBoard, no evaluation and no checkpoint.")
    print("Final parameters of the two loops: bit-identical.\n")
    rows, overheads = [], []
    for name in args.workloads:
        seeds = range(1, args.repeats + 1)
        runs = [race(WORKLOADS[name], args.warmup, args.iterations, seed) for seed in seeds]
        row, overhead = summarize(name, runs)
        rows.append(row)
        overheads.append(overhead)
    print("\n".join(table(COLUMNS, rows)))
    return int(args.check and max(overheads) > LIMIT)


def race(workload: dict[str, Any], warmup: int, iterations: int, seed: int) -> np.ndarray:
    """Train bare and with Lightning from one seed; return CPU seconds [iterations, M, 2].

    Raises:
        AssertionError: if their parameters differ at the end.
    """
    total = warmup + iterations
    bare, bare_data = make_run(PPO, workload, total, seed)
    model, data = make_run(TurnTakingPPO, workload, total, seed)
    initial = [parameter.clone() for parameter in model.policy.parameters()]
    model.opponent = bare_loop(bare, bare_data, total)
    with tempfile.TemporaryDirectory() as directory:
        # All iterations are one epoch, so its checkpoint is written after the timing.
        trainer = RLTrainer(run_dir=directory, accelerator="cpu", limit_val_batches=0)
        trainer.fit(model, data)
    next(model.opponent, None)  # the code after the last minibatch
    assert int(model.policy.version) == int(bare.policy.version) == total
    for a, b, c in zip(model.parameters(), bare.parameters(), initial, strict=True):
        assert torch.equal(a, b), "The two loops did not do the same: their parameters differ."
        assert not torch.equal(a, c), "A parameter was not trained."
    both = np.stack([model.opponents_turns, model.turns], axis=1)
    return both.reshape(total, -1, 2)[warmup:]


def make_run(
    algorithm: type[PPO], workload: dict[str, Any], iterations: int, seed: int
) -> tuple[Any, RLDataModule]:
    seed_everything(seed, verbose=False)
    num_envs, steps = workload["num_envs"], workload["steps"]
    data = RLDataModule(
        partial(GymnasiumEnv, id=workload["env"]),
        num_envs=num_envs,
        buffer_size=steps,
        total_env_steps=iterations * num_envs * steps,
        iterations_per_epoch=iterations,
    )
    policy = ActorCritic(data.observation_space, data.action_space, (64, 64), activation="tanh")
    settings = {key: workload[key] for key in ("n_epochs", "batch_size")}
    return algorithm(policy, ent_coef=0.01, compile=False, **settings), data


def bare_loop(ppo: PPO, data: RLDataModule, iterations: int) -> Iterator[None]:
    """Do what `PPO.training_step` does, without a trainer; pause after each minibatch."""
    env = GymnasiumEnv(data.num_envs, data._env.id)
    seed = data.seed_for("collector")
    collector = SyncCollector(CollectorContext(env, ppo.policy, data.buffer_size, seed))
    (optimizer,), objective = ppo.configure_optimizers(), ppo.objectives[""]
    parameters = list(ppo.policy.parameters())
    ppo.generator.manual_seed(data.seed_for("shuffle"))
    for rollout in RolloutDataset(collector, iterations):
        ppo.evaluate_values(rollout)
        ppo.add_advantages(rollout)
        for minibatch in ppo.minibatches(rollout, ppo.fields):
            loss, scalars = ppo.loss(ppo.prepare(minibatch))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(parameters, ppo.max_grad_norm)
            names = ["loss", *scalars, "grad_norm"]
            row = torch.cat([torch.stack([loss, *scalars.values()]).detach(), grad_norm[None]])
            objective.statistics.add(names, row)
            if is_finite(row):
                optimizer.step()
            yield
        ppo.policy.update_normalization(rollout)
        ppo.policy.version += 1
        ppo.metrics = objective.statistics.close() | ppo.statistics.means()


class TurnTakingPPO(PPO):
    """PPO that alternates with an opponent, minibatch by minibatch, and times both.

    The order is ABBA: the second one finds other caches than the first one.
    """

    opponent: Iterator[None]

    def on_train_start(self) -> None:
        super().on_train_start()
        self.turns: list[float] = []
        self.opponents_turns: list[float] = []
        self.began = time.process_time()

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        # TensorBoard writes in its own thread, which must not slow the opponent.
        self.trainer.logger.experiment.flush()
        super().training_step(rollout, batch_idx)

    def minibatches(self, rollout: TensorDict, keys: Sequence[str]) -> Iterator[TensorDict]:
        for minibatch in super().minibatches(rollout, keys):
            yield minibatch
            self.turns.append(time.process_time() - self.began)
            if len(self.turns) % 2 == 1:
                self.opponents_turns += [self.watch_opponent(), self.watch_opponent()]
            self.began = time.process_time()

    def watch_opponent(self) -> float:
        began = time.process_time()
        next(self.opponent)
        return time.process_time() - began


def summarize(workload: str, runs: list[np.ndarray]) -> tuple[tuple[str, ...], float]:
    """Return the row of the turns [iterations, M, 2] of all runs, and the overhead."""
    turns = np.concatenate(runs)
    bare, extra = iteration_seconds(turns[..., 0]), iteration_seconds(turns[..., 1] - turns[..., 0])
    ratios = [
        1 + iteration_seconds(r[..., 1] - r[..., 0]) / iteration_seconds(r[..., 0]) for r in runs
    ]
    row = (
        f"{workload} {WORKLOADS[workload]['env']}",
        *(f"{seconds * 1e3:.1f}" for seconds in (bare, bare + extra)),
        f"{1 + extra / bare:.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})",
    )
    return row, extra / bare


def iteration_seconds(turns: np.ndarray) -> float:
    """Take the median of the first turns + (M - 1) * the median of the others."""
    return float(np.median(turns[:, 0]) + (turns.shape[1] - 1) * np.median(turns[:, 1:]))


if __name__ == "__main__":
    sys.exit(main())
