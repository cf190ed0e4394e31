"""An actor for discrete actions, and Q critics with one value per action."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.kwargs import DiscreteActorCriticKwargs, Unpack
from lightning_rl.policies.distributions.base import Categorical
from lightning_rl.policies.networks.perceptron import Normalization
from lightning_rl.policies.networks.q_networks import QEnsemble
from lightning_rl.policies.q_actor_critic import QActorCritic
from lightning_rl.rollout.masks import MASK
from lightning_rl.system.errors import require


class DiscreteActorCritic(QActorCritic):
    """A categorical actor, and Q critics that output the values of all actions.

    Actions that `action_mask` of the observation forbids have probability 0.

    Args:
        action_space: Discrete.
        hidden_sizes: units of the actor's hidden layers.
        critic_normalization: normalization of the critics' hidden units: `none`, `layer` or `rms`.
        kwargs: see `QActorCritic`, without `value_atoms`.

    Raises:
        ConfigurationError: for an unknown activation, or an unsupported space.
    """

    distribution: Categorical  # type: ignore[assignment]  # the base class has bounded actions
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        critic_normalization: Normalization = "none",
        **kwargs: Unpack[DiscreteActorCriticKwargs],
    ) -> None:
        require(
            isinstance(action_space, gymnasium.spaces.Discrete),
            "DiscreteActorCritic needs a Discrete action space; the action space is "
            f"{action_space}. For a Box, use SAC and a SquashedActorCritic; for several choices, "
            "use PPO.",
        )
        require(
            critic_normalization in ("none", "layer", "rms"),
            "critic_normalization: critics with one output per action cannot use batch; set none, "
            "layer or rms.",
        )
        super().__init__(
            observation_space,
            action_space,
            Categorical([int(action_space.n)], ()),  # type: ignore[attr-defined, arg-type]
            hidden_sizes,
            critic_normalization=critic_normalization,
            # A distribution per action is not supported.
            value_atoms=None,
            **kwargs,
        )

    def critic_sizes(self, features: int) -> tuple[int, int]:
        return features, self.distribution.num_choices

    def log_probs(self, td: TensorDict, features: Tensor) -> Tensor:
        """Return the log-probs [B, n] of all actions for `td` [B] and `actor_features` [B, D]."""
        # `action_output` has already masked the forbidden actions.
        return self.action_output(td, features).log_softmax(-1)

    def action_values(
        self, td: TensorDict, critic: QEnsemble | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return the values [E, B, n] of all actions for `td` [B]; default features [B, D]: own."""
        features = self.critic_features(td) if features is None else features
        values: Tensor = (self.critic if critic is None else critic).outputs(features)
        return values

    def num_allowed(self, td: TensorDict) -> Tensor:
        """Return the numbers [B] of allowed actions for `td` [B]."""
        if self.masks_actions:
            allowed: Tensor = td["observation"][MASK]
            # At least one: the target entropy is the log of this number.
            return (allowed != 0).sum(-1).clamp(min=1).float()
        number = float(self.distribution.num_choices)
        return torch.full(td.batch_size, number, device=self.version.device)
