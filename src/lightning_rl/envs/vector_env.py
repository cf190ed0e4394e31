"""The API of envs: Gymnasium's `VectorEnv` with tensors, and steppers that fill rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.infos import check_info
from lightning_rl.envs.step_results import ObservedChoices, check_like
from lightning_rl.rollout.contract import (
    INFO,
    FieldSpec,
    FinalObservationWriter,
    copy_tree,
    intervention_fields,
    step_views,
    time_major,
)
from lightning_rl.rollout.goals import GoalFunction
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.renamed import RefusesEarlierNames

Observation = Tensor | TensorDict
"""[N, ...], or a tree of such tensors."""

Seed = int | Sequence[int] | None
"""An int seeds env i with seed + i; a sequence has one seed per env; None keeps the generators."""

Info = dict[str, Any]
"""Further results of `reset` and `step`, by name."""

Options = dict[str, Any] | None
"""Options of `reset`, as in Gymnasium; most envs have none."""

RESULTS = ("reward", "terminated", "truncated")
"""Step results between the observation and the info, each [N]."""


PENALTY_FIELD: dict[str, FieldSpec] = {"penalty": ((), torch.float32)}
"""Extra rollout field of envs that report a penalty of part of the action."""


class RestoreError(RuntimeError):
    """An env cannot restore a saved state; the message says why."""


class VectorEnv(ABC, RefusesEarlierNames):
    """N copies of an env that are stepped together, with same-step autoreset.

    Success and failure are `terminated`; the time limit is `truncated`. Returned tensors stay valid
    until the next step. `num_envs` must be the first constructor argument.
    """

    num_envs: int
    device: torch.device
    single_observation_space: gymnasium.Space[Any]
    single_action_space: gymnasium.Space[Any]
    render_fps: float = 30.0
    """Env steps per second of real time, for videos."""

    metadata: Mapping[str, Any] = {}  # of a class or an instance, never written
    """Metadata as in Gymnasium, such as `control_period` (s), `render_fps` or `joint_names`."""

    max_episode_steps: int | None = None
    """Time limit in env steps; None: no limit, or unknown."""

    steps_per_action: int = 1
    """Maximum env steps per action: more than 1 for action chunks."""

    persistent_state: tuple[str, ...] = ()
    """State entries that stay when an episode ends; a seeded reset restarts them."""

    reports_interventions: bool = False
    """Whether a person or a script may take over, and rollouts store it; see `step`."""

    reports_penalty: bool = False
    """Whether `step` reports the penalty of part of the action, and rollouts store it."""

    info_fields: Mapping[str, tuple[int, ...]] = {}
    """Shapes of the info entries that rollouts store, by name; see `record_info`."""

    @property
    def progress(self) -> int:
        """Progress counter that rises during long calls, such as a replay of episodes.

        While the counter rises, the call does not count as hanging; see `data.env_timeout_s`.
        """
        return 0

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        """Additional rollout fields of each step, which `info` contains."""
        space = self.single_action_space
        taken_over = intervention_fields(space) if self.reports_interventions else {}
        infos = {INFO + name: (shape, torch.float32) for name, shape in self.info_fields.items()}
        return taken_over | (PENALTY_FIELD if self.reports_penalty else {}) | infos

    @property
    def goals(self) -> GoalFunction | None:
        """The function that judges other goals; None if the env is no goal env."""
        return None

    @abstractmethod
    def reset(self, seed: Seed = None, options: Options = None) -> tuple[Observation, Info]:
        """Begin an episode in every env; return observation [N, ...] and info."""

    @abstractmethod
    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Step every env, and reset the finished envs.

        Args:
            action: [N, *A].

        Returns:
            observation [N, ...] (finished envs: of the next episode), reward [N] float, terminated
            [N] bool, truncated [N] bool, and info. Info entries are optional and describe the step
            before the reset:

            - `final_obs` [N, ...]: true final observations of finished envs; other rows have no
              meaning. Required for truncated episodes.
            - `success` [N] bool: the outcome of finished episodes.
            - `rewards` (reward terms), `metrics`, `final_metrics` (metrics of finished episodes
              only): dicts of tensors [N], NaN for missing values.
            - `log`: dict of tensors [] by chart name, averaged over the steps of a rollout.
            - `executed_action` [N, *A] (default: `action`) and `intervened` [N] bool, whether a
              person or a script had taken over (default: whether the actions differ); read if the
              env `reports_interventions`.
            - `penalty` [N] float32: the reward of part of the action (see `GripperSAC`), usually at
              most 0; required at every step if the env `reports_penalty`.
        """

    def rollout_stepper(self, rollout: TensorDict) -> "RolloutStepper":
        """Return the stepper of this env for the storage of a rollout [N, T+1].

        Override it if copying the results of `step` is too slow.
        """
        return StepwiseStepper(self, rollout)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for an exact (bit for bit) `load_state_dict`, or None if not supported.

        The state holds plain numbers, strings and tensors.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Restore a saved state; return its observation [N, ...].

        Raises:
            RestoreError: the env cannot restore this state.
        """
        raise RestoreError(f"{type(self).__name__} does not save its state")

    def make_renderable(self) -> None:  # most envs can always be drawn, or never
        """Prepare for `render`. Call before a seeded `reset`; may restart all envs.

        Raises:
            ConfigurationError: this env cannot be drawn.
        """

    def render(self, rows: Sequence[int]) -> np.ndarray:
        """Return pictures uint8 [M, H, W, 3] of M envs; `rows` are their indices.

        Raises:
            ConfigurationError: this env cannot be drawn.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot be drawn: it has no render(rows). Define the method, or "
            "turn videos off."
        )

    def film(self, rows: Sequence[int], every: int) -> dict[int, dict[int, np.ndarray]]:
        """Return pictures from within the last action; see `ActionChunk.film`."""
        return {}

    def show(self) -> None:
        """Open a window that shows every step after the next `reset`; restarts all envs.

        Raises:
            ConfigurationError: this env has no window.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot open a window: film it, --video true."
        )

    def stop_interventions(self) -> None:  # most envs have no interventions
        """Disable interventions before the first `reset`, for evaluations.

        Interventions that the env cannot prevent are still reported.
        """

    def add_events(self, events: Mapping[str, Any]) -> None:
        """Add events by name (`Event`), such as training events, before the first `reset`.

        Raises:
            ConfigurationError: this env does not take these events.
        """
        raise ConfigurationError(
            f"{type(self).__name__} takes no events ({', '.join(events)}). Envs with events: "
            "a Task, a MujocoEnv, your own ManagedEnv, and a TensorSimulator."
        )

    def record_info(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Store entries of each step's info in rollouts, as float32; call before the first `reset`.

        Args:
            shapes: shape of each entry in one env, by name.

        Raises:
            ConfigurationError: this env keeps no entries of its info.
        """
        self.info_fields = shapes

    def close(self) -> None:  # most envs hold nothing that needs closing
        """Free processes and windows. May be called more than once."""


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


class StepwiseStepper(RolloutStepper):
    """Calls `VectorEnv.step` and copies the tensors into `rollout` [N, T+1], for any env."""

    def __init__(self, env: VectorEnv, rollout: TensorDict) -> None:
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


def interventions(env: VectorEnv, action: Tensor, info: dict[str, Any]) -> dict[str, Tensor]:
    """Return `executed_action` and `intervened` of a step with action [N, *A]."""
    executed: Tensor = info.get("executed_action", action)
    check_like(type(env).__name__, executed, action, "executed_action")
    # An env that reports only the executed action: another action means an intervention.
    differs = (executed != action.to(executed.device)).view(len(action), -1).any(1)
    intervened: Tensor = info.get("intervened", differs)
    check_like(type(env).__name__, intervened, differs, "intervened")
    return {"executed_action": executed, "intervened": intervened}


def wrap_arrays(observation: Any) -> Observation:
    """Wrap arrays, or dicts of arrays, as tensors [N, ...] that share their memory."""
    if isinstance(observation, dict):
        values = {key: wrap_arrays(value) for key, value in observation.items()}
        return TensorDict(values, [len(next(iter(values.values())))])
    return torch.from_numpy(observation)


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
