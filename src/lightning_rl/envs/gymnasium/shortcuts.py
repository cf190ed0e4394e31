"""Find the quickest way to step envs in one process."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from lightning_rl.envs.gymnasium.replay import CheckedReturns, ReplayableEpisode
from lightning_rl.system.extensions import HOOKS, import_present


def shortcut(env: gymnasium.Env) -> tuple[gymnasium.Env, int]:
    """Return the env below the wrappers that `InlineVectorEnv` replaces, and the time limit."""
    limit = np.iinfo(np.int64).max
    # By exact type: a subclass may do more in `step`.
    while type(env) in (ReplayableEpisode, TimeLimit, OrderEnforcing, CheckedReturns):
        if type(env) is TimeLimit:
            if env.spec is None or env.spec.max_episode_steps is None:
                break  # the spec could not be copied: this wrapper counts
            limit = min(limit, env.spec.max_episode_steps)
        env = env.env  # type: ignore[attr-defined]  # always a wrapper
    return env, int(limit)


def step_together(envs: Sequence[gymnasium.Env]) -> Callable[[Any], Iterable[Any]] | None:
    """Return a function that steps envs faster than one after the other, if an extension has it."""
    if not type(envs[0]).__module__.startswith("gymnasium.envs.mujoco."):
        return None
    module, _, name = HOOKS["step_together"].rpartition(".")
    extension = import_present(module)
    return None if extension is None else getattr(extension, name)(envs)
