"""A policy for discrete actions: a Q network and an exploration rule."""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.kwargs import QPolicyKwargs, Unpack
from lightning_rl.policies.distributions.exploring import Exploration, ExploringCategorical
from lightning_rl.policies.networks.perceptron import Initialization, Network, Normalization, mlp
from lightning_rl.policies.perceptron_policy import PerceptronPolicy
from lightning_rl.rollout.masks import MASK
from lightning_rl.system.errors import ConfigurationError, check_range, require


class DuelingNetwork(nn.Module):
    """Q(s, a) = V(s) + A(s, a) - mean_a A(s, a).

    Source: Wang et al. 2016, "Dueling Network Architectures for Deep Reinforcement Learning",
    equation 9.
    """

    def __init__(self, value: nn.Module, advantage: nn.Module) -> None:
        super().__init__()
        self.value, self.advantage = value, advantage

    def forward(self, features: Tensor) -> Tensor:
        advantage: Tensor = self.advantage(features)
        # Without centering, a constant could move between V and A.
        centered = advantage - advantage.mean(-1, keepdim=True)
        return self.value(features) + centered  # type: ignore[no-any-return]  # nn.Module


class QPolicy(PerceptronPolicy):
    """A network `actor` that outputs the value of each action, and an exploration rule, for `DQN`.

    `deterministic` chooses the action of the largest value. Actions that `action_mask` of the
    observation forbids are never chosen.

    Args:
        observation_space: see `PerceptronPolicy`.
        action_space: Discrete.
        hidden_sizes: units of the hidden layers; with `dueling`, of each of the two streams.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        exploration: `epsilon` (epsilon-greedy) or `boltzmann` (softmax of the values divided by a
            temperature). `DQN` sets epsilon or the temperature.
        dueling: use a `DuelingNetwork`, behind the encoder and the memory.
        actor_normalization: normalization of the hidden units: `none`, `layer` or `rms`.
        network: `perceptron`, or `residual` with one block per hidden size (all equal).
        initialization: initial weights: `fan_in` or `orthogonal`.
        kwargs: see `PerceptronPolicy`.

    Raises:
        ConfigurationError: for an unknown activation, or an unsupported space.
    """

    distribution: ExploringCategorical
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        activation: str = "relu",
        exploration: Exploration = "epsilon",
        dueling: bool = False,
        actor_normalization: Normalization = "none",
        network: Network = "perceptron",
        initialization: Initialization = "fan_in",
        **kwargs: Unpack[QPolicyKwargs],
    ) -> None:
        require(
            isinstance(action_space, gymnasium.spaces.Discrete),
            f"QPolicy needs a Discrete action space; the action space is {action_space}. For a "
            "Box, use SAC and a SquashedActorCritic; for several choices, use PPO.",
        )
        require(
            exploration in ("epsilon", "boltzmann"),
            f"exploration={exploration!r} of QPolicy is unknown; allowed: epsilon, boltzmann.",
        )
        super().__init__(
            observation_space,
            action_space,
            ExploringCategorical(int(action_space.n), exploration),  # type: ignore[attr-defined]  # Discrete: checked above
            hidden_sizes,
            activation=activation,
            actor_normalization=actor_normalization,
            network=network,
            initialization=initialization,
            **kwargs,
        )
        if dueling:
            # The second stream has the sizes of the first; both read the same features.
            value = mlp(
                self.features_size,
                hidden_sizes,
                1,
                activation=activation,
                normalization=actor_normalization,
                network=network,
                initialization=initialization,
            )
            self.actor = DuelingNetwork(value, self.actor)  # type: ignore[assignment]  # a module like it

    def set_exploration(self, amount: float) -> None:
        """Set epsilon in [0, 1], or the temperature, above 0."""
        if self.distribution.rule == "epsilon":
            check_range("epsilon", amount, minimum=0, maximum=1)
        else:
            # The values are divided by it.
            check_range("temperature", amount, minimum=1e-6, maximum=math.inf)
        # In place: it is a buffer, which collectors receive with the weights.
        self.distribution.amount.fill_(amount)

    def modules_to_train(self) -> list[nn.Module]:
        """Return the Q network, its encoder and its memory."""
        return [module for module in (self.actor, self.encoder, self.memory) if module is not None]

    def masked_values(self, td: TensorDict, values: Tensor) -> Tensor:
        """Return values [B, n] with about -inf for actions that `td` [B] forbids."""
        if not self.masks_actions:
            return values
        return self.distribution.masked(values, td["observation"][MASK])

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        if self.distribution.rule == "epsilon":
            raise ConfigurationError(
                "A QPolicy with exploration: epsilon has log-probs without gradients, so only DQN "
                "trains it. Use exploration: boltzmann, or an ActorCritic."
            )
        return super().evaluate_actions(td)
