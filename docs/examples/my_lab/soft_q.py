"""An off-policy algorithm: soft Q-learning for discrete actions (Haarnoja et al. 2017)."""

import copy
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from lightning_rl import OffPolicyAlgorithm
from my_lab.policy import Categorical


class SoftQ(OffPolicyAlgorithm):
    """The logits of the policy are its Q values, divided by the temperature.

    Args:
        policy: its `actor` computes Q / temperature.
        temperature: weight of the entropy, in units of the return.
        kwargs: see `OffPolicyAlgorithm`.
    """

    def __init__(self, policy: Categorical, temperature: float = 0.5, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        self.temperature, self.actor = temperature, policy.actor
        policy.critic.requires_grad_(False)  # no loss reads the values of the policy
        self.target = copy.deepcopy(policy.actor).requires_grad_(False)

    def configure_objectives(self) -> list[Any]:
        return [self.objective(self.q_loss, self.actor, name="q")]

    def target_networks(self) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
        return [(self.target, self.actor)]

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.add_to_replay(rollout)
        for minibatch in self.minibatches(rollout):
            self.update_in_turn(minibatch, "q")
        self.finish_iteration(rollout)

    def q_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        with torch.no_grad():
            following = self.target(minibatch["next_observation"]).logsumexp(-1)
            target = minibatch["reward"] + minibatch["discount"] * self.temperature * following
        q = self.temperature * self.actor(minibatch["observation"])
        q = q.gather(-1, minibatch["action"][:, None]).squeeze(-1)
        return smooth_l1_loss(q, target), {"q": q.mean()}
