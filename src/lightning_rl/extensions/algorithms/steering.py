"""Steer a frozen flow policy by its initial noise (DSRL)."""

from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import ActorCritic, ConfigurationError, Encoder, SquashedActorCritic
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import (
    NOISE,
    RNG,
    PerceptronPolicy,
    PolicyFactory,
)
from lightning_rl.extend.rollout import FieldSpec
from lightning_rl.extensions.algorithms.frozen import frozen_policy
from lightning_rl.extensions.vla.policy import ChunkPolicy
from lightning_rl.kwargs import SteeredActorCriticKwargs, Unpack


class SteeringPolicy(PerceptronPolicy):
    """Base class of policies that choose the initial noise of a frozen flow policy.

    The base policy integrates its ODE from the noise, clamped to the bound, and acts by the result.
    The networks here read the base policy's features of the observation. `sample_log_prob`
    is the noise's log-prob. It is one number for a chunk, however many actions were executed.

    Source: Wagenmaker et al. 2025, "Steering Your Diffusion Policy with Latent Space Reinforcement
    Learning" (DSRL).

    Attributes:
        base: the frozen policy.
        bound: the largest noise, in standard deviations.
    """

    base: ChunkPolicy
    bound: float

    def steer(self, base: ChunkPolicy, action_space: gymnasium.Space[Any], bound: float) -> None:
        """Set the frozen policy and its space; the last part of a constructor."""
        self.base, self.bound = base, bound
        # Until here the policy's actions are noise.
        self.noise_space, self.action_space = self.action_space, action_space
        self.micro_batch_size = base.micro_batch_size

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return {"noise": ((self.base.noise_size,), torch.float32), **super().extra_fields}

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        features = self.base.features(td)  # once, for the noise and for the action
        steered = TensorDict({"observation": features.summary}, td.batch_size)
        # The collector may have drawn the randomness of the whole rollout.
        if NOISE in td.keys():
            steered[NOISE] = td[NOISE]
        super().forward(steered, deterministic, generator)
        fields = {key: steered[key] for key in ("sample_log_prob", *super().extra_fields)}
        fields["noise"] = steered["action"]
        # Clamp the noise for the flow alone: the log-prob is that of the noise as drawn, because
        # a clamped number has no density.
        noise = fields["noise"].clamp(-self.bound, self.bound)
        # In place, because `td` may be a view of a slot of the rollout.
        for key, value in {"action": self.base.decode(features, noise), **fields}.items():
            td.set(key, value, inplace=True)
        return td

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        # `executed` counts actions of the chunk, but the log-prob of the noise is one number.
        inputs = td.exclude("executed")
        return super().evaluate_actions(inputs.set("action", td["noise"]))

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        raise ConfigurationError(
            f"{type(self).__name__} cannot learn from given actions: it chooses the noise of a "
            "flow, and the noise that leads to an action is unknown. Clone the base policy."
        )


class NoisePolicy(SteeringPolicy, ActorCritic):
    """A Gaussian over the initial noise of a frozen flow policy, with a critic, for PPO and GRPO.

    It begins as the base policy, with standard normal noise. Deterministic acting takes the mean.

    Args:
        observation_space, action_space: spaces of one env; they equal the base policy's spaces.
        checkpoint: checkpoint of the base policy, a file or a run directory; read whenever the
            policy is created.
        bound: largest noise, in standard deviations.
        base: makes the base policy, instead of a checkpoint.
        hidden_sizes: units of the actor's hidden layers, and by default of the critic's.
        critic_hidden_sizes: units of the critic's hidden layers.
        activation: see `PerceptronPolicy`.
        log_std_init: initial log standard deviation of the noise.
        trust_code: import any class that the checkpoint names.
    """

    critic_is_optional = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        checkpoint: str | None = None,
        bound: float = 2.0,
        base: PolicyFactory | None = None,
        hidden_sizes: Sequence[int] = (64, 64),
        critic_hidden_sizes: Sequence[int] | None = None,
        activation: str = "tanh",
        log_std_init: float = 0.0,
        trust_code: bool = False,
    ) -> None:
        spaces = (observation_space, action_space)
        frozen = flow_policy(*spaces, checkpoint, base, trust_code)
        super().__init__(
            observation_space,
            noise_space(frozen, bound),
            hidden_sizes,
            critic_hidden_sizes=critic_hidden_sizes,
            encoder=lambda space: BaseFeatures(space, frozen),
            activation=activation,
            log_std_init=log_std_init,
            # Rescaling is for bounded actions; this noise is standard normal.
            rescale_action=False,
            ignore_keys=frozen.ignore_keys,
        )
        self.steer(frozen, action_space, bound)


class NoiseActorCritic(SteeringPolicy, SquashedActorCritic):
    """A squashed Gaussian over the initial noise of a frozen flow policy, with Q critics, for SAC.

    The critics evaluate the noise, which the replay stores instead of the action.

    Args:
        observation_space, action_space: spaces of one env; they equal the base policy's spaces.
        checkpoint: checkpoint of the base policy, a file or a run directory; read whenever the
            policy is created.
        bound: largest noise, in standard deviations; the actor's tanh reaches up to it.
        base: makes the base policy, instead of a checkpoint.
        hidden_sizes: units of the actor's hidden layers.
        critic_hidden_sizes: units of the critics' hidden layers. Default: `hidden_sizes`.
        activation: see `PerceptronPolicy`.
        num_critics: critics in the ensemble.
        trust_code: import any class that the checkpoint names.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        checkpoint: str | None = None,
        bound: float = 2.0,
        base: PolicyFactory | None = None,
        hidden_sizes: Sequence[int] = (256, 256),
        critic_hidden_sizes: Sequence[int] | None = None,
        activation: str = "relu",
        num_critics: int = 2,
        trust_code: bool = False,
    ) -> None:
        spaces = (observation_space, action_space)
        frozen = flow_policy(*spaces, checkpoint, base, trust_code)
        super().__init__(
            observation_space,
            noise_space(frozen, bound),
            hidden_sizes,
            activation=activation,
            critic_hidden_sizes=critic_hidden_sizes,
            num_critics=num_critics,
            encoder=lambda space: BaseFeatures(space, frozen),
            ignore_keys=frozen.ignore_keys,
        )
        self.steer(frozen, action_space, bound)

    @property
    def replay_action_space(self) -> gymnasium.Space[Any]:
        return self.noise_space

    def rollout_for_replay(self, rollout: TensorDict) -> TensorDict:
        require(
            "executed_action" not in rollout.keys(),
            "NoiseActorCritic learns the values of its noise, but a person takes over in this env, "
            "whose actions have no noise: train a SteeredActorCritic by NoiseSAC, which learns the "
            "values of actions, too; or remove the intervention.",
        )
        # A shallow copy: the rollout keeps the actions that were executed.
        return rollout.copy().set("action", rollout["noise"])


class SteeredActorCritic(NoiseActorCritic):
    """A `NoiseActorCritic` with critics of actions in addition to critics of noise, for `NoiseSAC`.

    The replay stores executed actions, so people may take over. The actor maximizes the critics of
    noise.

    Args:
        kwargs: see `NoiseActorCritic`.

    Attributes:
        critic: critics of the executed actions, in units of their bounds.
        noise_critic: critics of the noise, in units of `bound`.
    """

    critic_modules = (*NoiseActorCritic.critic_modules, "noise_critic")

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        **kwargs: Unpack[SteeredActorCriticKwargs],
    ) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        # The constructor's critics read noise; new ones read executed actions.
        self.noise_critic = self.critic
        self.units = type(self.distribution)(action_space, (-20.0, 2.0))  # only for its bounds
        inputs = self.features_size + self.units.size
        settings = self._critic_hidden_sizes, self.critic.num_critics, self._critic_activation
        self.critic = type(self.critic)(inputs, *settings)

    @property
    def replay_action_space(self) -> gymnasium.Space[Any]:
        return self.action_space

    def rollout_for_replay(self, rollout: TensorDict) -> TensorDict:
        return rollout

    def unit(self, action: Tensor) -> Tensor:
        return self.units.unit(action)

    def q_values(
        self,
        td: TensorDict,
        unit_action: Tensor,
        critic: nn.Module | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        # The actor maximizes this function, with the critics of noise.
        return super().q_values(td, unit_action, critic or self.noise_critic, features)

    @torch.no_grad()
    def decoded(self, td: TensorDict, unit_noise: Tensor) -> Tensor:
        """Return the actions in [-1, 1] [B, A] that noise [B, S], in units of the bound, leads to.

        `td` [B] has the observations.
        """
        noise = self.distribution.from_unit(unit_noise)
        return self.unit(self.base.decode(self.base.features(td), noise))


class BaseFeatures(Encoder):
    """The frozen base policy's summary of observations [B]; a tensor is a summary already."""

    def __init__(self, observation_space: gymnasium.Space[Any], base: ChunkPolicy) -> None:
        super().__init__(observation_space)
        self._base = (base,)  # a tuple: the policy owns the module
        self.size = base.summary_size

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        if isinstance(observation, Tensor):
            return observation
        (base,) = self._base
        with torch.no_grad():
            return base.features(
                TensorDict({"observation": observation}, observation.batch_size)
            ).summary


def noise_space(base: ChunkPolicy, bound: float) -> gymnasium.spaces.Box:
    """Return the space of the initial noise of a policy, within ±`bound`."""
    check_range("bound", bound, above=0)
    return gymnasium.spaces.Box(-bound, bound, (base.noise_size,), np.float32)


def flow_policy(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    checkpoint: str | None,
    make: PolicyFactory | None,
    trust_code: bool,
) -> ChunkPolicy:
    """Return the frozen flow policy of a checkpoint, or from `make`; see `frozen_policy`.

    Raises:
        ConfigurationError: also if the policy has no initial noise.
    """
    base = frozen_policy(observation_space, action_space, checkpoint, make, trust_code)
    require(
        getattr(base, "noise_size", 0) > 0,
        f"{type(base).__name__} has no initial noise that could be steered: the base policy needs "
        "a flow, such as VLAPolicy with head: flow.",
    )
    require(
        not base.is_recurrent,
        f"The noise of {type(base).__name__} cannot be steered in real time, because its chunks "
        "also depend on the old chunk: remove real_time of the base policy.",
    )
    return cast(ChunkPolicy, base)
