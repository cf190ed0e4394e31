"""Describe which implementations a run uses: the entry `computing` of `run.json`."""

from typing import Any

from lightning.pytorch import Trainer

from lightning_rl.algorithms import Algorithm
from lightning_rl.envs import GymnasiumEnv
from lightning_rl.envs.chunks import ActionChunk
from lightning_rl.system import ranks
from lightning_rl.training.callbacks.typed import data_of


def computing_of(trainer: Trainer, algorithm: Algorithm) -> dict[str, Any]:
    """Return which implementations a run uses; their results are equal up to rounding.

    `compiled` and `why`; `steps_compiled` and `steps_why`, for a batched torch env; `cuda_graphs`;
    `flush_denormal`; `keeps_freed_memory`; `sums_over_ranks`, the `torch.distributed` backend, null
    for one process; `acting` and `stepping`, the class names of actor and stepper; and
    `mujoco_profiler`.
    """
    learner = algorithm.learner
    collector = data_of(trainer).collector
    profiler = None if collector is None else _mujoco_profiler(collector.env)
    code_paths = {"acting": None, "stepping": None}
    return {
        "compiled": learner.compilation.compiled,
        "why": learner.compilation.why,
        "steps_compiled": algorithm.step_compilation.compiled,
        "steps_why": algorithm.step_compilation.why,
        "cuda_graphs": learner.graphs is not None and learner.graphs.captured,
        "flush_denormal": getattr(trainer, "flush_denormal", None),
        "keeps_freed_memory": getattr(trainer, "keeps_freed_memory", None),
        "sums_over_ranks": ranks.reduction_backend(),
        **(code_paths if collector is None else code_paths | collector.code_paths),
        **({} if profiler is None else {"mujoco_profiler": profiler}),
    }


def _mujoco_profiler(env: Any) -> bool | None:
    # Chunks wrap the env that has the profiler.
    while isinstance(env, ActionChunk):
        env = env.env
    return env.mujoco_profiler if isinstance(env, GymnasiumEnv) else None
