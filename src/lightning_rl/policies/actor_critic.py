"""Actor and critic for simple action spaces, and an actor alone."""

from collections.abc import Sequence
from typing import Any

import gymnasium

from lightning_rl.policies.distributions.gaussians import distribution_for
from lightning_rl.policies.networks.encoders import EncoderFactory
from lightning_rl.policies.networks.perceptron import mlp
from lightning_rl.policies.perceptron_policy import PerceptronPolicy


class ActorOnly(PerceptronPolicy):
    """An actor perceptron, for algorithms without a critic (GRPO).

    Args:
        observation_space: see `PerceptronPolicy`.
        action_space: of one env: floating-point Box, Discrete, MultiDiscrete, MultiBinary, or a
            Dict or Tuple of them.
        hidden_sizes: units of the hidden layers.
        squash: squash continuous actions to the bounds of the space by tanh, instead of leaving the
            clipping to the env.
        log_std_init: initial log standard deviation of continuous actions (of the unsquashed ones
            with `squash`).
        log_std_bounds: least and greatest log standard deviation.
        rescale_action: where a Box has bounds other than -1 and 1, learn its actions in [-1, 1],
            and scale them to the bounds; `log_std_init` and `log_std_bounds` are in these units
            then. It changes nothing where the bounds are -1 and 1, where there are none (or some
            beyond ±1e6, which are taken for none), with `squash`, which scales anyway, and for
            discrete actions; where only some entries of a Box are bounded, a warning says that
            none is scaled. False takes the output of the network for the action as it is.
        noise_correlation: of the noise that a continuous action is drawn with and the one before
            it in the episode, in [0, 1). 0 draws each by itself; .97 pushes for some 33 steps into
            one direction, which explores where single draws cancel each other, and is easier on a
            robot's joints.
        kwargs: see `PerceptronPolicy`.

    Raises:
        ConfigurationError: for an unknown activation, or a space that the policy cannot take.
    """

    acts_as_perceptron = True
    """Looked for in the class itself: a subclass may act in another way."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        squash: bool = False,
        log_std_init: float = 0.0,
        log_std_bounds: tuple[float, float] = (-5.0, 2.0),
        rescale_action: bool = True,
        noise_correlation: float = 0.0,
        **kwargs: Any,
    ) -> None:
        distribution = distribution_for(
            action_space,
            squash=squash,
            rescale=rescale_action,
            log_std_init=log_std_init,
            log_std_bounds=log_std_bounds,
            noise_correlation=noise_correlation,
        )
        super().__init__(observation_space, action_space, distribution, hidden_sizes, **kwargs)


class ActorCritic(ActorOnly):
    """Separate actor and critic perceptrons, over a flattened observation or an encoder's features.

    Args:
        observation_space, action_space: see `ActorOnly`.
        hidden_sizes: units of the actor's hidden layers.
        critic_hidden_sizes: units of the critic's hidden layers; as the actor's where not given.
        encoder: turns observations, such as pictures, into the features that the heads read.
            Without one the heads read the flat observation.
        critic_encoder: makes the critic's own features; where not given, as `encoder`.
        critic_keys: of a Dict observation, those that the critic reads, be they what only a
            simulator knows; the actor's where not given. Acting needs none of them.
        share_encoder: whether actor and critic train one encoder together, where they read the same
            keys and no `critic_encoder` is named; else each has one of its own.
        kwargs: see `ActorOnly`.

    Raises:
        ConfigurationError: for an unknown activation or key, or a space that the policy cannot
            take.
    """

    has_critic = True
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        critic_hidden_sizes: Sequence[int] | None = None,
        encoder: EncoderFactory | None = None,
        critic_encoder: EncoderFactory | None = None,
        critic_keys: Sequence[str] | None = None,
        share_encoder: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(observation_space, action_space, hidden_sizes, encoder=encoder, **kwargs)
        size = self.add_critic_inputs(encoder, critic_encoder, critic_keys, share_encoder)
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = mlp(
            size,
            sizes,
            1,
            activation=self._activation,
            network=self._network,
            initialization=self._initialization,
        )
