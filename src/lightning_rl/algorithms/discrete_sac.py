"""Soft actor-critic for discrete actions."""

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.sac import SoftActorCritic
from lightning_rl.functional import (
    ensemble_loss,
    expected_soft_value,
    min_of_subset,
    temperature_loss,
)
from lightning_rl.kwargs import DiscreteSACKwargs, Unpack
from lightning_rl.policies import DiscreteActorCritic, QActorCritic
from lightning_rl.system.errors import check_range


class DiscreteSAC(SoftActorCritic):
    """Soft actor-critic for discrete actions; the critics return a value for each action.

    Next values, the actor's loss and the entropy are expectations over the allowed actions. The
    target entropy depends on the number of allowed actions in each state.

    Source: Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings". Differs from the
    paper: a lower target entropy; the paper's .98 of the largest entropy is almost uniform.

    Args:
        policy: actor and critics.
        target_entropy_share: target entropy as a share of log n, for n allowed actions.
        kwargs: see `SoftActorCritic`.

    Raises:
        ConfigurationError: for a policy of another kind.
    """

    policy: DiscreteActorCritic
    policy_kind: type[QActorCritic] = DiscreteActorCritic
    actor_forwarded_scalars = ("entropy", "target_entropy")

    def __init__(
        self,
        policy: DiscreteActorCritic,
        *,
        target_entropy_share: float = 0.5,
        **kwargs: Unpack[DiscreteSACKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("target_entropy_share", target_entropy_share, minimum=0, below=1)
        self.target_entropy_share = target_entropy_share

    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        target = self.target(minibatch)
        q = self.policy.action_values(minibatch)
        # One action for all critics [E, B, 1], because `gather` does not broadcast.
        action = minibatch["action"].reshape(1, -1, 1).expand(len(q), -1, 1)
        q = q.gather(-1, action).squeeze(-1)
        return ensemble_loss(q, target), {"q": q.mean(), "q_target": target.mean()}

    @torch.no_grad()
    def target(self, minibatch: TensorDict) -> Tensor:
        """Return the critics' target [B] for samples [B]."""
        next_td = TensorDict({"observation": minibatch.get("next_observation")}, [len(minibatch)])
        encoders = self.target_encoder, self.target_memory
        features, for_critics = self.policy.features_for_target(minibatch, next_td, encoders)
        log_probs = self.policy.log_probs(next_td, features)
        q = self.policy.action_values(next_td, self.target_critic, for_critics)
        least_q = min_of_subset(q, minibatch.get("target_critics", None))
        alpha = self.log_alpha.exp() if self.entropy_in_target else 0.0
        next_value = expected_soft_value(log_probs, least_q, alpha)
        target: Tensor = (
            self.normalized_reward(minibatch["reward"]) + minibatch["discount"] * next_value
        )
        return target

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        features, for_critics = self.policy.features_for_actor(minibatch)
        log_probs = self.policy.log_probs(minibatch, features)
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            # The expectation over all actions needs no gradient through the critics.
            q = self.aggregate_q(self.policy.action_values(minibatch, features=for_critics))
        loss = -expected_soft_value(log_probs, q, alpha).mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        allowed = self.policy.num_allowed(minibatch).to(log_probs.dtype)
        target = self.target_entropy_share * allowed.log()
        reported = {"entropy": entropy.mean(), "target_entropy": target.mean(), "alpha": alpha}
        return loss, reported

    def alpha_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        # The target differs between states, so it is passed by the actor's loss, not a setting.
        lacking = minibatch["target_entropy"] - minibatch["entropy"]
        return temperature_loss(self.log_alpha, lacking, 0.0), {}
