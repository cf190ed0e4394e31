"""Step an env through a rollout, and write what comes of each step into the rollout's storage."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tensordict import TensorDict

from lightning_rl.envs.shapes import check_like
from lightning_rl.rollout import copy_tree, step_views, time_major

if TYPE_CHECKING:
    from lightning_rl.envs.vector_env import VectorEnv


RESULTS = ("reward", "terminated", "truncated")


class RolloutStepper(ABC):
    """Steps an env on the storage of a rollout, slot by slot.

    An env chooses the kind (`VectorEnv.rollout_stepper`), by what is fastest for it.
    """

    @abstractmethod
    def step(self, t: int) -> dict[str, Any]:
        """Step by the action of slot `t`, write what follows from it, and return the info.

        Raises:
            ConfigurationError: for what does not have the shape that the env announced.
        """


class StepwiseStepper(RolloutStepper):
    """Calls `VectorEnv.step` and copies the tensors: works for every env, on every device.

    Args:
        env: is stepped.
        rollout: batch shape [N, T+1], written in place.
    """

    def __init__(self, env: "VectorEnv", rollout: TensorDict) -> None:
        self._env = env
        storage = time_major(rollout)
        self._observations, self._final_observations, self._actions = (
            [step.get(key) for step in step_views(rollout)]
            for key in ("observation", "final_observation", "action")
        )
        self._results = [storage[key].unbind(0) for key in RESULTS]
        self._extra = {key: storage[key].unbind(0) for key in env.extra_fields}

    def step(self, t: int) -> dict[str, Any]:
        """See `RolloutStepper.step`."""
        observation, *results, info = self._env.step(self._actions[t])
        if t == 0:  # once per rollout; what does not fit might be broadcast
            _check(self._env, observation, self._observations, results, self._results)
        copy_tree(self._observations[t + 1], observation)
        for views, result in zip(self._results, results, strict=True):
            views[t].copy_(result)
        for key, slots in self._extra.items():
            slots[t].copy_(info[key])
        if "final_obs" in info:
            _copy_final(self._env, self._final_observations[t], info["final_obs"])
        return info


class StepsArrays(Protocol):
    """An env that lives in NumPy."""

    def step_arrays(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Do what `VectorEnv.step` does, with arrays; `info` holds tensors all the same."""


class ArrayStepper(RolloutStepper):
    """Steps in NumPy, which enters a copy of a few numbers in a third of torch's time.

    Args:
        env: is stepped.
        rollout: batch shape [N, T+1], on the CPU, its observation one tensor; written in place.
    """

    def __init__(self, env: StepsArrays, rollout: TensorDict) -> None:
        self._env = env
        storage = time_major(rollout)
        self._actions, self._observations, self._rewards, self._terminated, self._truncated = (
            list(storage[key].numpy())
            for key in ("action", "observation", "reward", "terminated", "truncated")
        )
        self._final_observations = storage["final_observation"].unbind(0)

    def step(self, t: int) -> dict[str, Any]:
        """See `RolloutStepper.step`."""
        observation, *results, info = self._env.step_arrays(self._actions[t])
        if t == 0:
            slots = (self._rewards, self._terminated, self._truncated)
            _check(self._env, observation, self._observations, results, slots)
        reward, terminated, truncated = results
        self._observations[t + 1][...] = observation
        self._rewards[t][...] = reward
        self._terminated[t][...] = terminated
        self._truncated[t][...] = truncated
        if "final_obs" in info:
            _copy_final(self._env, self._final_observations[t], info["final_obs"])
        return info


def _check(
    env: Any, observation: Any, observations: Sequence[Any], results: Any, slots: Sequence[Any]
) -> None:
    """Compare what an env returned to the slots [N, ...] that it goes into."""
    name = type(env).__name__
    check_like(name, observation, observations[0], "observation")
    for field, result, slot in zip(RESULTS, results, slots, strict=True):
        check_like(name, result, slot[0], field)


def _copy_final(env: Any, slot: Any, final: Any) -> None:
    """Copy true final observations [N, ...], which come now and then: each time they are looked at.

    Those of one finished env alone, or of one env for all, would be broadcast.
    """
    check_like(type(env).__name__, final, slot, "final_obs")
    copy_tree(slot, final)
