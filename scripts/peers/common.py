"""What every runner shares: the workloads, the command line, the clock and the line it prints."""

import argparse
import functools
import importlib.metadata
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One training problem with its hyperparameters, the same for every library."""

    env: str
    num_envs: int
    steps: int
    """T, steps per env and iteration."""
    epochs: int = 0
    minibatches: int = 1
    """Per epoch."""
    replay_batch_size: int = 0
    """Samples of an off-policy update."""
    updates: int = 0
    """Off-policy updates of an iteration."""
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    normalize: bool = False
    """Observations and rewards, by running statistics."""
    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    threads: int = 1
    one_core: bool = False
    """Keep the process, and what it starts, to one core: JAX counts cores, and no threads."""
    warmup: int = 1
    """Iterations dropped before those that are timed."""
    iterations: int = 4

    @property
    def env_steps(self) -> int:
        """Of one iteration."""
        return self.num_envs * self.steps

    @property
    def batch_size(self) -> int:
        return self.env_steps // self.minibatches


HALF_CHEETAH = Workload("HalfCheetah-v5", 1, 2048, 10, 32, normalize=True, warmup=1, iterations=4)
CARTPOLE = Workload("CartPole-v1", 8, 128, 4, 4, learning_rate=2.5e-4, ent_coef=0.01)
PENDULUM = Workload("pendulum in torch", 4096, 24, 5, 4, hidden=(128, 128), activation="elu")
FRAMEWORK = Workload("CartPole", 64, 128, 4, 4, ent_coef=0.01, one_core=True, warmup=5)
"""Of W4, whose envs are batched tensors inside the framework: task in torch or env in JAX."""
SAC = {"hidden": (256, 256), "activation": "relu", "replay_batch_size": 256}
SAC_LEARNING_STARTS = 256
"""Random env steps of an off-policy workload before its first update."""
WORKLOADS = {
    "W1": replace(CARTPOLE, warmup=20, iterations=60),
    "W2": HALF_CHEETAH,
    "W2b": replace(HALF_CHEETAH, num_envs=8, iterations=2),
    "W3": replace(PENDULUM, threads=2, warmup=2, iterations=5),
    "W4-8": replace(FRAMEWORK, num_envs=8, warmup=25, iterations=200),
    "W4-64": replace(FRAMEWORK, iterations=50),
    "W4-1024": replace(FRAMEWORK, num_envs=1024, steps=16, iterations=30),
    "S1": Workload("HalfCheetah-v5", 1, 16, updates=16, warmup=36, iterations=60, **SAC),
    "S64": Workload("pendulum in torch", 64, 1, updates=8, warmup=36, iterations=120, **SAC),
}
CLASSIC = ("W1", "W2", "W2b")
ON_POLICY = (*CLASSIC, "W3")
W4 = ("W4-8", "W4-64", "W4-1024")
OFF_POLICY = ("S1", "S64")


@dataclass(frozen=True)
class Run:
    """The command line of a runner."""

    name: str
    workload: Workload
    seed: int
    device: str
    processes: int
    flags: argparse.Namespace

    @property
    def total(self) -> int:
        """Iterations, those of the warm-up included."""
        return self.workload.warmup + self.workload.iterations


def parse(workloads: tuple[str, ...], *flags: str, torch: bool = True) -> Run:
    """Read the command line, whose numbers replace those of the workload.

    `flags` are switches of this runner alone. Without `torch` that is not imported, whose start is
    timed as well.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=workloads)
    parser.add_argument("--warmup", type=int, help="iterations dropped before the timed ones")
    parser.add_argument("--iterations", type=int, help="timed iterations")
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1, help="of lightning_rl alone")
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ("warmup", "iterations", "num_envs", "threads")}
    given = {name: number for name, number in given.items() if number is not None}
    workload = replace(WORKLOADS[args.workload], **given)
    if workload.one_core and hasattr(os, "sched_setaffinity"):  # Linux alone has it
        # The last of those that are given: what else runs on a machine is on the first, as a rule.
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    if torch:
        from torch import set_num_threads  # here, so that --help does not wait for it

        set_num_threads(workload.threads)
    return Run(args.workload, workload, args.seed, args.device, args.processes, args)


class Clock:
    """Take the time of iterations, and of the methods of a library that it is wrapped around."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []
        """CPU seconds at the same moments, see `cpu_seconds`."""
        self.parts: list[dict[str, float]] = []
        self._spent: dict[str, float] = {}

    def now(self) -> float:
        """Return the time at which all work that was given to the device is done."""
        if self.run.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Begin the first iteration, unless it began before."""
        if not self.ends:
            launched = os.environ.get("PEERS_LAUNCHED")  # set by bench_peers.py
            self.startup = time.time() - float(launched) if launched else None
            self._end()

    def _end(self) -> None:
        self.ends.append(self.now())
        self.cpu_ends.append(cpu_seconds())

    def add(self, part: str, seconds: float) -> None:
        self._spent[part] = self._spent.get(part, 0.0) + seconds

    def wrap(
        self, owner: Any, method: str, part: str, after: Callable[[], None] | None = None
    ) -> None:
        """Count the time in `owner.method` as `part`, and call `after` behind it."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.start()
            began = self.now()
            result = original(*args, **kwargs)
            self.add(part, self.now() - began)
            if after is not None:
                after()
            return result

        setattr(owner, method, timed)

    def end_iterations(self, count: int) -> None:
        """End iterations of which only the last one's end is seen: all took as long."""
        self._end()
        for ends in (self.ends, self.cpu_ends):
            now, began = ends.pop(), ends[-1]
            ends += [began + (now - began) * (i + 1) / count for i in range(count)]
        self.parts += [{} for _ in range(count)]

    def end_iteration(self, rest: bool = True) -> None:
        """End an iteration; with `rest`, a part that was not timed is what the other one left."""
        self._end()
        spent, self._spent = self._spent, {}
        whole = self.ends[-1] - self.ends[-2]
        for part, other in (("collect", "update"), ("update", "collect")):
            if rest and part not in spent and other in spent:
                spent[part] = whole - spent[other]
        self.parts.append(spent)

    def report(self, library: str, package: str | None, **more: Any) -> None:
        """Print the result as one line of JSON."""
        run, work, done = self.run, self.run.workload, len(self.ends) - 1
        assert done >= run.total, f"{done} iterations were run, not {run.total}."
        seconds = self.ends[run.total] - self.ends[work.warmup]
        # Counted in hundredths; a run that takes none is a small one that nobody measures.
        cpu = max(self.cpu_ends[run.total] - self.cpu_ends[work.warmup], 0.01)
        env_steps = work.iterations * work.env_steps * run.processes

        def median(part: str) -> float | None:
            values = [p[part] for p in self.parts[work.warmup : run.total] if part in p]
            return statistics.median(values) if values else None

        row = {
            "library": library,
            "version": version_of(package or "torch"),
            "device": run.device,
            "threads": work.threads,
            "seed": run.seed,
            "env_steps": env_steps,
            "sps": env_steps / seconds,
            "steps_per_cpu_second": env_steps / cpu,
            "collect_seconds": median("collect"),
            "update_seconds": median("update"),
            "reduction_seconds": median("reduction"),
            "startup_seconds": self.startup,
            "start_cpu_seconds": self.cpu_ends[1],
            "first_iteration_seconds": self.ends[1] - self.ends[0],
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "torch": version_of("torch"),
            "versions": {name: version_of(name) for name in ("gymnasium", "mujoco", "numpy")},
            "settings": asdict(work),
            **more,
        }
        if run.device == "cuda":
            import torch

            row["gpu"] = torch.cuda.get_device_name()
            row["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 2**20
        print(json.dumps(row), flush=True)


def cpu_seconds() -> float:
    """Return the CPU time since the process began, with that of compilers which it called."""
    return sum(os.times()[:4])


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
