"""Learn off-policy by soft actor-critic (SAC)."""

import copy
import math
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algorithms.off_policy import OffPolicyAlgorithm, check_q_policy, slow_copy
from lightning_rl.errors import check_range
from lightning_rl.functional import (
    ensemble_loss,
    least_of_subset,
    random_subsets,
    soft_policy_loss,
    soft_target,
    temperature_loss,
)
from lightning_rl.optim.update import Objective, OptimizerFactory
from lightning_rl.policies import SquashedActorCritic


class SAC(OffPolicyAlgorithm):
    """Soft actor-critic: a stochastic actor that is paid for its entropy, beside Q critics.

    Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications"; with more than
    two critics, of which a random subset counts, Chen et al. 2021, "Randomized Ensembled Double
    Q-Learning". One update steps down the critics' loss, then the actor's, then the temperature's,
    and moves the targets.

    Args:
        policy: actor and critics.
        learning_rate: of the actor.
        critic_learning_rate: as the actor's where not given.
        alpha_learning_rate: of the temperature; as the actor's where not given.
        init_alpha: initial temperature.
        learn_alpha: whether the temperature is learnt, so that the entropy is `target_entropy`.
        target_entropy: in nats, of actions in [-1, 1]; where not given, minus the number of their
            dimensions.
        entropy_in_target: whether the critics' targets pay for the entropy of what comes (false:
            RLPD, Ball et al. 2023, for sparse rewards).
        num_target_critics: of how many critics, drawn at random for each sample, the least makes
            the target, while the actor goes by the mean of all; null for the least of all in both.
        policy_delay: updates of the critics for each of actor and temperature.
        optimizer: of all three; where not given, Adam.
        kwargs: see `OffPolicyAlgorithm`.

    Raises:
        ConfigurationError: for a number out of range, and a policy without Q critics.
    """

    policy: SquashedActorCritic
    fitted_always: tuple[str, ...] = ("critic",)
    """The objectives of each update; the others come with every `policy_delay`-th."""

    def __init__(
        self,
        policy: SquashedActorCritic,
        learning_rate: float = 3e-4,
        critic_learning_rate: float | None = None,
        alpha_learning_rate: float | None = None,
        init_alpha: float = 1.0,
        learn_alpha: bool = True,
        target_entropy: float | None = None,
        entropy_in_target: bool = True,
        num_target_critics: int | None = None,
        policy_delay: int = 1,
        optimizer: OptimizerFactory | None = None,
        **kwargs: Any,
    ) -> None:
        check_q_policy(type(self).__name__, policy, SquashedActorCritic)
        super().__init__(policy, learning_rate=learning_rate, optimizer=optimizer, **kwargs)
        check_range("critic_learning_rate", critic_learning_rate, above=0)
        check_range("alpha_learning_rate", alpha_learning_rate, above=0)
        check_range("init_alpha", init_alpha, above=0)
        check_range("policy_delay", policy_delay, least=1)
        critics = policy.critic.num_critics
        check_range("num_target_critics", num_target_critics, least=1, most=critics)
        self.critic_learning_rate = critic_learning_rate
        self.alpha_learning_rate = alpha_learning_rate
        self.learn_alpha = learn_alpha
        self.entropy_in_target = entropy_in_target
        self.policy_delay = policy_delay
        self.num_target_critics = None if num_target_critics == critics else num_target_critics
        self.num_actions = policy.distribution.size
        self.target_entropy = -float(self.num_actions) if target_entropy is None else target_entropy
        self.log_alpha = nn.Parameter(torch.tensor(math.log(init_alpha)), requires_grad=learn_alpha)
        self.target_critic = copy.deepcopy(policy.critic).requires_grad_(False)
        self.target_encoder = slow_copy(policy.encoder_of_critic)
        self.target_memory = slow_copy(policy.memory_of_critic)

    def configure_objectives(self) -> list[Objective]:
        """Return the losses of critics, actor and temperature."""
        rates = {"critic": self.critic_learning_rate, "alpha": self.alpha_learning_rate}
        critic = self.objective(
            self.critic_loss,
            *self.policy.critic_modules_to_train(),
            name="critic",
            learning_rate=rates["critic"],
        )
        alpha = self.objective(
            self.alpha_loss,
            groups=[{"params": [self.log_alpha]}],
            name="alpha",
            learning_rate=rates["alpha"],
        )
        actor = self.objective(self.actor_loss, *self.policy.actor_modules(), name="actor")
        return [critic, actor, *([alpha] if self.learn_alpha else [])]

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
        """Return the noise of the actions, here and in what follows, and which critics count."""
        shape = 2, count, self.num_actions
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        fields = {"noise": noise[0], "next_noise": noise[1]}
        if self.num_target_critics is not None:
            critics, size = self.policy.critic.num_critics, self.num_target_critics
            subsets = random_subsets(count, critics, size, self.generator, self.device)
            fields["target_critics"] = subsets
        return fields

    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the critics on samples [B], and scalars to report."""
        target = self.target(minibatch)
        action = self.policy.unit(minibatch["action"])
        q = self.policy.q_values(minibatch, action)
        return ensemble_loss(q, target), {"q": q.mean(), "q_target": target.mean()}

    @torch.no_grad()
    def target(self, minibatch: TensorDict) -> Tensor:
        """Return what the critics are to say of samples [B]."""
        following = TensorDict(
            {"observation": minibatch.get("next_observation")}, minibatch.batch_size
        )
        through = self.target_encoder, self.target_memory
        features, slow = self.policy.features_for_target(minibatch, following, through)
        action, log_prob = self.policy.draw_unit(following, minibatch["next_noise"], features)
        q = self.policy.q_values(following, action, self.target_critic, slow)
        least = least_of_subset(q, minibatch.get("target_critics", None))
        alpha = self.log_alpha.exp() if self.entropy_in_target else 0.0
        return soft_target(minibatch["reward"], minibatch["discount"], least, log_prob, alpha)

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the actor on samples [B], and scalars to report."""
        features, for_critics = self.policy.features_for_actor(minibatch)
        action, log_prob = self.policy.draw_unit(minibatch, minibatch["noise"], features)
        alpha = self.log_alpha.detach().exp()
        q = self.policy.q_values(minibatch, action, features=for_critics)
        judged = q.amin(0) if self.num_target_critics is None else q.mean(0)
        loss = soft_policy_loss(log_prob, judged, alpha)
        return loss, {"entropy": -log_prob.mean(), "alpha": alpha}

    def alpha_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the temperature on samples [B], and scalars to report."""
        # That of the actor before its step, which its loss has reported.
        return temperature_loss(self.log_alpha, -minibatch["entropy"], self.target_entropy), {}

    def slow_copies(self) -> list[tuple[nn.Module, nn.Module]]:
        policy = self.policy
        pairs = [
            (self.target_critic, policy.critic),
            (self.target_encoder, policy.encoder_of_critic),
            (self.target_memory, policy.memory_of_critic),
        ]
        return [(slow, fast) for slow, fast in pairs if slow is not None and fast is not None]
