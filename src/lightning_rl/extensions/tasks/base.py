"""Base class of the tasks: settings of their terms, and pictures."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.envs import Event
from lightning_rl.extend.envs import Observation as Observed
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extensions.managers.actions import ActionTerm, Kind, require_kind
from lightning_rl.extensions.managers.managed_env import ManagedEnv, TermSettings
from lightning_rl.extensions.managers.term import (
    Curriculum,
    Metric,
    Observation,
    Reward,
    Termination,
)


@dataclass
class Pictures:
    """Observe pictures of a task instead of its state.

    An observation is a stack of the last pictures, uint8 [size, size, 3 * frames], newest last,
    because one picture shows no velocity. An episode begins with copies of its first picture.

    Attributes:
        size: height and width of a picture, in pixels.
        frames: number of stacked pictures.
        with_state: observe a Dict of `pictures` and `state`, for a critic with more information
            than its actor (`actor_keys: [pictures]`, `critic_keys: [state]`).
    """

    size: int = 48
    frames: int = 2
    with_state: bool = False

    def __post_init__(self) -> None:
        check_range("pictures.size", self.size, minimum=1)
        check_range("pictures.frames", self.frames, minimum=1)

    def space(self, state: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
        """Return the observation space for the space of states."""
        shape = (self.size, self.size, 3 * self.frames)
        pictures = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        if not self.with_state:
            return pictures
        return gymnasium.spaces.Dict({"pictures": pictures, "state": state})


class Task(ManagedEnv):
    """A torch task whose terms a configuration can set.

    Args:
        num_envs: N.
        action: meaning of an action. Default: the task's `default_action`.
        rewards: weights of the task's terms, or terms, by name; null removes a term. Other terms
            keep their defaults.
        max_episode_steps: time limit, in steps. Default: the task's `default_episode_steps`.
        device: device of the state.
        pictures: pictures to observe; None: observe the state.
        terminations: ends of episodes by name, in addition to the task's.
        metrics: reported numbers by name, in addition to the task's.
        observations: groups of observation terms, instead of the task's observation.
        events: changes of the state by name, in training and in evaluations.
        curriculum: levels of difficulty by name.
        rewards_per_second: multiply the weights of rewards by the seconds of a step.

    Attributes:
        observation_size: size of an observation of the state.
        action_size: size of an action.
        action_kinds: allowed kinds of action targets.
        render_size: height and width of a picture, in pixels.

    Raises:
        ConfigurationError: an unknown term or parameter, or pictures and terms to observe.
    """

    render_size = (256, 256)

    observation_size: ClassVar[int]
    action_size: ClassVar[int] = 2
    default_action: ClassVar[ActionTerm]
    default_episode_steps: ClassVar[int]
    action_kinds: ClassVar[tuple[Kind, ...]]

    def __init__(
        self,
        num_envs: int,
        action: ActionTerm | None = None,
        rewards: dict[str, float | Reward | None] | None = None,
        max_episode_steps: int | None = None,
        device: str = "cpu",
        pictures: Pictures | None = None,
        terminations: dict[str, Termination | None] | None = None,
        metrics: dict[str, Metric | None] | None = None,
        observations: dict[str, dict[str, Observation]] | None = None,
        events: dict[str, Event | None] | None = None,
        curriculum: dict[str, Curriculum | None] | None = None,
        rewards_per_second: bool = False,
    ) -> None:
        name = type(self).__name__
        action = self.default_action if action is None else action
        steps = self.default_episode_steps if max_episode_steps is None else max_episode_steps
        require_kind(action, self.action_kinds, name)
        state = gymnasium.spaces.Box(-np.inf, np.inf, (self.observation_size,), np.float32)
        space = state if pictures is None else pictures.space(state)
        require(
            pictures is None or not observations,
            f"{name} observes either `pictures` or the terms of `observations`: set one of them.",
        )
        self.metadata = {"render_fps": self.render_fps}
        self.action, self.pictures = action, pictures
        self.step_dt = 1.0 / self.render_fps
        terms = TermSettings(
            *(rewards, terminations, metrics, observations, events, curriculum, rewards_per_second)
        )
        # The base class begins an episode, for which the attributes above must be set.
        super().__init__(num_envs, space, action.space(self.action_size), steps, device, terms)

    @abstractmethod
    def draw(self, state: TensorDict, height: int, width: int) -> Tensor:
        """Return a picture of each of M states [M], uint8 [M, height, width, 3]."""

    def render(self, rows: Sequence[int]) -> np.ndarray:
        # Draw only the rows that are shown.
        index = torch.as_tensor(list(rows), dtype=torch.int64, device=self.device)
        return self.draw(self.state[index], *self.render_size).cpu().numpy()

    def full_initial_state(self, uniform: Tensor) -> TensorDict:
        # The stack is part of the state: a resumed env shows the same pictures.
        return self._with_pictures(super().full_initial_state(uniform))

    def with_derived_entries(self, state: TensorDict) -> TensorDict:
        return self._with_pictures(state)

    def _with_pictures(self, state: TensorDict) -> TensorDict:
        if self.pictures is not None:
            state["pictures"] = self._picture(state).repeat(1, 1, 1, self.pictures.frames)
        return state

    def full_transition(
        self, state: TensorDict, action: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        next_state, *results = super().full_transition(state, action)
        if self.pictures is not None:
            pictures = state["pictures"][..., 3:]  # all but the oldest
            next_state["pictures"] = torch.cat((pictures, self._picture(next_state)), -1)
        return next_state, *results  # type: ignore[return-value]  # a list keeps no types

    def observation_of(self, state: TensorDict) -> Observed:
        if self.pictures is None:
            return super().observation_of(state)
        # A tensor, not a Dict of one key: the space is that of the pictures.
        if not self.pictures.with_state:
            return state["pictures"]  # type: ignore[no-any-return]  # a tensor
        entries = {"pictures": state["pictures"], "state": self.observe(state)}
        return TensorDict(entries, state.batch_size)

    def _picture(self, state: TensorDict) -> Tensor:
        assert self.pictures is not None
        return self.draw(state, self.pictures.size, self.pictures.size)


def norm(vector: Tensor) -> Tensor:
    """Return the length [M] of vectors [M, 2]; no row depends on M."""
    square = vector * vector
    # Not a reduction, whose order of additions may depend on the number of rows.
    return (square[:, 0] + square[:, 1]).sqrt()
