"""Runs that must end alike: compiled and eager, in the background and in turns, resumed and not."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from findings import Findings
from torch import Tensor
from training import Watch, difference, state_of, train

import bench_tasks
from lightning_rl import GRPO, PPO, AsyncCollector, CartPole, PointMass, PushCube
from lightning_rl.compiled import cuda_graphs, graphs
from lightning_rl.extensions.tasks.base import Task

TOLERANCE = 1e-5
"""Between two ways to compute the same in float32; a device may sum in any order."""

START_MOVED = 1e-4
"""What parameters must have moved by at least, for a comparison to mean anything."""

EPISODE, ROLLOUT = 20, 32
"""Steps. Episodes are shorter than a rollout, so that it has time limits, final observations and
new starts; and so short that contacts, which are chaotic, do not carry the last digits away."""


def compiled(findings: Findings) -> None:
    """Compare compiled updates to eager ones, and count what was replayed as CUDA graphs."""
    for algorithm in (PPO, GRPO):
        name = algorithm.__name__
        eager = train(findings, f"{name} eager", algorithm=algorithm)
        with counted_graphs() as count, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = train(findings, f"{name} compiled", algorithm=algorithm, model={"compile": True})
        _judge_compiled(findings, name, eager, run, caught)
        _judge_graphs(findings, name, count)


def _judge_compiled(findings: Findings, name: str, eager: Watch, run: Watch, caught: Any) -> None:
    end = state_of(run.module.policy)
    gap = difference(state_of(eager.module.policy), end)
    actor = [key for key in end if key.startswith("actor.")]
    moved = difference({k: run.start[k] for k in actor}, {k: end[k] for k in actor})
    reasons = [str(w.message) for w in caught if "compile: true has no effect" in str(w.message)]
    figure = f"differs by {gap:.2g}, moved by {moved:.2g}" if not reasons else reasons[0]
    passed = gap <= TOLERANCE and moved >= START_MOVED and not reasons
    bar = f"differs by at most {TOLERANCE:g}"
    findings.add(f"{name} compiled and eager", passed, figure, bar, difference=gap, moved=moved)


def _judge_graphs(findings: Findings, name: str, count: dict[str, int]) -> None:
    title = f"{name} replayed as CUDA graphs"
    if findings.device == "cpu":
        findings.add(title, None, "not on a CPU", **count)
        return
    figure = (
        f"{count['captures']} of {count['graphs']} graphs captured, "
        f"{count['replays']} of {count['calls']} calls replayed"
    )
    replayed = count["calls"] - count["graphs"]
    passed = 0 < count["captures"] == count["graphs"] and count["replays"] == replayed > 0
    findings.add(title, passed, figure, "each graph, from its second call on", **count)


def steps(findings: Findings) -> None:
    """Compare rollouts that graphs have stepped to eager ones, and count CUDA graphs.

    A small check compiles one task, which takes a CPU long.
    """
    for make in (CartPole,) if findings.small else (CartPole, PushCube, PointMass):
        with counted_graphs() as count:
            _judge_steps(findings, make)
        _judge_graphs(findings, f"steps of {make.__name__}", count)


def _judge_steps(findings: Findings, make: type[Task]) -> None:
    name = f"steps of {make.__name__}, compiled and eager"
    num_envs, rollouts = (16, 3) if findings.small else (4096, 4)
    env = partial(make, num_envs, max_episode_steps=EPISODE, device=findings.device)
    eager, graph = (bench_tasks.collector(env(), ROLLOUT, compiled) for compiled in (False, True))
    if not graph.context.compilation.compiled:
        findings.add(name, False, graph.context.compilation.why)
        return
    gap, ended, flags = 0.0, 0, True
    for _ in range(rollouts):
        one, other = eager.collect(), graph.collect()
        ended += int(one["done"].sum())
        ends, other_ends = one["final_observation"], other["final_observation"]
        flags &= ends.count == other_ends.count
        gap = max(gap, _relative(*(x.rows[: ends.count + 1] for x in (ends, other_ends))))
        for key in one.exclude("final_observation").keys(True, True):
            if one[key].is_floating_point():
                gap = max(gap, _relative(one[key], other[key]))
            else:
                flags &= torch.equal(one[key], other[key])
    passed = gap <= TOLERANCE and flags and ended > 0
    figure = f"{rollouts} rollouts of {num_envs:,} x {ROLLOUT} steps differ by {gap:.2g}, ends "
    figure += f"{'equal' if flags else 'NOT equal'}, {ended:,} episodes ended"
    bar = f"differ by at most {TOLERANCE:g}, ends equal"
    findings.add(name, passed, figure, bar, difference=gap, ended=ended)


def _relative(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, of numbers beyond 1 relative to them; infinite where NaN."""
    gap = ((one - other).abs() / one.abs().clamp(min=1.0)).nan_to_num(float("inf"))
    return float(gap.max())


@contextmanager
def counted_graphs() -> Iterator[dict[str, int]]:
    """Count the graphs that may be captured, their calls, and those that were replayed."""
    count = {"graphs": 0, "calls": 0, "captures": 0, "replays": 0}
    capture = cuda_graphs.capture

    class Counted(cuda_graphs.CapturedGraph):
        def __init__(self, graph: Callable[..., Sequence[Tensor]], moving: slice) -> None:
            super().__init__(graph, moving)
            count["graphs"] += 1

        def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
            count["calls"] += 1
            return super().__call__(*inputs)

    def captured(function: Any) -> tuple[Callable[[], None], Sequence[Tensor]]:
        replay, outputs = capture(function)
        count["captures"] += 1

        def counted() -> None:
            count["replays"] += 1
            replay()

        return counted, outputs

    with (
        mock.patch.object(graphs, "CapturedGraph", Counted),
        mock.patch.object(cuda_graphs, "capture", captured),
    ):
        yield count


def asynchronous(findings: Findings) -> None:
    """Compare collection in the background, without lag, to collection in turns."""
    in_turns = train(findings, "sync")
    again = train(findings, "sync again")
    gap = difference(state_of(in_turns.module), state_of(again.module))
    _judge_equal(findings, "two equal runs", gap)
    background = train(findings, "async 0", data={"collector": collector(0)})
    gap = difference(state_of(in_turns.module), state_of(background.module))
    _judge_equal(findings, "async without lag, and sync", gap)
    _with_lag(findings)


def collector(lag: int) -> Callable[..., AsyncCollector]:
    return partial(AsyncCollector, max_staleness=lag, timeout_s=60.0)


def _judge_equal(findings: Findings, name: str, gap: float) -> None:
    """Ask for the same bits on a CPU; a GPU may add in another order each time."""
    findings.compare(name, gap, 0.0 if findings.device == "cpu" else TOLERANCE)


def _with_lag(findings: Findings) -> None:
    """Capture graphs while the collector's thread uses the device."""
    iterations = 4 if findings.small else 12
    # Compiling takes a CPU too long for a small check, and captures nothing there.
    model = {"compile": not findings.small or findings.device == "cuda"}
    with counted_graphs() as count:
        data = {"collector": collector(1)}
        run = train(findings, "async 1", model=model, data=data, iterations=iterations)
    module = run.module
    finite = all(value.isfinite().all() for value in state_of(module).values())
    versions = int(module.policy.version)
    passed = finite and versions == iterations and module.skipped_steps == 0
    figure = f"{versions} updates, {'all finite' if finite else 'NaN in the weights'}"
    if findings.device == "cuda":
        figure += (
            f", {count['replays']} replays beside the thread, {count['captures']} captures of "
            f"{count['graphs']} graphs"
        )
        # The rollout buffers take turns, and the graphs must not notice.
        passed = passed and count["replays"] > 0 and count["captures"] == count["graphs"]
    name = f"async with a lag of 1{', compiled' if model['compile'] else ''}"
    findings.add(name, passed, figure, f"{iterations} updates, all finite", **count)


def resume(findings: Findings) -> None:
    """Compare runs that were cut in the middle and resumed to uninterrupted ones."""
    kinds: dict[str, dict[str, Any]] = {"sync": {}, "async": {"data": {"collector": collector(0)}}}
    if findings.device == "cuda" or not findings.small:
        kinds["compiled"] = {"model": {"compile": True}}
    for kind, settings in kinds.items():
        whole = _cut(findings, f"{kind} whole", settings)
        _cut(findings, f"{kind} cut", settings, max_epochs=1)
        checkpoint = findings.directory / f"{kind}_cut" / "checkpoints" / "last.ckpt"
        rest = _cut(findings, f"{kind} cut", settings, ckpt_path=checkpoint)
        gap = difference(_everything(whole), _everything(rest))
        done, all_of_it = len(rest.allocated), len(whole.allocated)
        if not 0 < done < all_of_it:
            raise RuntimeError(f"The resumed run made {done} of {all_of_it} iterations: not a rest")
        _judge_equal(findings, f"resumed and uninterrupted, {kind}", gap)


def _cut(findings: Findings, name: str, settings: dict[str, Any], **kwargs: Any) -> Watch:
    """Train in epochs of two iterations, with checkpoints."""
    ckpt_path = kwargs.pop("ckpt_path", None)
    data = {"iterations_per_epoch": 2} | settings.get("data", {})
    changed = {"data": data, "trainer": {"enable_checkpointing": True} | kwargs}
    return train(findings, name, **settings | changed, iterations=4, ckpt_path=ckpt_path)


def _everything(watch: Watch) -> dict[str, Tensor]:
    """Return weights and statistics, and what the optimizer keeps."""
    optimizer = watch.trainer.optimizers[0].state_dict()["state"]
    kept = {
        f"optimizer {number} {key}": value.detach().cpu()
        for number, state in optimizer.items()
        for key, value in state.items()
    }
    return state_of(watch.module) | kept
