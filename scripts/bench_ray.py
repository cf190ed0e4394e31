"""Measure the speed-up and the cost of collecting in other processes (`RayCollector`).

    python scripts/bench_ray.py
    python scripts/bench_ray.py --workloads publish

Needs the extra `ray`, and starts Ray on this machine. The learner takes a rollout, counts an update
and publishes, without training: only the engine is measured.

`inference`: env steps per second of four collectors and of one, with a policy that waits for 200 ms
in each acting call (`SlowPolicy`). `cpu`: the same of two collectors and of one, with an env that
computes for 5 ms of CPU time per step; needs two idle cores.

`publish`: seconds that the learner needs to publish 100 MB to four busy collectors, after the first
time. `cost`: the same for other sizes and numbers of collectors, and the seconds that the learner
needs to fetch rollouts of several sizes (medians). Lines are fitted to both by least relative
squares, and docs/distributed.md extrapolates them.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np

from lightning_rl import ActorCritic, CollectorContext, GymnasiumEnv, RayCollector, SlowPolicy
from lightning_rl.collectors.weights import changing_weights
from scripting import parser_of

WORKLOADS = ("inference", "cpu", "publish", "cost")
DELAY_MS, WORK_MS = 200, 5
RESULTS = Path("scripts/results/ray.json")

Row = dict[str, Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    args = parser.parse_args()
    results: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    measure = {"inference": inference, "cpu": cpu_bound, "publish": publish, "cost": cost}
    for name in args.workloads:
        load = os.getloadavg()[0]
        results[name] = measure[name]() | {"load": load, "cores": os.cpu_count()}
        print(name, json.dumps(results[name]), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1))


def inference() -> Row:
    """Compare four collectors with one if acting is slow."""
    make = partial(GymnasiumEnv, id="CartPole-v1", num_envs=2)
    policy = partial(SlowPolicy, policy=ActorCritic, delay_ms=DELAY_MS)
    return speed_up({count: rate(make, policy, count, num_steps=4) for count in (1, 4)})


def cpu_bound() -> Row:
    """Compare two collectors with one if env steps compute."""
    make = partial(make_slow, 4, WORK_MS, computes=True)
    return speed_up({count: rate(make, ActorCritic, count, num_steps=64) for count in (1, 2)})


def speed_up(rates: dict[int, float]) -> Row:
    one, several = rates.values()
    return {"steps_per_second": rates, "speed_up": several / one}


def publish() -> Row:
    """Time publications of 100 MB to four collectors."""
    milliseconds = [1000 * seconds for seconds in publications(5000, 4, 30)]
    most = max(milliseconds[1:])
    return {"ms": [round(each, 1) for each in milliseconds], "most_after_first_ms": most}


def cost() -> Row:
    """Fit lines to the learner's time for a publication and for a rollout."""
    published = [
        (count, *publication(width, count))
        for width, count in ((5000, 2), (1600, 2), (50, 2), (50, 1), (50, 4), (50, 8))
    ]
    landed = [landing(size) for size in (100, 10_000, 100_000)]
    count, weights, took = map(np.array, zip(*published, strict=True))
    fixed, per_collector, per_byte = fit(took, np.ones_like(took), count, weights)
    nbytes, lands = map(np.array, zip(*landed, strict=True))
    rollout, per_rollout_byte = fit(lands, np.ones_like(lands), nbytes)
    return {
        "published": published,  # collectors, bytes, seconds
        "landed": landed,  # bytes, seconds
        "publish_ms": 1e3 * fixed,
        "publish_ms_per_collector": 1e3 * per_collector,
        "publish_ms_per_MB": 1e9 * per_byte,
        "rollout_ms": 1e3 * rollout,
        "rollout_ms_per_MB": 1e9 * per_rollout_byte,
    }


def fit(took: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    """Return the coefficients of least relative squares."""
    return np.linalg.lstsq(np.stack(columns, 1) / took[:, None], np.ones_like(took), rcond=None)[0]


def rate(
    make_env: Callable[[], GymnasiumEnv],
    policy: Any,
    count: int,
    num_steps: int,
    seconds: float = 25.0,
) -> float:
    """Return env steps per second, after the first rollout of each collector."""
    with collecting(make_env, policy, count, num_steps) as collector:
        seen: set[int | None] = set()
        while len(seen) < count:
            turn(collector)
            seen.add(collector._last)
        start, before = time.perf_counter(), collector.env_steps
        while time.perf_counter() - start < seconds:
            turn(collector)
        return (collector.env_steps - before) / (time.perf_counter() - start)


def publications(width: int, count: int, times: int) -> list[float]:
    """Return the seconds of publications while all collectors collect."""
    policy = partial(ActorCritic, hidden_sizes=(width, width))
    # Slow steps, because this measures the weights only.
    with collecting(partial(make_slow, 4, 5.0), policy, count, num_steps=2000) as collector:
        collector._start()
        while sum(one.status == "collecting" for one in collector._remotes.remotes) < count:
            collector._remotes.poll(0.1)
        seconds = [collector._publish_seconds]
        for _ in range(times):
            time.sleep(0.05)
            collector.publish()
            seconds.append(collector._publish_seconds)
        return seconds


def publication(width: int, count: int) -> tuple[int, float]:
    """Return the bytes of the weights, and the seconds of a publication."""
    spaces = gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(2)
    weights = changing_weights(ActorCritic(*spaces, hidden_sizes=(width, width)))
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    return nbytes, median(publications(width, count, 20)[1:])


def landing(size: int) -> tuple[int, float]:
    """Return the bytes of a finished rollout, and the seconds to fetch it."""
    with collecting(partial(make_slow, size, 0.0), ActorCritic, 2, num_steps=64) as collector:
        for _ in range(4):
            turn(collector)
        seconds, before = [], collector._cluster.received_bytes
        for _ in range(20):
            time.sleep(0.3)  # until a rollout is finished
            start = time.perf_counter()
            collector.collect()
            seconds.append(time.perf_counter() - start)
            collector.policy.version += 1
            collector.publish()
        return (collector._cluster.received_bytes - before) // 20, median(seconds)


@contextmanager
def collecting(
    make_env: Callable[[], GymnasiumEnv], policy: Any, count: int, num_steps: int
) -> Iterator[RayCollector]:
    """Yield a collector with running processes, and end them."""
    env = make_env()
    made = policy(env.single_observation_space, env.single_action_space).eval()
    context = CollectorContext(env, made, num_steps, 1, make_env=make_env)
    collector = RayCollector(context, num_collectors=count, num_cpus=0.1)
    try:
        yield collector
    finally:
        collector.close()
        env.close()


def turn(collector: RayCollector) -> None:
    """Take a rollout, like a learner with instant updates."""
    collector.collect()
    collector.policy.version += 1
    collector.publish()


def make_slow(size: int, step_ms: float, computes: bool = False) -> GymnasiumEnv:
    """Make an env with observations of a given size, whose steps wait or compute."""

    class Slow(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-1, 1, (size,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.zeros(size, np.float32), {}

        def step(self, action: Any) -> Any:
            end = time.process_time() + step_ms / 1000
            if not computes:
                time.sleep(step_ms / 1000)
            while computes and time.process_time() < end:
                pass
            return np.zeros(size, np.float32), 0.0, False, False, {}

    gymnasium.registry.pop("Slow-v0", None)  # an env of another size
    gymnasium.register("Slow-v0", Slow)
    return GymnasiumEnv(id="Slow-v0", num_envs=1)


if __name__ == "__main__":
    main()
