"""Soft actor-critic (SAC)."""

import math
from abc import abstractmethod
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algorithms.off_policy import QAlgorithm
from lightning_rl.functional import random_subsets, soft_policy_loss, temperature_loss
from lightning_rl.kwargs import SACKwargs, Unpack
from lightning_rl.optim.update import Objective
from lightning_rl.policies import QActorCritic, SquashedActorCritic
from lightning_rl.system.errors import check_range


class SoftActorCritic(QAlgorithm):
    """Base class of SAC algorithms: critics, an actor with an entropy bonus, a temperature.

    One update takes a step on the critics' loss, then the actor's, then the temperature's, and
    moves the target networks.

    Args:
        policy: actor and critics.
        alpha_learning_rate: learning rate of the temperature. Default: `learning_rate`.
        init_alpha: initial temperature.
        learn_alpha: whether to learn the temperature for a target entropy.
        entropy_in_target: whether the critics' targets include the entropy bonus (false: RLPD, Ball
            et al. 2023, for sparse rewards).
        num_target_critics: number of critics, drawn per sample, whose minimum is the target; the
            actor then uses the mean of all critics. Null: both use the minimum of all.
        kwargs: see `QAlgorithm`.

    Raises:
        ConfigurationError: for a policy of another kind.
    """

    undelayed_objectives: tuple[str, ...] = ("critic",)
    """The objectives of every update; every `policy_delay`-th update has all objectives."""

    actor_forwarded_scalars: tuple[str, ...] = ("entropy",)
    """Scalars of the actor's loss that the temperature's loss reads, see `objective`."""

    def __init__(
        self,
        policy: QActorCritic,
        *,
        alpha_learning_rate: float | None = None,
        init_alpha: float = 1.0,
        learn_alpha: bool = True,
        entropy_in_target: bool = True,
        num_target_critics: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("alpha_learning_rate", alpha_learning_rate, above=0)
        check_range("init_alpha", init_alpha, above=0)
        critics = policy.critic.num_critics
        check_range("num_target_critics", num_target_critics, minimum=1, maximum=critics)
        self.alpha_learning_rate = alpha_learning_rate
        self.learn_alpha = learn_alpha
        self.entropy_in_target = entropy_in_target
        self.num_target_critics = None if num_target_critics == critics else num_target_critics
        self.log_alpha = nn.Parameter(torch.tensor(math.log(init_alpha)), requires_grad=learn_alpha)

    def configure_objectives(self) -> list[Objective]:
        alpha = self.objective(
            self.alpha_loss,
            groups=[{"params": [self.log_alpha]}],
            name="alpha",
            learning_rate=self.alpha_learning_rate,
        )
        modules = self.policy.actor_modules()
        forwarded = self.actor_forwarded_scalars
        actor = self.objective(self.actor_loss, *modules, name="actor", forwarded_scalars=forwarded)
        return [self.critic_objective(), actor, *([alpha] if self.learn_alpha else [])]

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.add_to_replay(rollout)
        for minibatch in self.minibatches(rollout):
            # Counted over the run, so that a resumed run keeps the turn of the actor.
            with_actor = (self.updates_done + 1) % self.policy_delay == 0
            self.update_in_turn(
                minibatch, *(self.objectives if with_actor else self.undelayed_objectives)
            )
        self.finish_iteration(rollout)

    def noise_fields(self, count: int) -> dict[str, Tensor]:
        if self.num_target_critics is None:
            return {}
        critics, size = self.policy.critic.num_critics, self.num_target_critics
        # Per sample, not per minibatch as in REDQ: a field like the noise.
        return {"target_critics": random_subsets(count, critics, size, self.generator, self.device)}

    def aggregate_q(self, q: Tensor) -> Tensor:
        """Reduce the values of all critics [E, ...] to the value that the actor maximizes."""
        return q.amin(0) if self.num_target_critics is None else q.mean(0)

    @abstractmethod
    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor's loss on samples [B], and scalars to log, with the forwarded ones."""

    @abstractmethod
    def alpha_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the temperature's loss on samples [B] for the entropy before the actor's step."""


class SAC(SoftActorCritic):
    """Soft actor-critic: a stochastic actor with an entropy bonus, and Q critics.

    For discrete actions see `DiscreteSAC`.

    Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications"; with
    `num_target_critics` Chen et al. 2021, "Randomized Ensembled Double Q-Learning"; with `tau:
    null` and `critic_normalization: batch` Bhatt et al. 2024, "CrossQ"; with `value_atoms` and
    residual networks Lee et al. 2025, "Hyperspherical Normalization for Scalable Deep Reinforcement
    Learning".

    Args:
        policy: actor and critics.
        target_entropy: in nats, of actions in [-1, 1]. Default: minus the number of action
            dimensions.
        kwargs: see `SoftActorCritic`.

    Raises:
        ConfigurationError: for a policy without Q critics.
    """

    policy: SquashedActorCritic
    policy_kind: type[QActorCritic] = SquashedActorCritic

    def __init__(
        self,
        policy: SquashedActorCritic,
        *,
        target_entropy: float | None = None,
        **kwargs: Unpack[SACKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        dimensions = policy.distribution.size
        self.target_entropy = -float(dimensions) if target_entropy is None else target_entropy

    def noise_fields(self, count: int) -> dict[str, Tensor]:
        shape = 2, count, self.policy.distribution.size
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        # One draw for all minibatches of an iteration, instead of two small ones per update.
        return {"noise": noise[0], "next_noise": noise[1]} | super().noise_fields(count)

    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        policy, critic = self.policy, self.policy.critic
        next_td = TensorDict({"observation": minibatch.get("next_observation")}, [len(minibatch)])
        with torch.no_grad():
            encoders = self.target_encoder, self.target_memory
            features, for_critics = policy.features_for_target(minibatch, next_td, encoders)
            action, log_prob = policy.draw_unit(next_td, minibatch["next_noise"], features)
            alpha = self.log_alpha.exp() if self.entropy_in_target else 0.0
        # An override of `critic_outputs` may give the critics other actions than the actor draws.
        outputs, next_outputs = self.critic_outputs(minibatch, for_critics, action)
        next_q, probs = critic.min_value(next_outputs, minibatch.get("target_critics", None))
        reward, discount = self.normalized_reward(minibatch["reward"]), minibatch["discount"]
        # Haarnoja et al. 2018, equations 2 and 3; the cost of entropy shifts each atom of
        # categorical critics. The discount is 0 after a termination, but not at a time limit.
        target = reward + discount * (next_q - alpha * log_prob)
        return critic.loss(outputs, target, probs)

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        features, for_critics = self.policy.features_for_actor(minibatch)
        action, log_prob = self.policy.draw_unit(minibatch, minibatch["noise"], features)
        alpha = self.log_alpha.detach().exp()
        q = self.policy.q_values(minibatch, action, features=for_critics)
        loss = soft_policy_loss(log_prob, self.aggregate_q(q), alpha)
        return loss, {"entropy": -log_prob.mean(), "alpha": alpha}

    def alpha_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return temperature_loss(self.log_alpha, -minibatch["entropy"], self.target_entropy), {}
