"""Learn off-policy by soft actor-critic (SAC)."""

import math
from abc import abstractmethod
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algorithms.off_policy import Following, QAlgorithm
from lightning_rl.functional import random_subsets, soft_policy_loss, temperature_loss
from lightning_rl.optim.update import Objective
from lightning_rl.policies import QActorCritic, SquashedActorCritic
from lightning_rl.system.errors import check_range


class SoftActorCritic(QAlgorithm):
    """What SAC is for all kinds of actions: critics, an actor paid for its entropy, a temperature.

    One update steps down the critics' loss, then the actor's, then the temperature's, and moves the
    targets.

    Args:
        policy: actor and critics.
        alpha_learning_rate: of the temperature; as the actor's where not given.
        init_alpha: initial temperature.
        learn_alpha: whether the temperature is learnt, so that the entropy is what it shall be.
        entropy_in_target: whether the critics' targets pay for the entropy of what comes (false:
            RLPD, Ball et al. 2023, for sparse rewards).
        num_target_critics: of how many critics, drawn at random for each sample, the least makes
            the target, while the actor goes by the mean of all; null for the least of all in both.
        kwargs: see `QAlgorithm`.

    Raises:
        ConfigurationError: for a number out of range, and a policy of another kind.
    """

    fitted_always: tuple[str, ...] = ("critic",)
    """The objectives of each update; the others come with every `policy_delay`-th."""

    actor_passes: tuple[str, ...] = ("entropy",)
    """Scalars of the actor's loss that the temperature's reads, see `objective`."""

    def __init__(
        self,
        policy: QActorCritic,
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
        check_range("num_target_critics", num_target_critics, least=1, most=critics)
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
        actor = self.objective(self.actor_loss, *modules, name="actor", passes=self.actor_passes)
        return [self.critic_objective(), actor, *([alpha] if self.learn_alpha else [])]

    def on_fit_start(self) -> None:
        """Lay out the steps of an update."""
        super().on_fit_start()
        written = [p for target, _ in self.slow_copies() for p in target.parameters()]
        self.update_critics = self.in_turn(
            *self.fitted_always, then=self.move_all_targets, written=written
        )
        self.update_all = self.in_turn(
            *self.objectives, then=self.move_all_targets, written=written
        )

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        """Keep a fresh rollout [N, T+1], and take the updates that are due."""
        self.keep(rollout)
        for minibatch in self.minibatches(rollout):
            with_actor = (self.updates_done + 1) % self.policy_delay == 0
            (self.update_all if with_actor else self.update_critics)(minibatch)
        self.finish_iteration(rollout)

    def drawn_fields(self, count: int) -> dict[str, Tensor]:
        """Return which critics count for each of the samples."""
        if self.num_target_critics is None:
            return {}
        critics, size = self.policy.critic.num_critics, self.num_target_critics
        return {"target_critics": random_subsets(count, critics, size, self.generator, self.device)}

    def judged(self, q: Tensor) -> Tensor:
        """Return the values that the actor goes by, of those of all critics [E, ...]."""
        return q.amin(0) if self.num_target_critics is None else q.mean(0)

    @abstractmethod
    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the actor on samples [B], and scalars, `actor_passes` among them."""

    @abstractmethod
    def alpha_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the temperature on samples [B], and scalars to report.

        By the entropy of the actor before its step, which its loss has reported.
        """


class SAC(SoftActorCritic):
    """Soft actor-critic: a stochastic actor that is paid for its entropy, beside Q critics.

    Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications"; with more than
    two critics, of which a random subset counts, Chen et al. 2021, "Randomized Ensembled Double
    Q-Learning"; with `tau: null` and `critic_normalization: batch` Bhatt et al. 2024, "CrossQ";
    with `value_atoms` and residual networks Lee et al. 2025, "Hyperspherical Normalization for
    Scalable Deep Reinforcement Learning". For discrete actions see `DiscreteSAC`.

    Args:
        policy: actor and critics.
        target_entropy: in nats, of actions in [-1, 1]; where not given, minus the number of their
            dimensions.
        kwargs: see `SoftActorCritic`.

    Raises:
        ConfigurationError: for a number out of range, and a policy without Q critics.
    """

    policy: SquashedActorCritic
    policy_kind: type[QActorCritic] = SquashedActorCritic

    def __init__(
        self,
        policy: SquashedActorCritic,
        target_entropy: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        dimensions = policy.distribution.size
        self.target_entropy = -float(dimensions) if target_entropy is None else target_entropy

    def drawn_fields(self, count: int) -> dict[str, Tensor]:
        """Return the noise of the actions, here and in what follows, and which critics count."""
        shape = 2, count, self.policy.distribution.size
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        return {"noise": noise[0], "next_noise": noise[1]} | super().drawn_fields(count)

    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return self.fit_critics(minibatch, self.following(minibatch))

    @torch.no_grad()
    def following(self, minibatch: TensorDict) -> Following:
        """Return what is done where the steps of samples [B] have led, and what that costs."""
        there = TensorDict({"observation": minibatch.get("next_observation")}, minibatch.batch_size)
        through = self.target_encoder, self.target_memory
        features, slow = self.policy.features_for_target(minibatch, there, through)
        action, log_prob = self.policy.draw_unit(there, minibatch["next_noise"], features)
        alpha = self.log_alpha.exp() if self.entropy_in_target else 0.0
        return Following(slow, action, alpha * log_prob)

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        features, for_critics = self.policy.features_for_actor(minibatch)
        action, log_prob = self.policy.draw_unit(minibatch, minibatch["noise"], features)
        alpha = self.log_alpha.detach().exp()
        q = self.policy.q_values(minibatch, action, features=for_critics)
        loss = soft_policy_loss(log_prob, self.judged(q), alpha)
        return loss, {"entropy": -log_prob.mean(), "alpha": alpha}

    def alpha_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return temperature_loss(self.log_alpha, -minibatch["entropy"], self.target_entropy), {}
