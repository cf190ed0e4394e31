"""Say what an env is: the API of Gymnasium's `VectorEnv`, with tensors.

And how it is stepped through a rollout, with what comes of each step written into the storage.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.step_results import ObservedChoices, check_info, check_like
from lightning_rl.rollout.contract import (
    FieldSpec,
    FinalObservationWriter,
    copy_tree,
    intervention_fields,
    step_views,
    time_major,
)
from lightning_rl.system.errors import ConfigurationError

Observation = Tensor | TensorDict
"""[N, ...], or a tree of such."""

Seed = int | Sequence[int] | None
"""Of env 0, with env i seeded by seed + i; of each env; or none: go on with the present streams."""

RESULTS = ("reward", "terminated", "truncated")
"""What a step returns between the observation and the info, each [N]."""


PENALTY_FIELD: dict[str, FieldSpec] = {"penalty": ((), torch.float32)}
"""What a rollout holds of an env that reports what a part of the action costs."""


class RestoreError(RuntimeError):
    """An env cannot be brought back to a saved state; the message says why."""


class VectorEnv(ABC):
    """N copies of an env stepped together.

    Finished ones reset inside `step` ("same-step autoreset").

    Failure or success is `terminated`; running out of time is `truncated`. Tensors that an env
    returns hold until its next step. The first argument of a subclass's constructor is `num_envs`;
    the command line fills it in.
    """

    num_envs: int
    device: torch.device
    single_observation_space: gymnasium.Space[Any]
    single_action_space: gymnasium.Space[Any]
    render_fps: float = 30.0
    """Env steps per second of real time, where pictures of them are to move as fast."""

    metadata: Mapping[str, Any] = {}  # of a class or an instance, never written
    """What an env says of itself, as Gymnasium's do: `control_period` in seconds, or `render_fps`;
    `joint_names`, `joint_stiffness` and others, which an exported policy takes along."""

    max_episode_steps: int | None = None
    """Env steps after which time cuts an episode; None where it does not, or nobody knows."""

    steps_per_action: int = 1
    """Env steps that an action takes at most: more than 1 where it is a chunk of actions."""

    reports_interventions: bool = False
    """Whether a person or a script may take over, which rollouts are to hold; see `step`."""

    reports_penalty: bool = False
    """Whether what part of an action costs is said apart from the reward, which rollouts are to
    hold; see `step`."""

    @property
    def progress(self) -> int:
        """A number that rises within a call that may last, such as a replay of episodes.

        A call during which it rises does not hang; see `data.env_timeout_s`.
        """
        return 0

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        """What a rollout holds of each step beside what every env says; found in `info`."""
        space = self.single_action_space
        taken_over = intervention_fields(space) if self.reports_interventions else {}
        return taken_over | (PENALTY_FIELD if self.reports_penalty else {})

    @abstractmethod
    def reset(
        self, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in every env.

        Args:
            seed: an int seeds env i with `seed + i`, a sequence gives one seed per env, None goes
                on with the generators as they are.
            options: passed on to the envs.

        Returns:
            observation [N, ...], info.
        """

    @abstractmethod
    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every env, and reset those that finish.

        Args:
            action: [N, *A].

        Returns:
            observation [N, ...] (of the next episode where one finished), reward [N] float,
            terminated [N] bool, truncated [N] bool, and info. Where an env finished,
            `info["final_obs"]` [N, ...] holds its true final observation (other rows mean nothing;
            the key may be absent where no env finished); an episode that was truncated without one
            is refused. What else `info` says is read where present, at every step, and is of the
            step taken, from before a reset: `success` [N] bool, where an episode ended its outcome;
            `rewards`, what each term added, and `metrics`, both dicts of tensors [N], NaN where an
            env says nothing. Metrics known of finished episodes alone may stand in `final_metrics`.
            Where the env `reports_interventions`: `executed_action` [N, *A], what it did instead of
            what it was told, and `intervened` [N] bool, whether a person or a script had taken
            over; without the former it did as it was told, without the latter the two are compared.
            Where it `reports_penalty`: `penalty` [N] float32, at every step, what the step adds to
            the reward of a part of the action alone (see `GripperSAC`), at most 0 as a rule.
        """

    def rollout_stepper(self, rollout: TensorDict) -> "RolloutStepper":
        """Return what steps this env on the storage of a rollout [N, T+1].

        Called once by the collector. An env with a faster way than copying what `step` returns
        gives it.
        """
        return StepwiseStepper(self, rollout)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what `load_state_dict` needs to go on bit for bit, or None.

        It holds plain numbers, strings and tensors, so that a checkpoint loads without unpickling.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Go on from a saved state, and return the observation [N, ...] it was saved with.

        Raises:
            RestoreError: where that is not possible.
        """
        raise RestoreError(f"{type(self).__name__} does not save its state")

    def make_renderable(self) -> None:  # noqa: B027  # most envs can always be drawn, or never
        """Get ready for `render`. Called before a `reset` with seeds; may begin all envs anew.

        Raises:
            ConfigurationError: where this env cannot be drawn.
        """

    def render(self, rows: Sequence[int]) -> np.ndarray:
        """Return a picture of each of M envs as it is now, uint8 [M, H, W, 3].

        Args:
            rows: which envs.

        Raises:
            ConfigurationError: where this env cannot be drawn.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot be drawn: it has no render(rows). Give it one, or make "
            "no videos of it."
        )

    def show(self) -> None:
        """Open a window that shows each step from the next `reset` on; all envs begin anew.

        Raises:
            ConfigurationError: where this env has no window.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no window to be shown in: film it, --video true."
        )

    def stop_interventions(self) -> None:  # noqa: B027  # in most envs nobody takes over
        """Leave every step to the policy from here on, as an evaluation wants it.

        Called before the first `reset`. What an env cannot keep from happening, it says as before.
        """

    def close(self) -> None:  # noqa: B027  # most envs hold nothing that needs closing
        """Free processes and windows. May be called more than once."""


class VectorEnvWrapper(VectorEnv):
    """An env around another one, which answers for all that a subclass does not say itself.

    A subclass takes `num_envs` and what makes the env, as a config gives them, and hands the env
    on. Rollouts hold what the wrapper's own `step` returns.

    Args:
        env: is wrapped.
    """

    @abstractmethod
    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        for attribute in VectorEnv.__annotations__:
            setattr(self, attribute, getattr(env, attribute))

    @property
    def progress(self) -> int:
        return self.env.progress

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return self.env.extra_fields

    def reset(
        self, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        return self.env.reset(seed, options)

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        return self.env.step(action)

    def state_dict(self) -> dict[str, Any] | None:
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        return self.env.load_state_dict(state)

    def make_renderable(self) -> None:
        self.env.make_renderable()

    def render(self, rows: Sequence[int]) -> np.ndarray:
        return self.env.render(rows)

    def show(self) -> None:
        self.env.show()

    def stop_interventions(self) -> None:
        self.env.stop_interventions()

    def close(self) -> None:
        self.env.close()


class StepReports(NamedTuple):
    """What an env said in the steps of a rollout, where that is summed up already.

    Attributes:
        names: `rewards/<term>` and `metrics/<name>`, R of them.
        sums: [R], the sums over steps and envs of what is not NaN.
        counts: [R], of how many numbers.
        reports_success: whether it says of an episode that it succeeded or not.
    """

    names: tuple[str, ...]
    sums: Tensor
    counts: Tensor
    reports_success: bool


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

    def finish(self) -> StepReports | None:
        """Write what is left to write, after the last step of a rollout.

        Returns:
            what the env said where the infos of `step` were silent about it; None where they told.
        """
        return None


class StepwiseStepper(RolloutStepper):
    """Calls `VectorEnv.step` and copies the tensors: works for every env, on every device.

    Args:
        env: is stepped.
        rollout: batch shape [N, T+1], written in place.
    """

    def __init__(self, env: VectorEnv, rollout: TensorDict) -> None:
        self._env = env
        storage = time_major(rollout)
        self._observations, self._actions = (
            [step.get(key) for step in step_views(rollout)] for key in ("observation", "action")
        )
        self._finals = FinalObservationWriter(rollout)
        self._results = [storage[key].unbind(0) for key in RESULTS]
        self._extra = {key: storage[key].unbind(0) for key in env.extra_fields}
        self._intervened = env.reports_interventions
        self._remote = storage["terminated"].device.type != "cpu"
        self._choices = ObservedChoices(type(env).__name__, env.single_observation_space)

    def step(self, t: int) -> dict[str, Any]:
        # A copy of the action, into which an env may write.
        observation, *results, info = self._env.step(self._actions[t].clone())
        slots = [views[t] for views in self._results]
        check_results(self._env, observation, self._observations[t + 1], results, slots)
        if not self._remote:
            self._choices.check(observation)
        copy_tree(self._observations[t + 1], observation)
        for slot, result in zip(slots, results, strict=True):
            slot.copy_(result)
        if self._intervened:
            info = info | interventions(self._env, self._actions[t], info)
        check_info(self._env, info, self._env.num_envs, tuple(self._extra))
        for key, slots in self._extra.items():
            slots[t].copy_(info[key])
        if "final_obs" in info:
            _, terminated, truncated = results
            _check_final(self._env, self._observations[t], info["final_obs"])
            # On an accelerator the storage knows too, but would have to be asked for it.
            known = terminated.device.type == "cpu" and self._remote
            ended = terminated.bool() | truncated.bool() if known else None
            self._finals.write(t, info["final_obs"], ended)
        return info

    def finish(self) -> None:
        self._finals.finish()


def interventions(env: VectorEnv, action: Tensor, info: dict[str, Any]) -> dict[str, Tensor]:
    """Return `executed_action` and `intervened` of a step by the action [N, *A]; see `step`."""
    executed: Tensor = info.get("executed_action", action)
    check_like(type(env).__name__, executed, action, "executed_action")
    differs = (executed != action.to(executed.device)).view(len(action), -1).any(1)
    intervened: Tensor = info.get("intervened", differs)
    check_like(type(env).__name__, intervened, differs, "intervened")
    return {"executed_action": executed, "intervened": intervened}


def wrap_arrays(observation: Any) -> Observation:
    """Wrap arrays, or dicts of them, as tensors [N, ...] that share their memory."""
    if isinstance(observation, dict):
        values = {key: wrap_arrays(value) for key, value in observation.items()}
        return TensorDict(values, [len(next(iter(values.values())))])
    return torch.from_numpy(observation)


class StepsArrays(Protocol):
    """An env that lives in NumPy."""

    def step_arrays(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Do what `VectorEnv.step` does, with arrays; `info` holds tensors all the same.

        Args:
            actions: [N, *A], in the dtype of the action space.
        """


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
        self._slots = storage["observation"].unbind(0)
        self._finals = FinalObservationWriter(rollout)
        self._num_envs, self._size = self._rewards[0].size, self._observations[0].size
        self._dtype: Any = None

    def step(self, t: int) -> dict[str, Any]:
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
            _check_final(self._env, self._slots[t], info["final_obs"])
            self._finals.write(t, info["final_obs"])
        return info

    def _look_at(self, t: int, observation: Any, results: Sequence[Any]) -> None:
        """Check what a step returned, and take the dtype of an observation that is good."""
        slots = (self._rewards[t], self._terminated[t], self._truncated[t])
        check_results(self._env, observation, self._observations[t + 1], results, slots)
        self._dtype = observation.dtype


def check_results(
    env: Any, observation: Any, place: Any, results: Sequence[Any], slots: Sequence[Any]
) -> None:
    """Compare what an env returned to the slots [N, ...] that it goes into.

    At each step: what does not fit might be broadcast.
    """
    name = type(env).__name__
    check_like(name, observation, place, "observation")
    for field, result, slot in zip(RESULTS, results, slots, strict=True):
        check_like(name, result, slot, field)


def _check_final(env: Any, slot: Any, final: Any) -> None:
    """Compare true final observations [N, ...] to the slot of an observation, whenever they come.

    Those of one finished env alone would be taken for the first env's.
    """
    check_like(type(env).__name__, final, slot, "final_obs")


def one_picture(drawn: Any) -> np.ndarray:
    """Return what an env has drawn as one picture [H, W, 3]: those of several cameras in a row.

    Args:
        drawn: a picture, or some of them, as gym-hil's envs draw; lower ones are filled up below.
    """
    if isinstance(drawn, np.ndarray) and drawn.ndim == 3:
        return drawn
    cameras = [np.asarray(picture) for picture in drawn]
    height = max(len(picture) for picture in cameras)
    padded = [np.pad(one, ((0, height - len(one)), (0, 0), (0, 0))) for one in cameras]
    return np.concatenate(padded, axis=1)
