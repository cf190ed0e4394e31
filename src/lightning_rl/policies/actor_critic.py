"""Actor with a critic, and actor alone, for simple action spaces."""

from collections.abc import Sequence
from typing import Any

import gymnasium

from lightning_rl.kwargs import ActorCriticKwargs, ActorOnlyKwargs, Unpack
from lightning_rl.policies.critic_inputs import add_critic_inputs, refuse_unread_keys
from lightning_rl.policies.distributions.gaussians import (
    LogStd,
    begin_deviations,
    distribution_for,
)
from lightning_rl.policies.networks.encoders import EncoderFactory
from lightning_rl.policies.networks.perceptron import mlp
from lightning_rl.policies.perceptron_policy import PerceptronPolicy


class ActorOnly(PerceptronPolicy):
    """An actor perceptron, for algorithms without a critic (GRPO).

    Args:
        action_space: float Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them.
        hidden_sizes: units of the hidden layers.
        squash: squash continuous actions to their bounds by tanh. Default: the env clips.
        log_std: the log standard deviation of continuous actions: a `parameter` of each number of
            the action, or `state_dependent`, a further output of the actor.
        log_std_init: initial log standard deviation, before tanh.
        log_std_bounds: minimum and maximum of the log standard deviation.
        rescale_action: learn the actions of a bounded Box in [-1, 1] and scale them to the bounds;
            `log_std_init` and `log_std_bounds` are then in these units. A Box with unbounded
            entries (beyond ±1e6) is not scaled. No effect with `squash`, which always scales.
        noise_correlation: correlation of the noise of consecutive continuous actions, in [0, 1).
            .97 correlates the noise over about 33 steps, which explores further.
    """

    acts_as_perceptron = True
    """Read only from the class that sets it, because a subclass may act differently."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        squash: bool = False,
        log_std: LogStd = "parameter",
        log_std_init: float = 0.0,
        log_std_bounds: tuple[float, float] = (-5.0, 2.0),
        rescale_action: bool = True,
        noise_correlation: float = 0.0,
        **kwargs: Unpack[ActorOnlyKwargs],
    ) -> None:
        distribution = distribution_for(
            action_space,
            squash=squash,
            rescale=rescale_action,
            log_std_init=log_std_init,
            log_std_bounds=log_std_bounds,
            noise_correlation=noise_correlation,
            log_std=log_std,
        )
        super().__init__(observation_space, action_space, distribution, hidden_sizes, **kwargs)
        head: Any = self.actor[-1]
        begin_deviations(distribution, log_std_init, head.weight, head.bias)
        # A critic may read further keys: its class checks once they are known.
        if not self.has_critic:
            refuse_unread_keys(self)


class ActorCritic(ActorOnly):
    """Separate actor and critic perceptrons, on a flat observation or an encoder's features.

    Args:
        observation_space, action_space: see `ActorOnly`.
        hidden_sizes: units of the actor's hidden layers.
        critic_hidden_sizes: units of the critic's hidden layers. Default: `hidden_sizes`.
        encoder: turns observations into features. Default: flat observations.
        critic_encoder: makes the critic's own features. Default: an encoder like `encoder`.
        critic_keys: keys of a Dict observation for the critic, such as privileged simulator state.
            Default: the actor's keys.
        share_encoder: train one encoder together, if actor and critic read the same keys and there
            is no `critic_encoder`.
    """

    has_critic = True
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        critic_hidden_sizes: Sequence[int] | None = None,
        encoder: EncoderFactory | None = None,
        critic_encoder: EncoderFactory | None = None,
        critic_keys: Sequence[str] | None = None,
        share_encoder: bool = True,
        **kwargs: Unpack[ActorCriticKwargs],
    ) -> None:
        super().__init__(observation_space, action_space, hidden_sizes, encoder=encoder, **kwargs)
        # After the actor: the initial weights depend on the order of construction.
        size = add_critic_inputs(self, encoder, critic_encoder, critic_keys, share_encoder)
        # The critic has the actor's sizes by default, but no normalization of hidden units.
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = mlp(
            size,
            sizes,
            1,
            activation=self._activation,
            network=self._network,
            initialization=self._initialization,
        )
