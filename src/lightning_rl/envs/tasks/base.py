"""Base class of the tasks: action and reward terms, pictures, and reports."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.tasks.terms import ActionTerm, Kind, RewardTerms, require_kind
from lightning_rl.envs.torch.torch_env import TorchEnv
from lightning_rl.envs.vector_env import Observation
from lightning_rl.system.errors import check_range


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

    Raises:
        ConfigurationError: a number is below 1.
    """

    size: int = 48
    frames: int = 2
    with_state: bool = False

    def __post_init__(self) -> None:
        check_range("pictures.size", self.size, least=1)
        check_range("pictures.frames", self.frames, least=1)

    def space(self, state: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
        """Return the observation space for the space of states."""
        shape = (self.size, self.size, 3 * self.frames)
        pictures = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        if not self.with_state:
            return pictures
        return gymnasium.spaces.Dict({"pictures": pictures, "state": state})


class Task(TorchEnv):
    """A torch task whose action and reward terms a configuration can set.

    `info` has `success` [N] bool, `rewards` {term: [N], weighted} and `metrics` {name: [N]}, from
    before the resets.

    Args:
        num_envs: N.
        action: meaning of an action. Default: the task's `default_action`.
        rewards: weights by term; other terms keep their defaults (`reward_weights`).
        max_episode_steps: time limit, in steps. Default: the task's `default_episode_steps`.
        device: device of the state.
        pictures: pictures to observe; None: observe the state.

    Attributes:
        observation_size: size of an observation of the state.
        default_action, default_episode_steps: see the arguments; actions have the shape [2].
        reward_weights: default weight of every reward term.
        action_kinds: allowed kinds of action targets.
        render_size: height and width of a picture, in pixels.
    """

    render_size = (256, 256)

    observation_size: ClassVar[int]
    default_action: ClassVar[ActionTerm]
    default_episode_steps: ClassVar[int]
    reward_weights: ClassVar[Mapping[str, float]]
    action_kinds: ClassVar[tuple[Kind, ...]]

    def __init__(
        self,
        num_envs: int,
        action: ActionTerm | None = None,
        rewards: dict[str, float] | None = None,
        max_episode_steps: int | None = None,
        device: str = "cpu",
        pictures: Pictures | None = None,
    ) -> None:
        name = type(self).__name__
        action = self.default_action if action is None else action
        steps = self.default_episode_steps if max_episode_steps is None else max_episode_steps
        require_kind(action, self.action_kinds, name)
        state = gymnasium.spaces.Box(-np.inf, np.inf, (self.observation_size,), np.float32)
        observations = state if pictures is None else pictures.space(state)
        super().__init__(num_envs, observations, action.space(2), steps, device)
        self.metadata = {"render_fps": self.render_fps}
        self.action = action
        self.pictures = pictures
        self.rewards = RewardTerms(self.reward_weights, rewards, name)

    @abstractmethod
    def draw(self, state: TensorDict, height: int, width: int) -> Tensor:
        """Return a picture of each of M states [M], uint8 [M, height, width, 3]."""

    def render(self, rows: Sequence[int]) -> np.ndarray:
        index = torch.as_tensor(list(rows), dtype=torch.int64, device=self.device)
        return self.draw(self.state[index], *self.render_size).cpu().numpy()

    def started(self, uniform: Tensor) -> TensorDict:
        state = super().started(uniform)
        if self.pictures is not None:
            state["pictures"] = self._picture(state).repeat(1, 1, 1, self.pictures.frames)
        return state

    def moved(
        self, state: TensorDict, action: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        following, *results = super().moved(state, action)
        if self.pictures is not None:
            before = state["pictures"][..., 3:]  # all but the oldest
            following["pictures"] = torch.cat((before, self._picture(following)), -1)
        return following, *results  # type: ignore[return-value]  # a list keeps no types

    def observed(self, state: TensorDict) -> Observation:
        if self.pictures is None:
            return super().observed(state)
        if not self.pictures.with_state:
            return state["pictures"]  # type: ignore[no-any-return]  # a tensor
        seen = {"pictures": state["pictures"], "state": self.observe(state)}
        return TensorDict(seen, state.batch_size)

    def _picture(self, state: TensorDict) -> Tensor:
        assert self.pictures is not None
        return self.draw(state, self.pictures.size, self.pictures.size)

    def last_step(self) -> Tensor:
        """Return whether this step is the last one within the time limit, [N] bool."""
        return self.elapsed + 1 >= self.max_episode_steps

    def outcome(
        self,
        success: Tensor,
        values: Mapping[str, Callable[[], Tensor]],
        metrics: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the reward [N], and the info of a step.

        Args:
            success: [N] bool.
            values: the reward terms before their weights, as functions that return [N].
            metrics: {name: [N]}.
        """
        reward, rewards = self.rewards.total(values, next(iter(metrics.values())))
        return reward, {"success": success, "rewards": rewards, "metrics": metrics}


def norm(vector: Tensor) -> Tensor:
    """Return the length [M] of vectors [M, 2]; the result of a row does not depend on M."""
    square = vector * vector
    return (square[:, 0] + square[:, 1]).sqrt()
