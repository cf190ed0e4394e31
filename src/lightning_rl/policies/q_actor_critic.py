"""Act with an actor within the bounds of its actions, beside an ensemble of Q critics."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.policies.distributions.base import widened
from lightning_rl.policies.distributions.gaussians import (
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

Through = tuple[nn.Module | None, Memory | None]
"""What features are read through: an encoder, and the memory behind it."""


class QActorCritic(PerceptronPolicy):
    """An actor whose actions are learnt in units of their bounds, and critics of such actions.

    What an off-policy algorithm asks of a policy, beside acting: `actor_features`,
    `critic_features`, `unit`, `q_values`, `actor` and `critic`, of which, and of the encoder that
    the critics read, it keeps slowly moving copies.

    Args:
        observation_space: see `PerceptronPolicy`.
        action_space: of one env.
        distribution: of the actions.
        hidden_sizes: units of the actor's hidden layers.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        critic_hidden_sizes: units of the critics' hidden layers; as the actor's where not given.
        critic_activation: likewise.
        num_critics: E, critics in the ensemble.
        critic_normalization: of the critics' hidden units: `none`, `layer` or `rms`; or `batch`, of
            what each of their layers reads over the minibatch, for an algorithm with `tau: null`.
        value_atoms: over which categorical critics distribute probability; null for critics that
            give values.
        initialization: of the weights of actor and critics: `fan_in` or `orthogonal`.
        encoder: turns observations, such as pictures, into the features that the heads read.
            Without one the heads read the flat observation.
        critic_encoder: makes the critics' own features; where not given, as `encoder`.
        critic_keys: of a Dict observation, those that the critics read; the actor's where not
            given. Acting needs none of them.
        share_encoder: whether actor and critics have one encoder, where they read the same keys and
            no `critic_encoder` is named, which the critics' loss trains; else each has its own.
        kwargs: see `PerceptronPolicy`.

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
        **kwargs: Any,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            distribution,
            hidden_sizes,
            activation,
            initialization=initialization,
            encoder=encoder,
            **kwargs,
        )
        features = self.add_critic_inputs(encoder, critic_encoder, critic_keys, share_encoder)
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        chosen = activation if critic_activation is None else critic_activation
        check_activation(chosen, "critic_activation")
        require(
            all(size >= 1 for size in sizes),
            f"Layer sizes must be at least 1, got critic_hidden_sizes={list(sizes)}.",
        )
        check_range("num_critics", num_critics, least=1)
        self._critic_hidden_sizes, self._critic_activation = tuple(sizes), chosen
        inputs, outputs = self.sizes_of_critic(features)
        self.critic = QEnsemble(
            inputs,
            sizes,
            num_critics,
            chosen,
            critic_normalization,
            self._network,
            outputs,
            value_atoms,
            initialization,
        )

    def sizes_of_critic(self, features: int) -> tuple[int, int]:
        """Return how many numbers a critic reads, of so many features, and how many values it has.

        An action is among what it reads, unless it has a value for each.
        """
        return features + self.distribution.size, 1

    def unit(self, action: Tensor) -> Tensor:
        """Return actions [B, *A] of the env in units of their bounds, [-1, 1], as [B, A]."""
        return self.distribution.unit(action)

    def actor_modules(self) -> list[nn.Module]:
        """Return what the actor's loss trains: the actor, and what it reads through on its own."""
        return [self.actor, *(self._trunk if self.critic_reads_apart else [])]

    def critic_modules_to_train(self) -> list[nn.Module]:
        """Return what the critics' loss trains: the critics, and what they read through."""
        if not self.critic_reads_apart:
            return [self.critic, *self._trunk]
        return [self.critic, *([] if self.critic_encoder is None else [self.critic_encoder])]

    @property
    def _trunk(self) -> list[nn.Module]:
        """What the actor reads through."""
        return [one for one in (self.encoder, self.memory) if one is not None]

    @property
    def memory_of_critic(self) -> Memory | None:
        """The memory behind what the critics read: the actor's, where they share it."""
        return None if self.critic_reads_apart else self.memory

    def features_for_actor(self, td: TensorDict) -> tuple[Tensor, Tensor]:
        """Return what actor and critics read [B, D] where the actor is trained on `td` [B].

        With gradients for an encoder of the actor's own; one that they share, and the critics', is
        left as it is, as that is what the critics' loss trains. Source: Yarats et al. 2021,
        "Improving Sample Efficiency in Model-Free Reinforcement Learning from Images", section 4.
        """
        if self.critic_reads_apart:
            actor_features = self.actor_features(td)
            with torch.no_grad():
                return actor_features, self.critic_features(td)
        with torch.no_grad():
            shared = self.actor_features(td)
        return shared, shared

    def features_for_target(
        self,
        td: TensorDict,
        following: TensorDict,
        critic_through: Through,
        actor_through: Through = (None, None),
    ) -> tuple[Tensor, Tensor]:
        """Return what actor and critics read [B, D] where a target is made of what followed.

        Args:
            td: [B], with `sequences` where the policy has a memory.
            following: [B], with `observation`: what followed.
            critic_through: slow copies of `encoder_of_critic` and of `memory_of_critic`; None for
                that itself.
            actor_through: likewise, of what the actor reads through.
        """
        actor_features = self._next_features(td, following, *actor_through)
        if self.critic_reads_apart:
            if critic_through[0] is None:
                return actor_features, self.critic_features(following)
            read = (critic_through[0], self.critic_normalizer, self.critic_keys)
            return actor_features, self.read(following, *read)
        same = all(one is other for one, other in zip(critic_through, actor_through, strict=True))
        if same:
            return actor_features, actor_features
        return actor_features, self._next_features(td, following, *critic_through)

    def _next_features(
        self,
        td: TensorDict,
        following: TensorDict,
        encoder: nn.Module | None,
        memory: Memory | None,
    ) -> Tensor:
        """Return what the actor, or who shares with it, reads [B, D] of what followed `td` [B]."""
        if encoder is None and self.memory is None:
            return self.actor_features(following)

        def encode(steps: TensorDict) -> Tensor:
            return self.read(steps, encoder or self.encoder, self.normalizer, self.actor_keys)

        memory, features = memory or self.memory, encode(following)
        return features if memory is None else memory.recall_next(td["sequences"], encode, features)

    def q_values(
        self,
        td: TensorDict,
        unit_action: Tensor,
        critic: nn.Module | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Return the values [E, B] of actions in [-1, 1] [B, A] where `td` [B] was observed.

        The default critic is the policy's. `features` [B, D], the output of `critic_features`, are
        computed if they are not passed.
        """
        features = self.critic_features(td) if features is None else features
        return (critic or self.critic)(features, unit_action)  # type: ignore[no-any-return]


class SquashedActorCritic(QActorCritic):
    """A tanh-Gaussian actor with a standard deviation of its own for each observation, for SAC.

    Args:
        observation_space: see `PerceptronPolicy`.
        action_space: of one env: a floating-point Box with finite bounds.
        hidden_sizes: units of the actor's hidden layers.
        log_std_bounds: least and greatest log standard deviation of what is squashed; what the
            network gives is clamped.
        noise_correlation: of the noise that an action is drawn with and the one before it, in
            [0, 1): see `ActorOnly`.
        kwargs: see `QActorCritic`.

    Raises:
        ConfigurationError: for an unknown activation, or a space that the policy cannot take.
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
        **kwargs: Any,
    ) -> None:
        distribution = StateStdTanhGaussian(action_space, log_std_bounds, noise_correlation)
        super().__init__(observation_space, action_space, distribution, hidden_sizes, **kwargs)

    def draw_unit(
        self, td: TensorDict, noise: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return actions in [-1, 1] [B, A] for `td` [B], with gradients, and their log-probs [B].

        The noise [B, A] is standard normal. `features` [B, D], the output of `actor_features`, are
        computed if they are not passed.
        """
        features = self.actor_features(td) if features is None else features
        return self.distribution.draw_unit(self.action_output(td, features), noise)


class DeterministicActorCritic(QActorCritic):
    """An actor that gives one action, and explores with Gaussian noise, for TD3.

    Args:
        observation_space: see `PerceptronPolicy`.
        action_space: of one env: a floating-point Box with finite bounds.
        hidden_sizes: units of the actor's hidden layers.
        exploration_std: standard deviation of the noise, in units of the bounds of the action.
        noise_correlation: of the noise that an action is drawn with and the one before it, in
            [0, 1): see `ActorOnly`.
        kwargs: see `QActorCritic`.

    Raises:
        ConfigurationError: for an unknown activation, or a space that the policy cannot take.
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
        **kwargs: Any,
    ) -> None:
        distribution = NoisyTanh(action_space, exploration_std, noise_correlation)
        super().__init__(observation_space, action_space, distribution, hidden_sizes, **kwargs)

    def best_unit(
        self, td: TensorDict, actor: nn.Module | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return the actions in [-1, 1] [B, A] for `td` [B], with gradients, without noise.

        The default actor is the policy's. `features` [B, D], the output of `actor_features`, are
        computed if they are not passed.
        """
        features = self.actor_features(td) if features is None else features
        return widened((actor or self.actor)(features)).tanh()
