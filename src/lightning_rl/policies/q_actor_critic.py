"""Actors with bounded actions, and ensembles of Q critics."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.kwargs import (
    DeterministicActorCriticKwargs,
    QActorCriticKwargs,
    SquashedActorCriticKwargs,
    Unpack,
)
from lightning_rl.policies.critic_inputs import add_critic_inputs
from lightning_rl.policies.distributions.base import widened
from lightning_rl.policies.distributions.unit_actions import (
    NoisyTanh,
    StateStdTanhGaussian,
    UnitActions,
)
from lightning_rl.policies.networks.encoders import EncoderFactory
from lightning_rl.policies.networks.memory import Memory
from lightning_rl.policies.networks.perceptron import Initialization, check_activation
from lightning_rl.policies.networks.q_networks import CriticNormalization, QEnsemble, ValueAtoms
from lightning_rl.policies.perceptron_policy import PerceptronPolicy
from lightning_rl.system.errors import check_range, require

EncoderMemory = tuple[nn.Module | None, Memory | None]
"""An encoder, and the memory behind it."""


class QActorCritic(PerceptronPolicy):
    """Base class of an actor and Q critics for off-policy algorithms.

    Critics read actions in units of the action bounds, [-1, 1].

    Args:
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        critic_hidden_sizes: units of the critics' hidden layers. Default: `hidden_sizes`.
        critic_activation: default: `activation`.
        num_critics: E, critics in the ensemble.
        critic_normalization: normalization of the critics' hidden units: `none`, `layer` or `rms`;
            or `batch`, of the input of each layer over the minibatch, for algorithms with `tau:
            null`.
        value_atoms: values of categorical critics; null for critics that output a value.
        initialization: initial weights of actor and critics: `fan_in` or `orthogonal`.
        encoder: turns observations into features. Default: flat observations.
        critic_encoder: makes the critics' own features. Default: an encoder like `encoder`.
        critic_keys: keys of a Dict observation that critics read. Default: the actor's.
        share_encoder: use one encoder, trained by the critics' loss, if actor and critics read the
            same keys and there is no `critic_encoder`.

    Raises:
        ConfigurationError: for an unknown activation, or a number below 1.
    """

    distribution: UnitActions
    critic: QEnsemble

    @abstractmethod
    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        distribution: UnitActions,
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        activation: str = "relu",
        critic_hidden_sizes: Sequence[int] | None = None,
        critic_activation: str | None = None,
        num_critics: int = 2,
        critic_normalization: CriticNormalization = "none",
        value_atoms: ValueAtoms | None = None,
        initialization: Initialization = "fan_in",
        encoder: EncoderFactory | None = None,
        critic_encoder: EncoderFactory | None = None,
        critic_keys: Sequence[str] | None = None,
        share_encoder: bool = True,
        **kwargs: Unpack[QActorCriticKwargs],
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            distribution,
            hidden_sizes,
            activation=activation,
            initialization=initialization,
            encoder=encoder,
            **kwargs,
        )
        # After `super().__init__`, which makes the actor's encoder that the critics may share.
        features = add_critic_inputs(self, encoder, critic_encoder, critic_keys, share_encoder)
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        critic_activation = activation if critic_activation is None else critic_activation
        check_activation(critic_activation, "critic_activation")
        require(
            all(size >= 1 for size in sizes),
            f"Layer sizes must be at least 1, got critic_hidden_sizes={list(sizes)}.",
        )
        check_range("num_critics", num_critics, minimum=1)
        self._critic_hidden_sizes, self._critic_activation = tuple(sizes), critic_activation
        inputs, outputs = self.critic_sizes(features)
        self.critic = QEnsemble(
            inputs,
            sizes,
            num_critics,
            critic_activation,
            critic_normalization,
            self._network,
            outputs,
            value_atoms,
            initialization,
        )

    def critic_sizes(self, features: int) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a critic, for a number of features."""
        return features + self.distribution.size, 1

    def unit(self, action: Tensor) -> Tensor:
        """Return the actions [B, *A] of the env in units of their bounds, [-1, 1], as [B, A]."""
        return self.distribution.unit(action)

    def actor_modules(self) -> list[nn.Module]:
        """Return the modules that the actor's loss trains: actor, own encoder and memory."""
        # A shared encoder is trained by the critics' loss alone (see `features_for_actor`).
        return [self.actor, *(self._trunk if self.critic_reads_apart else [])]

    def critic_modules_to_train(self) -> list[nn.Module]:
        """Return the modules that the critics' loss trains: critics, their encoder and memory."""
        if not self.critic_reads_apart:
            # A shared encoder and memory follow the critics.
            return [self.critic, *self._trunk]
        return [self.critic, *([] if self.critic_encoder is None else [self.critic_encoder])]

    @property
    def _trunk(self) -> list[nn.Module]:
        return [module for module in (self.encoder, self.memory) if module is not None]

    @property
    def memory_of_critic(self) -> Memory | None:
        """The critics' memory: the actor's if shared, otherwise None."""
        return None if self.critic_reads_apart else self.memory

    def features_for_actor(self, td: TensorDict) -> tuple[Tensor, Tensor]:
        """Return the features [B, D] of actor and critics for the actor's loss on `td` [B].

        Only the actor's own encoder gets gradients; the critics' loss trains the other encoders
        (Yarats et al. 2021).
        """
        if self.critic_reads_apart:
            actor_features = self.actor_features(td)
            with torch.no_grad():
                return actor_features, self.critic_features(td)
        # The actor's loss must not train a shared encoder (SAC-AE, Yarats et al. 2021).
        with torch.no_grad():
            shared = self.actor_features(td)
        return shared, shared

    def features_for_target(
        self,
        td: TensorDict,
        next_td: TensorDict,
        critic_encoder_memory: EncoderMemory,
        actor_encoder_memory: EncoderMemory = (None, None),
    ) -> tuple[Tensor, Tensor]:
        """Return the features [B, D] of actor and critics at the next observations, for a target.

        Args:
            td: [B], with `sequences` for a policy with a memory.
            next_td: [B], with the next `observation`.
            critic_encoder_memory: target networks of the critics' encoder and memory; None for the
                originals.
            actor_encoder_memory: the same for the actor.
        """
        # SAC's actor acts by its current weights in the next state; TD3's by target networks.
        actor_features = self.next_features(td, next_td, *actor_encoder_memory)
        if self.critic_reads_apart:
            if critic_encoder_memory[0] is None:
                # No target encoder: the observation is flat, or there are no target networks.
                return actor_features, self.critic_features(next_td)
            read = (critic_encoder_memory[0], self.critic_normalizer, self.critic_keys)
            return actor_features, self.read(next_td, *read)
        # The same networks, compared by identity: encode the observation only once.
        if critic_encoder_memory == actor_encoder_memory:
            return actor_features, actor_features
        return actor_features, self.next_features(td, next_td, *critic_encoder_memory)

    def q_values(
        self,
        td: TensorDict,
        unit_action: Tensor,
        critic: nn.Module | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Return the values [E, B] of actions in [-1, 1] [B, A]; `features` are [B, D]."""
        features = self.critic_features(td) if features is None else features
        return (critic or self.critic)(features, unit_action)  # type: ignore[no-any-return]


class SquashedActorCritic(QActorCritic):
    """A tanh-Gaussian actor with a state-dependent standard deviation, and Q critics, for SAC.

    Args:
        action_space: a floating-point Box with finite bounds.
        hidden_sizes: units of the actor's hidden layers.
        log_std_bounds: (low, high), clamps the log standard deviation before tanh.
        noise_correlation: correlation of the noise of consecutive actions, in [0, 1); see
            `ActorOnly`.
    """

    distribution: StateStdTanhGaussian
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        log_std_bounds: tuple[float, float] = (-20.0, 2.0),
        noise_correlation: float = 0.0,
        **kwargs: Unpack[SquashedActorCriticKwargs],
    ) -> None:
        # The distribution refuses action spaces without finite bounds.
        distribution = StateStdTanhGaussian(action_space, log_std_bounds, noise_correlation)
        super().__init__(observation_space, action_space, distribution, hidden_sizes, **kwargs)

    def draw_unit(
        self, td: TensorDict, noise: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return actions in [-1, 1] [B, A] for `td` [B], with gradients, and their log-probs [B].

        The noise [B, A] is standard normal. `features` [B, D] default to `actor_features`.
        """
        features = self.actor_features(td) if features is None else features
        return self.distribution.draw_unit(self.action_output(td, features), noise)


class DeterministicActorCritic(QActorCritic):
    """A deterministic actor with Gaussian exploration noise, and Q critics, for TD3.

    Args:
        action_space: a floating-point Box with finite bounds.
        hidden_sizes: units of the actor's hidden layers.
        exploration_std: standard deviation of the noise, in units of the action bounds.
        noise_correlation: correlation of the noise of consecutive actions, in [0, 1); see
            `ActorOnly`.
    """

    distribution: NoisyTanh
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        exploration_std: float = 0.1,
        noise_correlation: float = 0.0,
        **kwargs: Unpack[DeterministicActorCriticKwargs],
    ) -> None:
        distribution = NoisyTanh(action_space, exploration_std, noise_correlation)
        super().__init__(observation_space, action_space, distribution, hidden_sizes, **kwargs)

    def best_unit(
        self, td: TensorDict, actor: nn.Module | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return the actions in [-1, 1] [B, A] for `td` [B], with gradients, without noise.

        Defaults: the policy's actor, and `actor_features` [B, D] for `features`.
        """
        features = self.actor_features(td) if features is None else features
        return widened((actor or self.actor)(features)).tanh()
