"""Act and value with two perceptrons, over flat observations and simple action spaces."""

from collections.abc import Sequence
from typing import Any

import gymnasium
from torch import Tensor

from lightning_rl.policies.actor_only import ActorOnly
from lightning_rl.policies.networks import flat_observation_size, mlp
from lightning_rl.policies.precision import widened


class ActorCritic(ActorOnly):
    """Separate actor and critic perceptrons over a flattened observation.

    Args:
        observation_space, action_space, hidden_sizes, activation: see `ActorOnly`.
        critic_hidden_sizes: units of the critic's hidden layers; as the actor's where not given.
        squash, log_std_init, log_std_bounds, normalize_observation, rescale_action: see
            `ActorOnly`.

    Raises:
        ConfigurationError: for an unknown activation, or a space that the policy cannot take.
    """

    has_critic = True
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        critic_hidden_sizes: Sequence[int] | None = None,
        activation: str = "tanh",
        squash: bool = False,
        log_std_init: float = 0.0,
        log_std_bounds: tuple[float, float] = (-5.0, 2.0),
        normalize_observation: bool = False,
        rescale_action: bool = True,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            hidden_sizes,
            activation,
            squash,
            log_std_init,
            log_std_bounds,
            normalize_observation,
            rescale_action,
        )
        self.critic = mlp(
            flat_observation_size(observation_space),
            hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes,
            1,
            activation=activation,
        )

    def value_of(self, features: Tensor) -> Tensor:
        """Return the value [B] of features [B, D]."""
        return widened(self.critic(features)).squeeze(-1)
