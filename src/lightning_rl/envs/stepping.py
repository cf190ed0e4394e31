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
        slots = [views[t] for views in self._results]
        _check(self._env, observation, self._observations[t + 1], results, slots)
        copy_tree(self._observations[t + 1], observation)
        for slot, result in zip(slots, results, strict=True):
            slot.copy_(result)
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
        self._num_envs, self._size = self._rewards[0].size, self._observations[0].size
        self._dtype: Any = None

    def step(self, t: int) -> dict[str, Any]:
        """See `RolloutStepper.step`."""
        observation, *results, info = self._env.step_arrays(self._actions[t])
        reward, terminated, truncated = results
        num_envs = self._num_envs
        # What is like the last one that was looked at costs a few comparisons; of sizes alone, as
        # NumPy refuses to store another shape of that size, and asking for a shape makes a tuple.
        if (
            observation.size != self._size
            or observation.dtype is not self._dtype
            or reward.size != num_envs
            or terminated.size != num_envs
            or truncated.size != num_envs
        ):
            self._look_at(t, observation, results)
        try:
            self._observations[t + 1][...] = observation
            self._rewards[t][...] = reward
            self._terminated[t][...] = terminated
            self._truncated[t][...] = truncated
        except ValueError:
            self._look_at(t, observation, results)
            raise
        if "final_obs" in info:
            _copy_final(self._env, self._final_observations[t], info["final_obs"])
        return info

    def _look_at(self, t: int, observation: Any, results: Sequence[Any]) -> None:
        """Check what a step returned, and take the dtype of an observation that is good."""
        slots = (self._rewards[t], self._terminated[t], self._truncated[t])
        _check(self._env, observation, self._observations[t + 1], results, slots)
        self._dtype = observation.dtype


def _check(
    env: Any, observation: Any, place: Any, results: Sequence[Any], slots: Sequence[Any]
) -> None:
    """Compare what an env returned to the slots [N, ...] that it goes into.

    At each step: what does not fit might be broadcast.
    """
    name = type(env).__name__
    check_like(name, observation, place, "observation")
    for field, result, slot in zip(RESULTS, results, slots, strict=True):
        check_like(name, result, slot, field)


def _copy_final(env: Any, slot: Any, final: Any) -> None:
    """Copy true final observations [N, ...], which come now and then: each time they are looked at.

    Those of one finished env alone, or of one env for all, would be broadcast.
    """
    check_like(type(env).__name__, final, slot, "final_obs")
    copy_tree(slot, final)
