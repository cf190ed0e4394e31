"""Random network distillation: a reward for states that differ from those seen so far."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.algorithms import IntrinsicReward
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import RewardNormalizer, RunningMoments, mlp
from lightning_rl.extend.rollout import next_observations

LIMIT = 5.0
"""Bound of the normalized numbers of a state, in standard deviations."""


class RandomNetworkDistillation(IntrinsicReward):
    """The error with which a trained network predicts a random network's outputs for a state.

    States seen often are predicted well and earn little. States are normalized by running moments
    and clipped to ±5; errors are divided by the running standard deviation of their discounted
    sums, which go on across episodes.

    Source: Burda et al. 2018, "Exploration by Random Network Distillation", sections 2.2 to 2.4.
    Differs: one value for the sum of both rewards, as in rsl_rl.

    Args:
        observation_space: of one env; a Box, or a Dict of them.
        keys: keys of a Dict that are the state. Default: all.
        weight: of the reward, or points [[env steps, weight], ...] with lines between them.
        hidden_sizes: units of the hidden layers of both networks.
        num_outputs: outputs of both networks.
        activation: see `ActorCritic`.
        gamma: discount of the sums of errors, per action.
        learning_rate: of the predictor.
        batch_size: states per minibatch and process; each rollout is trained on once.

    Raises:
        ConfigurationError: a key is unknown, a part of the state is no float Box, or a number is
            out of range.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        *,
        keys: Sequence[str] | None = None,
        weight: float | Sequence[tuple[int, float]] = 1.0,
        hidden_sizes: Sequence[int] = (64, 64),
        num_outputs: int = 16,
        activation: str = "elu",
        gamma: float = 0.99,
        learning_rate: float = 1e-3,
        batch_size: int = 256,
    ) -> None:
        super().__init__()
        check_range("num_outputs", num_outputs, minimum=1)
        check_range("gamma", gamma, minimum=0, below=1)
        check_range("learning_rate", learning_rate, above=0)
        check_range("batch_size", batch_size, minimum=1)
        self.keys = keys
        if isinstance(observation_space, gymnasium.spaces.Dict):
            self.keys = list(observation_space) if keys is None else list(keys)
        size = sum(map(_size, _parts(observation_space, self.keys)))
        self.points = [(0, weight)] if isinstance(weight, int | float) else sorted(weight)
        require(bool(self.points), "weight of RandomNetworkDistillation has no points.")
        for _, value in self.points:
            check_range("weight", value, minimum=0)
        self.gamma, self.learning_rate, self.batch_size = gamma, learning_rate, batch_size
        self.predictor, self.target = (
            mlp(size, hidden_sizes, num_outputs, activation=activation) for _ in range(2)
        )
        self.target.requires_grad_(False)
        self.moments = RunningMoments(size)
        self.normalizer = RewardNormalizer()

    def weight(self, env_steps: int) -> float:
        """Return the weight after `env_steps` of the run."""
        return float(np.interp(env_steps, *zip(*self.points, strict=True)))

    @torch.no_grad()
    def reward(self, rollout: TensorDict, env_steps: int) -> Tensor:
        state = self.states(next_observations(rollout))
        self.moments.update(state.flatten(0, 1))
        error = self.error(self.normalized(state))
        ends = torch.zeros_like(error, dtype=torch.bool)
        self.normalizer.observe(error, ends, discount=self.gamma)
        reward: Tensor = self.weight(env_steps) * self.normalizer(error)
        return reward

    def minibatches(self, rollout: TensorDict) -> Iterator[TensorDict]:
        state = self.normalized(self.states(next_observations(rollout))).flatten(0, 1)
        count = -(-len(state) // self.batch_size)
        # Each takes every count-th state, and so has states of all envs and times.
        for first in range(count):
            part = state[first::count]
            yield TensorDict({"state": part}, [len(part)])

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return self.error(minibatch["state"]).mean(), {}

    def states(self, observation: Any) -> Tensor:
        """Return the states [N, T, D] of observations [N, T, ...]."""
        parts = [observation] if self.keys is None else [observation[key] for key in self.keys]
        return torch.cat([part.flatten(2).float() for part in parts], -1)

    def normalized(self, state: Tensor) -> Tensor:
        """Return states [..., D] without unit, clipped to ±5."""
        scale = (self.moments.var + 1e-8).rsqrt()
        return ((state - self.moments.mean) * scale).clamp(-LIMIT, LIMIT)

    def error(self, state: Tensor) -> Tensor:
        """Return the mean squared error [...] of the predictor at normalized states [..., D]."""
        error: Tensor = (self.predictor(state) - self.target(state)).square().mean(-1)
        return error


def _parts(space: gymnasium.Space[Any], keys: Sequence[str] | None) -> list[gymnasium.Space[Any]]:
    if not isinstance(space, gymnasium.spaces.Dict):
        require(keys is None, f"keys={keys} are for a Dict observation, which this env has not.")
        return [space]
    unknown = [key for key in keys or () if key not in space.spaces]
    require(
        bool(keys) and not unknown,
        f"keys={keys} must name keys of the observation: {', '.join(space)}.",
    )
    return [space[key] for key in keys or ()]


def _size(space: gymnasium.Space[Any]) -> int:
    require(
        isinstance(space, gymnasium.spaces.Box)
        and space.dtype is not None
        and space.dtype.kind == "f",
        f"RandomNetworkDistillation reads float vectors, not {space}: name others with keys.",
    )
    return math.prod(space.shape or ())
