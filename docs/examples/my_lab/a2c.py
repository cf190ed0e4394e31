"""An on-policy algorithm: advantage actor-critic (Mnih et al. 2016)."""

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from lightning_rl import OnPolicyAlgorithm, Policy
from lightning_rl.extend.rollout import add_transition_field
from lightning_rl.functional import gae, normalize_advantage, value_loss

FIELDS = ("observation", "action", "advantage", "return")


class A2C(OnPolicyAlgorithm):
    """One pass over each rollout, weighted by normalised advantages."""

    def __init__(self, policy: Policy, ent_coef: float = 0.01, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        self.ent_coef = ent_coef

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.evaluate_values(rollout)
        steps = rollout[:, :-1]
        advantage, target = gae(
            self.rewards(rollout),
            rollout["value"],
            steps["terminated"],
            steps["truncated"],
            steps["final_value"],
            gamma=self.gamma,
            gae_lambda=0.95,
        )
        add_transition_field(rollout, "advantage", normalize_advantage(advantage))
        add_transition_field(rollout, "return", target)
        for minibatch in self.minibatches(rollout, FIELDS):
            self.update(minibatch)
        self.finish_iteration(rollout)

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        new = self.policy.evaluate_actions(minibatch)
        policy_loss = -(minibatch["advantage"] * new["sample_log_prob"]).mean()
        critic_loss = value_loss(new["value"], minibatch["return"])
        loss = policy_loss + 0.5 * critic_loss - self.ent_coef * new["entropy"].mean()
        return loss, {"policy_loss": policy_loss, "value_loss": critic_loss}
