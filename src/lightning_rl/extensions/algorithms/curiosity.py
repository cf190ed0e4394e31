"""PPO and SAC with a reward for states unlike those seen so far: random network distillation."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import PPO, SAC, Algorithm, Policy, SquashedActorCritic
from lightning_rl.extend import ranks
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import RunningMoments, mlp
from lightning_rl.extend.rollout import add_transition_field, next_states
from lightning_rl.extensions.algorithms.hindsight import HindsightReplay
from lightning_rl.extensions.datasets.mixed_replay import MixedReplay
from lightning_rl.functional import discounted_return
from lightning_rl.kwargs import CuriousPPOKwargs, CuriousSACKwargs, Unpack

LIMIT = 5.0
"""Bound of a normalized number of a state, in standard deviations."""

EPS = 1e-8
"""Added to variances."""


class RandomNetworkDistillation(nn.Module):
    """Reward the error with which one network predicts the outputs of a random one for a state.

    States that were seen often are predicted well, and earn little. States are normalized by
    running moments; errors are divided by the running standard deviation of their discounted sums,
    which continue over the ends of episodes.

    Source: Burda et al. 2018, "Exploration by Random Network Distillation", sections 2.2 to 2.4.
    Differs: one value for the sum of both rewards, as in rsl_rl; `weight` may change.

    Args:
        observation_space: of one env; a float Box, or a Dict of them.
        keys: keys of a Dict that are the state. Default: all.
        weight: of the reward; or points [[env steps, weight], ...], with lines between them.
        hidden_sizes: units of the hidden layers of both networks.
        num_outputs: outputs of both networks.
        activation: see `ActorCritic`.
        gamma: discount of the sums of errors, per action.
        learning_rate: of the predicting network.
        batch_size: states per minibatch and process; a rollout is one pass.

    Raises:
        ConfigurationError: a key is unknown, a state is no float Box, or a number is out of range.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        *,
        keys: Sequence[str] | None = None,
        weight: float | Sequence[tuple[float, float]] = 1.0,
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
        self.points = [(0.0, weight)] if isinstance(weight, int | float) else sorted(weight)
        check_range("weight: the number of points [env steps, weight]", len(self.points), minimum=1)
        for _, value in self.points:
            check_range("weight", value, minimum=0)
        self.keys, size = _state_of(observation_space, keys)
        self.gamma, self.learning_rate, self.batch_size = gamma, learning_rate, batch_size
        self.predictor, self.target = (
            mlp(size, hidden_sizes, num_outputs, activation=activation) for _ in range(2)
        )
        self.target.requires_grad_(False)
        self.states, self.sums = RunningMoments(size), RunningMoments(1)
        self.carry: Tensor | None = None  # [N], the discounted sums at the end of the last rollout

    def weight(self, env_steps: int) -> float:
        """Return the weight after `env_steps` of the run."""
        steps, weights = np.array(self.points).T
        return float(np.interp(env_steps, steps, weights))

    @torch.no_grad()
    def reward(self, rollout: TensorDict, env_steps: int) -> tuple[Tensor, Tensor]:
        """Return the weighted rewards [N, T] of a fresh rollout [N, T+1], and its states [M, D].

        The running statistics include the rollout; the states are normalized.

        Raises:
            EnvFaultError: the env does not return the state in which an episode ended.
        """
        observation = next_states(rollout)
        parts = [observation] if self.keys is None else [observation[key] for key in self.keys]
        state = torch.cat([part.flatten(2).float() for part in parts], -1)
        real = ~rollout["padding"][:, :-1] if "padding" in rollout.keys() else slice(None)
        self.states.update(state[real].flatten(0, -2))
        scale = (self.states.var + EPS).rsqrt()
        state = ((state - self.states.mean) * scale).clamp(-LIMIT, LIMIT)
        error = self.error(state)
        if self.carry is None or len(self.carry) != len(error):
            self.carry = torch.zeros_like(error[:, 0])
        no_ends = torch.zeros_like(error, dtype=torch.bool)
        sums = discounted_return(error, no_ends, self.carry.to(error.device), gamma=self.gamma)
        self.carry = sums[:, -1]
        self.sums.update(sums.reshape(-1, 1))
        return self.weight(env_steps) * error * (self.sums.var + EPS).rsqrt(), state[real].flatten(
            0, -2
        )

    def minibatches(self, state: Tensor) -> Iterator[TensorDict]:
        """Yield one pass over states [M, D] in minibatches [B], as many on all ranks."""
        # Ranks may differ in padding; a rank with fewer states may have empty minibatches.
        count = max(ranks.gather_over_ranks(-(-len(state) // self.batch_size)))
        for first in range(count):
            # Every count-th state, so that each minibatch has states of all times.
            part = state[first::count]
            yield TensorDict({"state": part}, [len(part)])

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean error [] of normalized states [B, D], and no scalars to log."""
        return self.error(minibatch["state"]).mean(), {}

    def error(self, state: Tensor) -> Tensor:
        """Return the mean squared error [...] for normalized states [..., D]."""
        error: Tensor = (self.predictor(state) - self.target(state)).square().mean(-1)
        return error


CuriosityFactory = Callable[[gymnasium.Space[Any]], RandomNetworkDistillation]
"""Makes the curiosity for an observation space; in YAML {class_path: RandomNetworkDistillation}."""


if TYPE_CHECKING:
    _Base = Algorithm
else:
    _Base = object  # the algorithm is the second base of a subclass


class Curious(_Base):
    """Add the reward of a `RandomNetworkDistillation` to each fresh rollout, and train on it.

    Combine it with an algorithm: `class CuriousPPO(Curious, PPO)`. A replay keeps the rewards of
    the time of collection.

    Args:
        policy: the policy to train.
        curiosity: makes the reward. Default: with its default settings.
        kwargs: of the other algorithm.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        curiosity: CuriosityFactory = RandomNetworkDistillation,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        self.curiosity = curiosity(policy.observation_space)

    def configure_objectives(self) -> list[Objective]:
        """Return the losses of the algorithm and the loss of the predicting network."""
        curiosity = self.curiosity
        objective = self.objective(
            curiosity.loss,
            curiosity.predictor,
            name="curiosity",
            learning_rate=curiosity.learning_rate,
        )
        objectives = super().configure_objectives()  # type: ignore[safe-super]  # of the other base
        return [*objectives, objective]

    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        """Add the reward to a fresh rollout `batch` [N, T+1], and learn to predict its states.

        Raises:
            ConfigurationError: the env takes chunks of actions, or a replay has other rewards.
        """
        replay = self.data.replay
        require(
            not isinstance(replay, HindsightReplay | MixedReplay),
            f"{type(self).__name__} adds its reward to rollouts, but new goals and demonstrations "
            f"of {type(replay).__name__} have none: set data.replay: ReplayBuffer, or use SAC.",
        )
        require(
            "executed" not in batch.keys(),
            f"{type(self).__name__} rewards single actions, but this env takes chunks of actions.",
        )
        reward, states = self.curiosity.reward(batch, self.env_steps)
        add_transition_field(batch, "reward", batch["reward"][:, :-1] + reward)
        self.statistics.set("rewards/curiosity", reward.mean())
        # First, because normalizers of rewards count the sum.
        super().on_train_batch_start(batch, batch_idx)
        for minibatch in self.curiosity.minibatches(states):
            self.updates["curiosity"](minibatch)

    def rank_state(self) -> dict[str, Tensor | None]:
        """Return the state of this rank, with the running sums of its envs."""
        return super().rank_state() | {"curiosity": self.curiosity.carry}

    def load_rank_state(self, state: dict[str, Tensor | None] | None) -> None:
        """Restore the state of this rank; None if the number of ranks has changed."""
        super().load_rank_state(state)
        self.curiosity.carry = None if state is None else state["curiosity"]


class CuriousPPO(Curious, PPO):
    """PPO with a reward for novelty; see `Curious`.

    Args:
        policy: an actor with a critic.
        curiosity: see `Curious`.
        kwargs: see `PPO`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        curiosity: CuriosityFactory = RandomNetworkDistillation,
        **kwargs: Unpack[CuriousPPOKwargs],
    ) -> None:
        super().__init__(policy, curiosity=curiosity, **kwargs)


class CuriousSAC(Curious, SAC):
    """SAC with a reward for novelty; see `Curious`.

    Args:
        policy: actor and critics.
        curiosity: see `Curious`.
        kwargs: see `SAC`.
    """

    def __init__(
        self,
        policy: SquashedActorCritic,
        *,
        curiosity: CuriosityFactory = RandomNetworkDistillation,
        **kwargs: Unpack[CuriousSACKwargs],
    ) -> None:
        super().__init__(policy, curiosity=curiosity, **kwargs)

    def update_in_turn(self, minibatch: TensorDict, *objectives: str) -> None:
        # Curiosity learns from rollouts, not from minibatches of the replay.
        super().update_in_turn(minibatch, *(name for name in objectives if name != "curiosity"))


def _state_of(
    space: gymnasium.Space[Any], keys: Sequence[str] | None
) -> tuple[list[str] | None, int]:
    if not isinstance(space, gymnasium.spaces.Dict):
        require(keys is None, f"keys: {keys} is for a Dict; the observation is {space}.")
        return None, _size(space)
    names = [*space] if keys is None else [*keys]
    unknown = [key for key in names if key not in space.spaces]
    require(
        bool(names) and not unknown,
        f"keys: {keys} must name keys of the observation: {', '.join(space)}.",
    )
    return names, sum(_size(space[key]) for key in names)


def _size(space: gymnasium.Space[Any]) -> int:
    kind = space.dtype.kind if isinstance(space, gymnasium.spaces.Box) else ""
    require(kind == "f", f"Curiosity reads float vectors, but not {space}: name others by keys.")
    return math.prod(space.shape or ())
