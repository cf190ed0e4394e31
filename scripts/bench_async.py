"""Measure the speed-up of background collection over alternating collection and learning.

    python scripts/bench_async.py
    python scripts/bench_async.py --quick
    python scripts/bench_async.py --workloads cpu

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

import argparse
import json
import math
import os
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import fmean
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

WORKLOADS = ("inference", "flow", "off_policy", "return", "cpu")
DELAYS_MS = (100, 200, 500)
RATIOS = {"1:3": 3.0, "1:1": 1.0, "3:1": 1 / 3}
"""C:L, and L as a multiple of C."""
NUM_ENVS = 2
ENV_MS = 50
"""Milliseconds of an env step in `off_policy`."""
RETURN, EPISODES = 195, 32
"""Target of `return`, and the number of episodes of its average."""
WARMUP = 3
"""Iterations that the steady speed-up leaves out."""
SHARE = 0.9
"""Share of the best speed-up that `--check` requires at 1:1 and 3:1."""
FLOW_SHARE = 0.95
"""Share of the best speed-up that `--check` requires of a flow."""
CPU_SPEED_UP = 1.25
"""Speed-up of the CPU-bound workload that `--check` requires."""

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=8, help="steps per env in a rollout")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="4 steps, 12 iterations")
    parser.add_argument("--output", type=Path, default=Path("scripts/results/async.md"))
    parser.add_argument("--check", action="store_true", help="fail below what is promised")
    args = parser.parse_args()
    steps, iterations = (4, 12) if args.quick else (args.steps, args.iterations)
    warnings.filterwarnings("ignore")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows = kept(args.output, args.workloads)
    if "inference" in args.workloads:
        for delay in DELAYS_MS:
            for name, multiple in RATIOS.items():
                rows.append(inference(delay, name, multiple, steps, iterations))
                write(rows, args.output)
    if "flow" in args.workloads:
        rows.append(flow(steps, iterations))
        write(rows, args.output)
    if "off_policy" in args.workloads:
        for name, multiple in RATIOS.items():
            rows.append(off_policy(name, multiple, steps, iterations))
            write(rows, args.output)
    if "return" in args.workloads:
        for delay in DELAYS_MS[: 1 if args.quick else None]:
            rows.append(to_return(delay))
            write(rows, args.output)
    if "cpu" in args.workloads:
        rows.append(cpu_bound(5 * iterations))
        write(rows, args.output)
    print(args.output.read_text())
    return int(args.check and not all(row["passed"] for row in rows))


def inference(delay_ms: float, name: str, multiple: float, steps: int, iterations: int) -> Row:
    """Compare both with simulated inference, at one C:L."""
    update = multiple * steps * delay_ms / 1000
    run = partial(
        train,
        env=partial(GymnasiumEnv, id="CartPole-v1"),
        delay_ms=delay_ms,
        update_seconds=update,
        num_envs=NUM_ENVS,
        steps=steps,
        iterations=iterations,
        settings={"n_epochs": 1, "batch_size": NUM_ENVS * steps},
    )
    row = compare(run) | {
        "group": "inference",
        "workload": f"simulated inference, {delay_ms} ms",
        "C:L": name,
    }
    row["passed"] = name == "1:3" or row["share"] >= SHARE
    return row


def flow(steps: int, iterations: int, delay_ms: float = 100.0) -> Row:
    """Compare both with simulated inference of a flow policy, at C:L = 1:1."""
    run = partial(
        train,
        env=partial(ActionChunk, env=TwoDoors, chunk_size=TwoDoors.length),
        delay_ms=delay_ms,
        update_seconds=steps * delay_ms / 1000,
        num_envs=NUM_ENVS,
        steps=steps,
        iterations=iterations,
        settings={"n_epochs": 1, "batch_size": NUM_ENVS * steps},
        policy=flow_policy,
        chunk=TwoDoors.length,
    )
    workload = f"a flow of 4 steps, simulated inference, {delay_ms:g} ms"
    row = compare(run) | {"group": "flow", "workload": workload, "C:L": "1:1"}
    row["passed"] = row["share"] >= FLOW_SHARE
    return row


def flow_policy(*spaces: Any) -> VLAPolicy:
    return VLAPolicy(*spaces, PerceptronBackbone(), head="flow")


def off_policy(name: str, multiple: float, steps: int, iterations: int) -> Row:
    """Compare both with slow env steps, and an update for each step."""
    run = partial(
        train,
        env=partial(GymnasiumEnv, id="Unhurried-v0", env_kwargs={"step_ms": ENV_MS}),
        update_seconds=multiple * steps * ENV_MS / 1000,
        num_envs=1,
        steps=steps,
        iterations=iterations,
        settings={"batch_size": steps, "random_env_steps": 0},
        algorithm="sac",
    )
    workload = f"SAC, an env of {ENV_MS} ms a step, an update for each"
    row = compare(run) | {"group": "off_policy", "workload": workload, "C:L": name}
    row["passed"] = name == "1:3" or row["share"] >= SHARE
    return row


def to_return(delay_ms: float) -> Row:
    """Compare the time of both to the same return."""
    num_envs, steps = 64, 16
    settings = {"n_epochs": 4, "batch_size": 256, "learning_rate": 5e-4}
    runs = [
        compare(
            partial(
                train,
                env=partial(GymnasiumEnv, id="CartPole-v1"),
                delay_ms=delay_ms,
                update_seconds=steps * delay_ms / 1000,
                num_envs=num_envs,
                steps=steps,
                iterations=100,
                settings=settings,
                until=RETURN,
                seed=seed,
            )
        )
        for seed in (1, 2, 3)
    ]
    row = sorted(runs, key=lambda run: run["speed_up"])[1]
    each = ", ".join(f"{run['speed_up']:.2f} ({run['iterations']})" for run in runs)
    row |= {"workload": f"to a return of {RETURN}, {delay_ms} ms: {each}", "C:L": "1:1"}
    row |= {"group": "return", "passed": True}
    return row


def cpu_bound(iterations: int) -> Row:
    """Compare both with an env and a learner that compute, at about C:L = 1:1."""
    steps, settings = 128, {"n_epochs": 30, "batch_size": 32}

    def run(collector: str, work_ms: float, iterations: int = iterations) -> Row:
        env = partial(
            GymnasiumEnv, id="Computing-v0", env_kwargs={"work_ms": work_ms}, vectorization="async"
        )
        return train(
            collector, env=env, num_envs=1, steps=steps, iterations=iterations, settings=settings
        )

    first = run("sync", 0.0, 10)  # seconds per iteration
    work_ms = 1000 * (first["learn"] - first["collect"]) / steps
    row = compare(partial(run, work_ms=work_ms))
    row |= {"workload": f"CPU-bound env, {work_ms:.2f} ms per step and env", "C:L": "about 1:1"}
    row |= {"group": "cpu", "passed": row["steady"] >= CPU_SPEED_UP}
    return row


class Computing(gymnasium.Env[Any, Any]):
    """CartPole-v1 that computes for `work_ms` of CPU time before each step."""

    def __init__(self, work_ms: float) -> None:
        self.env = gymnasium.make("CartPole-v1")
        self.observation_space, self.action_space = (
            self.env.observation_space,
            self.env.action_space,
        )
        self.work = work_ms / 1000

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        end = time.process_time() + self.work
        while time.process_time() < end:
            pass
        return self.env.step(action)


gymnasium.register("Computing-v0", Computing)


class Unhurried(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Pendulum-v1 with steps of `step_ms`, without computing."""

    def __init__(self, step_ms: float) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        self.seconds = step_ms / 1000

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return self.env.step(action)


gymnasium.register("Unhurried-v0", Unhurried)


class SlowUpdate(Callback):
    """Delays each update, and keeps the clocks of both runs."""

    def __init__(self, seconds: float, until: float = math.inf) -> None:
        self.seconds = seconds
        self.until = until
        self.start = 0.0
        self.learned = 0.0
        self.collected = 0.0
        self.begun = 0.0
        self.ends: list[float] = []
        if until < math.inf:
            self.env = GymnasiumEnv(id="CartPole-v1", num_envs=EPISODES)

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
    collector: str,
    *,
    env: Any,
    num_envs: int,
    steps: int,
    iterations: int,
    settings: dict[str, Any],
    delay_ms: float = 0.0,
    update_seconds: float = 0.0,
    until: float = math.inf,
    seed: int = 1,
    algorithm: str = "ppo",
    policy: Any = ActorCritic,
    chunk: int = 1,
) -> Row:
    """Train; return the total seconds, and the seconds of collecting and learning per iteration."""
    seed_everything(seed, verbose=False)
    kind = {"sync": SyncCollector, "async": partial(AsyncCollector, max_staleness=1)}[collector]
    data = RLDataModule(
        env,
        num_envs=num_envs,
        buffer_size=steps,
        total_env_steps=num_envs * steps * chunk * iterations,
        iterations_per_epoch=1 if until < math.inf else iterations,  # a run stops between epochs
        collector=kind,
        replay=partial(ReplayBuffer, capacity=10_000) if algorithm == "sac" else None,
    )
    spaces = (data.observation_space, data.action_space)
    model: Any
    if algorithm == "sac":
        model = SAC(SquashedActorCritic(*spaces, (64, 64)), **settings)
    elif delay_ms:
        model = PPO(SlowPolicy(*spaces, policy, delay_ms), **settings)
    else:
        model = PPO(policy(*spaces), **settings)
    clocks = SlowUpdate(update_seconds, until)
    with tempfile.TemporaryDirectory() as scratch:
        RLTrainer(
            run_dir=scratch,
            callbacks=[clocks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            limit_val_batches=0,
            accelerator="cpu",
        ).fit(model, data)
    return {
        "wall": clocks.ends[-1],
        "steady": clocks.ends[-1] - clocks.ends[WARMUP - 1],
        "collect": clocks.collected / len(clocks.ends),
        "learn": clocks.learned / len(clocks.ends),
        "iterations": len(clocks.ends),
    }


def compare(run: Any) -> Row:
    """Train with both, and compare the speed-up with the best one."""
    load = os.getloadavg()[0]
    sync, overlapped = run("sync"), run("async")
    c, m = sync["collect"], sync["learn"]
    bound = (c + m) / max(c, m)
    steady = sync["steady"] / overlapped["steady"]
    row = {
        "load": load,
        "C": c,
        "L": m,
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


def kept(path: Path, workloads: list[str]) -> list[Row]:
    """Return the measurements of other workloads in an earlier run."""
    try:
        rows: list[Row] = json.loads(path.with_suffix(".json").read_text())["rows"]
    except FileNotFoundError:
        return []
    return [row for row in rows if row["group"] not in workloads]


def write(rows: list[Row], path: Path) -> None:
    lines = [
        "Wall time to equal env steps and updates, `AsyncCollector` (max_staleness 1) against "
        "`SyncCollector` (`scripts/bench_async.py`). Delays of inference and of the update are "
        f"simulated. `steady` leaves out the first {WARMUP} iterations; the bound that it is held "
        f"against is (C + L) / max(C, L). {os.cpu_count()} cores; `load` is that of the machine "
        "before the run. Of runs to a return: the speed-up of each seed, and in brackets the "
        "iterations that sync and async took.",
        "",
        "| workload | C:L | C, s | L, s | sync, s | async, s | speed-up | steady | bound | share | "
        "load |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r['workload']} | {r['C:L']} | {r['C']:.2f} | {r['L']:.2f} | {r['sync']:.1f} | "
        f"{r['async']:.1f} | {r['speed_up']:.2f} | {r['steady']:.2f} | {r['bound']:.2f} | "
        f"{r['share']:.0%} | {r['load']:.1f} |"
        for r in sorted(rows, key=lambda row: WORKLOADS.index(row["group"]))
    ]
    path.write_text("\n".join(lines) + "\n")
    about = {"torch": torch.__version__, "cores": os.cpu_count()}
    path.with_suffix(".json").write_text(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
