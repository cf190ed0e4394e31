"""Say by which ways a run computes: what `run.json` has under `computing`."""

from typing import Any

from lightning.pytorch import Trainer

from lightning_rl.algorithms import Algorithm
from lightning_rl.envs import GymnasiumEnv
from lightning_rl.envs.chunks import ActionChunk
from lightning_rl.system import ranks
from lightning_rl.training.callbacks.typed import data_of


def computing_of(trainer: Trainer, algorithm: Algorithm) -> dict[str, Any]:
    """Return which of several ways to the same numbers, up to their last digits, a run takes.

    Returns:
        `compiled` and `why`; `steps_compiled` and `steps_why`, of a batched torch env;
        `cuda_graphs`, whether graphs of the update are replayed as such; `flush_denormal`, whether
        denormal numbers are taken for zero; `keeps_freed_memory`, whether the C library does;
        `sums_over_ranks`, the backend of `torch.distributed`, null for one process; `acting` and
        `stepping`, the classes that do it, null where nothing is collected; and, from the first
        rollout of MuJoCo's envs on, `mujoco_profiler`, whether that is on.
    """
    choice = algorithm.compilation
    collector = data_of(trainer).collector
    profiler = None if collector is None else _mujoco_profiler(collector.env)
    ways = {"acting": None, "stepping": None}
    return {
        "compiled": choice.compiled,
        "why": choice.why,
        "steps_compiled": algorithm.step_compilation.compiled,
        "steps_why": algorithm.step_compilation.why,
        "cuda_graphs": algorithm.replays_cuda_graphs,
        "flush_denormal": getattr(trainer, "flush_denormal", None),
        "keeps_freed_memory": getattr(trainer, "keeps_freed_memory", None),
        "sums_over_ranks": ranks.way_of_sums(),
        **(ways if collector is None else ways | collector.ways),
        **({} if profiler is None else {"mujoco_profiler": profiler}),
    }


def _mujoco_profiler(env: Any) -> bool | None:
    """Ask the innermost env, the only one that knows; None where it is not MuJoCo's."""
    while isinstance(env, ActionChunk):
        env = env.env
    return env.mujoco_profiler if isinstance(env, GymnasiumEnv) else None
