"""Choose among discrete actions, beside Q critics that value each of them."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.policies.distributions.base import Categorical
from lightning_rl.policies.networks.encoders import EncoderFactory
from lightning_rl.policies.networks.memory import MemoryFactory
from lightning_rl.policies.networks.perceptron import Initialization, Network, Normalization
from lightning_rl.policies.networks.q_networks import QEnsemble, refuse_batch
from lightning_rl.policies.q_actor_critic import QActorCritic
from lightning_rl.rollout.contract import MASK
from lightning_rl.system.errors import require


class DiscreteActorCritic(QActorCritic):
    """An actor that chooses among discrete actions, and critics that value all of them at once.

    What an `action_mask` among the observation's keys forbids has no probability.

    Args:
        observation_space: of one env: Box (flat or matrix), MultiBinary, or a Dict of them; with an
            encoder, whatever that takes.
        action_space: of one env: Discrete.
        hidden_sizes: units of the actor's hidden layers.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        critic_hidden_sizes: units of the critics' hidden layers; as the actor's where not given.
        critic_activation: likewise.
        num_critics: E, critics in the ensemble.
        critic_normalization: of the critics' hidden units: `none`, `layer` or `rms`.
        normalize_observation: scale observations by their running mean and variance, clipped to
            ±10.
        actor_normalization: of the actor's hidden units, likewise.
        encoder: makes the features that the heads read, of pictures for instance; where not given,
            they read the observation itself, flat.
        actor_keys: of a Dict observation, those that the actor reads; all but `action_mask` where
            not given.
        critic_encoder: makes the critics' own features; where not given, as `encoder`.
        critic_keys: of a Dict observation, those that the critics read; the actor's where not
            given. Acting needs none of them.
        share_encoder: whether actor and critics have one encoder, where they read the same keys and
            no `critic_encoder` is named, which the critics' loss trains; else each has its own.
        memory: what the policy remembers with, `GRU` or `LSTM`, behind the encoder; actor and
            critics share it, as they share an encoder, and critics with `critic_keys` of their own
            have none. None where not given.
        network: of actor and critics: `perceptron`, or `residual` with a block for each of the
            hidden sizes, which are then all of one width.
        initialization: of the weights of actor and critics: `fan_in`, uniform within ±1/sqrt(n) of
            a layer of n inputs, or `orthogonal`, with the actor's last layer small.
        ignore_keys: of a Dict observation, those that neither actor nor critic reads.

    Raises:
        ConfigurationError: for an unknown activation, or a space that the policy cannot take.
    """

    distribution: Categorical  # type: ignore[assignment]  # the others' actions have units
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
        critic_hidden_sizes: Sequence[int] | None = None,
        critic_activation: str | None = None,
        num_critics: int = 2,
        critic_normalization: Normalization = "none",
        normalize_observation: bool = False,
        actor_normalization: Normalization = "none",
        encoder: EncoderFactory | None = None,
        actor_keys: Sequence[str] | None = None,
        critic_encoder: EncoderFactory | None = None,
        critic_keys: Sequence[str] | None = None,
        share_encoder: bool = True,
        memory: MemoryFactory | None = None,
        network: Network = "perceptron",
        initialization: Initialization = "fan_in",
        ignore_keys: Sequence[str] = (),
    ) -> None:
        require(
            isinstance(action_space, gymnasium.spaces.Discrete),
            f"DiscreteActorCritic chooses one of several actions, a Discrete space; the action "
            f"space is {action_space}. Learn a Box with SAC and a SquashedActorCritic, several "
            "choices at once with PPO.",
        )
        refuse_batch(critic_normalization, "critics that value all actions at once")
        super().__init__(
            observation_space,
            action_space,
            Categorical([int(action_space.n)], ()),  # type: ignore[attr-defined, arg-type]
            hidden_sizes,
            activation,
            critic_hidden_sizes,
            critic_activation,
            num_critics,
            critic_normalization,
            normalize_observation,
            actor_normalization,
            encoder,
            actor_keys,
            critic_encoder,
            critic_keys,
            share_encoder,
            memory,
            network,
            initialization=initialization,
            ignore_keys=ignore_keys,
        )

    def sizes_of_critic(self, features: int) -> tuple[int, int]:
        return features, self.distribution.num_choices

    def log_probs(self, td: TensorDict, features: Tensor) -> Tensor:
        """Return the log-probs [B, n] of all actions where `td` [B] was observed.

        Args:
            td: [B], with `observation`.
            features: [B, D], of `actor_features`.
        """
        return self.action_output(td, features).log_softmax(-1)

    def action_values(
        self, td: TensorDict, critic: QEnsemble | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return the values [E, B, n] of all actions where `td` [B] was observed.

        Args:
            td: [B], with `observation`.
            critic: the policy's own where not given.
            features: [B, D], of `critic_features`, where they are known.
        """
        features = self.critic_features(td) if features is None else features
        values: Tensor = (self.critic if critic is None else critic).outputs(features)
        return values

    def num_allowed(self, td: TensorDict) -> Tensor:
        """Return how many actions are allowed [B] where `td` [B] was observed."""
        if self.masks_actions:
            allowed: Tensor = td["observation"][MASK]
            return (allowed != 0).sum(-1).clamp(min=1).float()
        number = float(self.distribution.num_choices)
        return torch.full(td.batch_size, number, device=self.version.device)
