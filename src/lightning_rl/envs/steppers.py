"""Step an env on the storage of a rollout."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.infos import check_info
from lightning_rl.envs.step_results import ObservedChoices, check_like
from lightning_rl.rollout.contract import (
    INFO,
    FieldSpec,
    FinalObservationWriter,
    copy_tree,
    step_views,
    time_major,
)

RESULTS = ("reward", "terminated", "truncated")
"""Step results between the observation and the info, each [N]."""


class StepReports(NamedTuple):
    """Summed reports of the steps of a rollout.

    Attributes:
        names: R names, `rewards/<term>` and `metrics/<name>`.
        sums: [R], sums over steps and envs, without NaN.
        counts: [R], the number of summands of each sum.
        reports_success: whether the env reports the success of episodes.
    """

    names: tuple[str, ...]
    sums: Tensor
    counts: Tensor
    reports_success: bool


def named_reports(info: dict[str, Any]) -> dict[str, Tensor]:
    """Return the reward terms and metrics of an info, each [N] float32, by metric name."""
    return {
        f"{kind}/{name}": value.float()
        for kind in ("rewards", "metrics")
        for name, value in info.get(kind, {}).items()
        if value.dim() == 1  # an entry of another shape is no report of the envs
    }


class RolloutStepper(ABC):
    """Steps an env on the storage of a rollout, slot by slot; see `VectorEnv.rollout_stepper`."""

    @abstractmethod
    def step(self, t: int) -> dict[str, Any]:
        """Execute the action of slot `t`, write the results to the storage, and return the info.

        Raises:
            ConfigurationError: a result differs from the announced shape.
        """

    def finish(self) -> StepReports | None:
        """Write pending results after the last step; return the reports missing in infos."""
        return None


class SteppedEnv(Protocol):
    """The part of `VectorEnv` that a stepper uses."""

    num_envs: int
    single_observation_space: gymnasium.Space[Any]
    info_fields: Mapping[str, tuple[int, ...]]
    reports_interventions: bool

    @property
    def extra_fields(self) -> dict[str, FieldSpec]: ...

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]: ...


class StepwiseStepper(RolloutStepper):
    """Calls `VectorEnv.step` and copies the tensors into `rollout` [N, T+1], for any env."""

    def __init__(self, env: SteppedEnv, rollout: TensorDict) -> None:
        self._env = env
        storage = time_major(rollout)
        self._observations, self._actions = (
            [step.get(key) for step in step_views(rollout)] for key in ("observation", "action")
        )
        self._finals = FinalObservationWriter(rollout)
        self._results = [storage[key].unbind(0) for key in RESULTS]
        # All views of the storage are made here, so that a step makes none.
        self._extra = {k.removeprefix(INFO): storage[k].unbind(0) for k in env.extra_fields}
        self._info_fields = tuple(env.info_fields)
        self._intervened = env.reports_interventions
        self._remote = storage["terminated"].device.type != "cpu"  # looking at values there waits
        self._choices = ObservedChoices(type(env).__name__, env.single_observation_space)

    def step(self, t: int) -> dict[str, Any]:
        # Copy, because an env may write into its action.
        observation, *results, info = self._env.step(self._actions[t].clone())
        slots = [views[t] for views in self._results]
        check_results(self._env, observation, self._observations[t + 1], results, slots)
        if not self._remote:
            self._choices.check(observation)
        copy_tree(self._observations[t + 1], observation)
        for slot, result in zip(slots, results, strict=True):
            slot.copy_(result)  # converts the dtype, too
        if self._intervened:
            info = info | interventions(self._env, self._actions[t], info)
        check_info(self._env, info, self._env.num_envs, tuple(self._extra))
        for key in self._info_fields:  # another shape might broadcast
            check_like(type(self._env).__name__, info[key], self._extra[key][t], f"info {key}")
        for key, slots in self._extra.items():  # `check_info` has found all of them
            slots[t].copy_(info[key])
        if "final_obs" in info:
            _, terminated, truncated = results
            # Copy all rows: rows of finished envs alone would be assigned to the first envs.
            _check_final(self._env, self._observations[t], info["final_obs"])
            # Do not read the flags from storage, which would synchronize with an accelerator.
            flags_on_cpu = terminated.device.type == "cpu" and self._remote
            done = terminated.bool() | truncated.bool() if flags_on_cpu else None
            self._finals.write(t, info["final_obs"], done)
        return info

    def finish(self) -> None:
        self._finals.finish()


def interventions(env: Any, action: Tensor, info: dict[str, Any]) -> dict[str, Tensor]:
    """Return `executed_action` and `intervened` of a step with action [N, *A]."""
    executed: Tensor = info.get("executed_action", action)
    check_like(type(env).__name__, executed, action, "executed_action")
    # An env that reports only the executed action: another action means an intervention.
    differs = (executed != action.to(executed.device)).view(len(action), -1).any(1)
    intervened: Tensor = info.get("intervened", differs)
    check_like(type(env).__name__, intervened, differs, "intervened")
    return {"executed_action": executed, "intervened": intervened}


class SupportsNumpySteps(Protocol):
    """An env that steps NumPy arrays."""

    def step_arrays(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step by arrays [N, *A] of actions as in `VectorEnv.step`; `info` holds tensors."""


class ArrayStepper(RolloutStepper):
    """Steps in NumPy, three times as fast as torch for a few numbers.

    Writes into `rollout` [N, T+1] on the CPU. The observation must be one tensor.
    """

    def __init__(self, env: SupportsNumpySteps, rollout: TensorDict) -> None:
        self._env = env
        storage = time_major(rollout)
        self._actions, self._observations, self._rewards, self._terminated, self._truncated = (
            list(storage[key].numpy())
            for key in ("action", "observation", "reward", "terminated", "truncated")
        )
        self._slots = storage["observation"].unbind(0)  # tensors, for the check of `final_obs`
        self._finals = FinalObservationWriter(rollout)
        self._num_envs, self._size = self._rewards[0].size, self._observations[0].size
        self._dtype: Any = None

    def step(self, t: int) -> dict[str, Any]:
        observation, *results, info = self._env.step_arrays(self._actions[t])
        reward, terminated, truncated = results
        num_envs = self._num_envs
        # Fast path: compare sizes and the dtype of the last checked observation. NumPy refuses to
        # store another shape of equal size, and `shape` allocates a tuple.
        if (
            observation.size != self._size
            or observation.dtype is not self._dtype
            or reward.size != num_envs
            or terminated.size != num_envs
            or truncated.size != num_envs
        ):
            self._check_step(t, observation, results)
        try:
            self._observations[t + 1][...] = observation  # into the rollout's own memory
            self._rewards[t][...] = reward
            self._terminated[t][...] = terminated
            self._truncated[t][...] = truncated
        except ValueError:
            self._check_step(t, observation, results)
            raise  # the check has found no fault, so NumPy's error tells more
        if "final_obs" in info:
            _check_final(self._env, self._slots[t], info["final_obs"])
            self._finals.write(t, info["final_obs"])
        return info

    def _check_step(self, t: int, observation: Any, results: Sequence[Any]) -> None:
        slots = (self._rewards[t], self._terminated[t], self._truncated[t])
        check_results(self._env, observation, self._observations[t + 1], results, slots)
        self._dtype = observation.dtype  # the next step compares only with this


def check_results(
    env: Any, observation: Any, place: Any, results: Sequence[Any], slots: Sequence[Any]
) -> None:
    """Compare the results of an env with their slots [N, ...]: wrong shapes may broadcast."""
    name = type(env).__name__
    check_like(name, observation, place, "observation")
    for field, result, slot in zip(RESULTS, results, slots, strict=True):
        check_like(name, result, slot, field)


def _check_final(env: Any, slot: Any, final: Any) -> None:
    check_like(type(env).__name__, final, slot, "final_obs")
