"""Measure the speed-up of background collection over alternating collection and learning.

    python scripts/bench_async.py
    python scripts/bench_async.py --quick
    python scripts/bench_async.py --workloads cpu     # rows of others are kept

Both runs train CartPole-v1 by PPO, or Pendulum-v1 by SAC, for the same number of env steps,
rollouts and updates (except `return`): `sync` with `SyncCollector`, `async` with `AsyncCollector`
and max_staleness 1.

`inference`: a policy with a simulated delay of 100, 200 or 500 ms per acting call (`SlowPolicy`),
and a learner with a simulated delay in addition to its update (`SlowUpdate`). The ratio of
collecting C to learning L is 1:3, 1:1 and 3:1.

`flow`: the same at 1:1 and 100 ms, for a flow head that decodes chunks of 8 actions (`TwoDoors`).

`cpu`: no delay; an env in its own process computes for a given CPU time, and the learner does real
updates. It needs two free cores. The time of an env step is set so that C:L is 1:1. (With as many
env processes as cores, `sync` uses all cores already, and the gain is smaller.)

`off_policy`: SAC with one update per env step. An env step takes 50 ms, like a robot at 20 Hz; the
updates take as long (1:1), a third of it, or three times as long.

`return`: simulated inference at 1:1. Both train until the current policy reaches an average return
of 195 in 32 episodes after an update, for any number of env steps; the median of three seeds.
(The average of the last 100 training episodes lags: long episodes end rarely.)

C and L are measured in the sync run, where they add up; the best speed-up is (C + L) / max(C, L).
The script reports two speed-ups: of the whole run, whose first rollout and first update overlap
with nothing; and the `steady` one, from the end of the third update, as in a long run. The steady
one is compared with the best.
"""

import json
import math
import os
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import gymnasium
import torch
from lightning.pytorch import Callback, seed_everything

from lightning_rl import (
    PPO,
    SAC,
    ActionChunk,
    ActorCritic,
    AsyncCollector,
    GymnasiumEnv,
    PerceptronBackbone,
    ReplayBuffer,
    RLDataModule,
    RLTrainer,
    SlowPolicy,
    SquashedActorCritic,
    SyncCollector,
    VLAPolicy,
)
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.extensions.tasks.probes import TwoDoors
from scripting import QUIET, parser_of, table

WORKLOADS = ("inference", "flow", "off_policy", "return", "cpu")
DELAYS_MS = (100, 200, 500)
RATIOS = {"1:3": 3.0, "1:1": 1.0, "3:1": 1 / 3}
"""C:L, and L as a multiple of C."""
ENV_MS = 50
"""Milliseconds of an env step in `off_policy`."""
RETURN, EPISODES = 195, 32
"""Target of `return`, and the number of episodes of its average."""
WARMUP = 3
"""Iterations that the steady speed-up leaves out."""
COLUMNS = (
    *("workload", "C:L", "C, s", "L, s", "sync, s", "async, s", "speed-up", "steady", "bound"),
    *("share", "load"),
)

CART_POLE = partial(GymnasiumEnv, id="CartPole-v1")
DOORS = partial(ActionChunk, env=TwoDoors, chunk_size=TwoDoors.length)

Row = dict[str, Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--quick", action="store_true", help="4 steps, 12 iterations")
    parser.add_argument("--output", type=Path, default=Path("scripts/results/async.md"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    kept = args.output.with_suffix(".json")
    rows = json.loads(kept.read_text())["rows"] if kept.exists() else []
    rows = [row for row in rows if row["group"] not in args.workloads]
    delays = DELAYS_MS[: 1 if args.quick else None]
    sizes = {"steps": 4, "iterations": 12} if args.quick else {"steps": 8, "iterations": 20}
    measurements = {
        "inference": [
            partial(inference, delay, ratio, **sizes) for delay in DELAYS_MS for ratio in RATIOS
        ],
        "flow": [partial(flow, **sizes)],
        "off_policy": [partial(off_policy, ratio, **sizes) for ratio in RATIOS],
        "return": [partial(to_return, delay) for delay in delays],
        "cpu": [partial(cpu_bound, 5 * sizes["iterations"])],
    }
    for workload in args.workloads:
        for measure in measurements[workload]:
            rows.append(measure() | {"group": workload})
            write(rows, args.output)
    print(args.output.read_text())


def inference(delay_ms: int, ratio: str, **sizes: int) -> Row:
    """Compare both with simulated inference, at one C:L."""
    run = partial(delayed, CART_POLE, delay_ms, RATIOS[ratio], **sizes)
    return compare(run, f"simulated inference, {delay_ms} ms", ratio)


def flow(**sizes: int) -> Row:
    """Compare both with simulated inference of a flow policy, at C:L = 1:1."""
    run = partial(delayed, DOORS, 100, 1.0, policy=flow_policy, chunk=TwoDoors.length, **sizes)
    return compare(run, "a flow of 4 steps, simulated inference, 100 ms", "1:1")


def delayed(env: Any, delay_ms: int, multiple: float, *, steps: int, **settings: Any) -> Row:
    """Train two envs with a policy that waits, and a learner that waits a multiple of that."""
    waits = {"delay_ms": delay_ms, "update_seconds": multiple * steps * delay_ms / 1000}
    learner = {"n_epochs": 1, "batch_size": 2 * steps}
    return train(env, num_envs=2, steps=steps, settings=learner, **waits, **settings)


def flow_policy(*spaces: Any) -> VLAPolicy:
    return VLAPolicy(*spaces, PerceptronBackbone(), head="flow")


def off_policy(ratio: str, steps: int, iterations: int) -> Row:
    """Compare both with slow env steps, and an update for each step."""
    run = partial(
        train,
        partial(GymnasiumEnv, id="Unhurried-v0"),
        update_seconds=RATIOS[ratio] * steps * ENV_MS / 1000,
        num_envs=1,
        steps=steps,
        iterations=iterations,
        settings={"batch_size": steps, "random_env_steps": 0},
        policy=partial(SquashedActorCritic, hidden_sizes=(64, 64)),
        algorithm=SAC,
    )
    return compare(run, f"SAC, an env of {ENV_MS} ms a step, an update for each", ratio)


def to_return(delay_ms: int) -> Row:
    """Compare the time of both to the same return."""
    run = partial(
        train,
        CART_POLE,
        delay_ms=delay_ms,
        update_seconds=16 * delay_ms / 1000,
        num_envs=64,
        steps=16,
        iterations=100,
        settings={"n_epochs": 4, "batch_size": 256, "learning_rate": 5e-4},
        until=RETURN,
    )
    rows = [compare(partial(run, seed=seed), "", "1:1") for seed in (1, 2, 3)]
    middle = median(row["speed_up"] for row in rows)
    each = ", ".join(f"{row['speed_up']:.2f} ({row['iterations']})" for row in rows)
    row = next(row for row in rows if row["speed_up"] == middle)
    return row | {"workload": f"to a return of {RETURN}, {delay_ms} ms: {each}"}


def cpu_bound(iterations: int) -> Row:
    """Compare both with an env and a learner that compute, at about C:L = 1:1."""
    steps = 128

    def run(collector: Any, work_ms: float, iterations: int = iterations) -> Row:
        settings = {"n_epochs": 30, "batch_size": 32}
        env = partial(
            GymnasiumEnv, id="Computing-v0", env_kwargs={"work_ms": work_ms}, vectorization="async"
        )
        sizes = {"num_envs": 1, "steps": steps, "iterations": iterations}
        return train(env, collector, settings=settings, **sizes)

    first = run(SyncCollector, 0.0, 10)  # seconds per iteration
    work_ms = 1000 * (first["learn"] - first["collect"]) / steps
    workload = f"CPU-bound env, {work_ms:.2f} ms per step and env"
    return compare(partial(run, work_ms=work_ms), workload, "about 1:1")


class Computing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 that computes for `work_ms` of CPU time before each step."""

    def __init__(self, work_ms: float) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.work = work_ms / 1000

    def step(self, action: Any) -> Any:
        end = time.process_time() + self.work
        while time.process_time() < end:
            pass
        return self.env.step(action)


class Unhurried(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Pendulum-v1 with steps of `ENV_MS`, without computing."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))

    def step(self, action: Any) -> Any:
        time.sleep(ENV_MS / 1000)
        return self.env.step(action)


gymnasium.register("Computing-v0", Computing)
gymnasium.register("Unhurried-v0", Unhurried)


class SlowUpdate(Callback):
    """Delays each update, and keeps the clocks of both runs."""

    def __init__(self, seconds: float, until: float) -> None:
        self.seconds = seconds
        self.until = until
        self.learned = self.collected = 0.0
        self.ends: list[float] = []
        if until < math.inf:
            self.env = CART_POLE(EPISODES)

    def on_train_start(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.begun = time.perf_counter()
        self.collected += trainer.datamodule.dataset.collect_seconds
        time.sleep(self.seconds)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.learned += time.perf_counter() - self.begun
        self.ends.append(time.perf_counter() - self.start)
        if self.until < math.inf:
            policy = trainer.lightning_module.policy.inner  # without its delay
            seeds = range(1000, 1000 + EPISODES)
            episodes = run_episodes(policy, self.env, seeds, deterministic=False)
            trainer.should_stop |= fmean(e["return"] for e in episodes) >= self.until


def train(
    env: Any,
    collector: Any,
    *,
    num_envs: int,
    steps: int,
    iterations: int,
    settings: dict[str, Any],
    delay_ms: float = 0.0,
    update_seconds: float = 0.0,
    until: float = math.inf,
    seed: int = 1,
    algorithm: Any = PPO,
    policy: Any = ActorCritic,
    chunk: int = 1,
) -> Row:
    """Train; return the total seconds, and the seconds of collecting and learning per iteration."""
    seed_everything(seed, verbose=False)
    data = RLDataModule(
        env,
        num_envs=num_envs,
        buffer_size=steps,
        total_env_steps=num_envs * steps * chunk * iterations,
        iterations_per_epoch=1 if until < math.inf else iterations,  # a run stops between epochs
        collector=collector,
        replay=partial(ReplayBuffer, capacity=10_000) if algorithm is SAC else None,
    )
    spaces = (data.observation_space, data.action_space)
    actor = SlowPolicy(*spaces, policy, delay_ms=delay_ms) if delay_ms else policy(*spaces)
    clocks = SlowUpdate(update_seconds, until)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = RLTrainer(run_dir=scratch, callbacks=[clocks], accelerator="cpu", **QUIET)
        trainer.fit(algorithm(actor, **settings), data)
    return {
        "wall": clocks.ends[-1],
        "steady": clocks.ends[-1] - clocks.ends[WARMUP - 1],
        "collect": clocks.collected / len(clocks.ends),
        "learn": clocks.learned / len(clocks.ends),
        "iterations": len(clocks.ends),
    }


def compare(run: Any, workload: str, ratio: str) -> Row:
    """Train with both, and compare the speed-up with the best one."""
    load = os.getloadavg()[0]
    sync = run(collector=SyncCollector)
    overlapped = run(collector=partial(AsyncCollector, max_staleness=1))
    collect, learn = sync["collect"], sync["learn"]
    bound = (collect + learn) / max(collect, learn)
    steady = sync["steady"] / overlapped["steady"]
    row = {
        "workload": workload,
        "C:L": ratio,
        "load": load,
        "C": collect,
        "L": learn,
        "sync": sync["wall"],
        "async": overlapped["wall"],
        "speed_up": sync["wall"] / overlapped["wall"],
        "steady": steady,
        "bound": bound,
        "share": steady / bound,
        "iterations": f"{sync['iterations']}:{overlapped['iterations']}",
    }
    print(json.dumps(row), flush=True)
    return row


def write(rows: list[Row], path: Path) -> None:
    about = (
        "Wall time to equal env steps and updates, `AsyncCollector` (max_staleness 1) against "
        "`SyncCollector` (`scripts/bench_async.py`). Delays of inference and of the update are "
        f"simulated. `steady` leaves out the first {WARMUP} iterations; the bound that it is held "
        f"against is (C + L) / max(C, L). {os.cpu_count()} cores; `load` is that of the machine "
        "before the run. Of runs to a return: the speed-up of each seed, and in brackets the "
        "iterations that sync and async took."
    )
    cells = []
    for row in sorted(rows, key=lambda row: WORKLOADS.index(row["group"])):
        seconds = f"{row['C']:.2f}", f"{row['L']:.2f}", f"{row['sync']:.1f}", f"{row['async']:.1f}"
        ratios = (f"{row[key]:.2f}" for key in ("speed_up", "steady", "bound"))
        shares = f"{row['share']:.0%}", f"{row['load']:.1f}"
        cells.append([row["workload"], row["C:L"], *seconds, *ratios, *shares])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([about, "", *table(COLUMNS, cells)]) + "\n")
    versions = {"torch": torch.__version__, "cores": os.cpu_count()}
    path.with_suffix(".json").write_text(json.dumps(versions | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
