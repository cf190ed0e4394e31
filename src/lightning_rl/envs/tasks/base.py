"""Say what the tasks share: action and reward terms, and what they report of an episode."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.tasks.terms import ActionTerm, Kind, RewardTerms, require_kind
from lightning_rl.envs.torch_env import TorchEnv


class Task(TorchEnv):
    """A task in torch, with action and reward terms that a configuration can set.

    `info` has `success` [N] bool, `rewards` {term: [N], weighted} and `metrics` {name: [N]}, all
    of the step taken, from before a reset.

    Args:
        num_envs: N.
        observation_size: numbers in an observation.
        action_size: A, numbers in an action.
        action: what an action means.
        rewards: weights by term; the terms not named keep their defaults (`reward_weights`).
        max_episode_steps: steps after which an episode is truncated.
        device: where the state lives.

    Attributes:
        reward_weights: every reward term of the task, with its default weight.
        action_kinds: what its actions may aim at.
        render_size: height and width of a picture, in pixels.
    """

    render_size = (256, 256)

    reward_weights: ClassVar[Mapping[str, float]]
    action_kinds: ClassVar[tuple[Kind, ...]]

    def __init__(
        self,
        num_envs: int,
        observation_size: int,
        action_size: int,
        action: ActionTerm,
        rewards: Mapping[str, float] | None,
        max_episode_steps: int,
        device: torch.device | str,
    ) -> None:
        name = type(self).__name__
        require_kind(action, self.action_kinds, name)
        observations = gymnasium.spaces.Box(-np.inf, np.inf, (observation_size,), np.float32)
        actions = action.space(action_size)
        super().__init__(num_envs, observations, actions, max_episode_steps, device)
        self.action = action
        self.rewards = RewardTerms(self.reward_weights, rewards, name)

    @abstractmethod
    def draw(self, state: TensorDict, height: int, width: int) -> Tensor:
        """Return a picture of each of M states [M], uint8 [M, height, width, 3]."""

    def render(self, rows: Sequence[int]) -> np.ndarray:
        index = torch.as_tensor(list(rows), dtype=torch.int64, device=self.device)
        return self.draw(self.state[index], *self.render_size).cpu().numpy()

    def last_step(self) -> Tensor:
        """Return whether the step under way is the last that the time limit allows, [N] bool."""
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
    """Return the length [M] of vectors [M, 2], row by row alike whatever M is."""
    square = vector * vector
    return (square[:, 0] + square[:, 1]).sqrt()
