"""Proximal policy optimization (PPO)."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.action_parts import add_part_weights, ratio_terms
from lightning_rl.algorithms.checks import check_entropy
from lightning_rl.algorithms.on_policy import OnPolicyAlgorithm
from lightning_rl.functional import (
    approx_kl,
    clip_fraction,
    clipped_surrogate_loss,
    clipped_value_loss,
    explained_variance,
    gae,
    normalize_advantage,
    value_loss,
    vtrace,
)
from lightning_rl.kwargs import PPOKwargs, Unpack
from lightning_rl.policies import Policy
from lightning_rl.rollout.contract import add_transition_field, discount_of
from lightning_rl.system import ranks
from lightning_rl.system.errors import check_range, require
from lightning_rl.system.rank_moments import normalize_over_ranks


class PPO(OnPolicyAlgorithm):
    """PPO with a clipped ratio and generalized advantage estimation.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms". Differs from the paper:
    time limits bootstrap from the true final observation; advantages may be normalized; the value
    loss may be clipped. Steps of an intervention are not trained on; the return before an
    intervention bootstraps from the value.

    Args:
        policy: an actor with a critic.
        gae_lambda: trace decay of the advantage.
        clip_coef: bound on |ratio - 1|.
        clip_value_loss: clip the change of the value by `clip_coef` too.
        normalize_advantage: over each `minibatch`, the whole `rollout`, or `off`.
        ent_coef: weight of the entropy bonus.
        vf_coef: weight of the value loss.
        critic_warmup_iterations: first iterations with the value loss only, for a pretrained policy
            with an untrained critic; it also trains networks that actor and critic share.
        kwargs: see `OnPolicyAlgorithm`.

    Raises:
        ConfigurationError: for a policy without a critic, or a number out of range.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        gae_lambda: float = 0.95,
        clip_coef: float = 0.2,
        clip_value_loss: bool = False,
        normalize_advantage: Literal["minibatch", "rollout", "off", False] = "minibatch",
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        critic_warmup_iterations: int = 0,
        **kwargs: Unpack[PPOKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        require(
            policy.has_critic,
            f"PPO needs a policy with a critic, but {type(policy).__name__} has none: use "
            "ActorCritic, train with GRPO, or define get_value in a policy of your own.",
        )
        check_range("gae_lambda", gae_lambda, minimum=0, maximum=1)
        check_range("clip_coef", clip_coef, above=0, below=1)
        check_entropy(policy, ent_coef)
        check_range("vf_coef", vf_coef, minimum=0)
        check_range("critic_warmup_iterations", critic_warmup_iterations, minimum=0)
        self.gae_lambda = gae_lambda
        self.clip_coef = clip_coef
        self.clip_value_loss = clip_value_loss
        self.normalize_advantage = normalize_advantage or "off"  # YAML reads a plain `off` as false
        self.ent_coef = ent_coef
        self.vf_coef = vf_coef
        self.critic_warmup_iterations = critic_warmup_iterations
        self.warms_up = False

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.warms_up = int(self.policy.version) < self.critic_warmup_iterations
        with self.phase("values"):
            self.evaluate_values(rollout)
            self.correct_staleness(rollout)
        with self.phase("advantage"):
            self.add_advantages(rollout)
        for minibatch in self.minibatches(rollout, self.fields):
            self.update(minibatch)
        self.finish_iteration(rollout)

    @property
    def trains_actor(self) -> bool:
        return not self.warms_up

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a rollout that the loss reads, besides the policy's extra fields."""
        names = ("observation", "action", "sample_log_prob", "value", "advantage", "return")
        return (*names, *self.correction_fields)

    def add_advantages(self, rollout: TensorDict) -> None:
        """Write `advantage` and `return` [N, T+1] into the rollout."""
        value: Tensor = rollout["value"]
        # Slicing the whole rollout would take as long as the estimate.
        done, terminated, truncated, final_value = (
            rollout[key][:, :-1] for key in ("done", "terminated", "truncated", "final_value")
        )
        policy_mask = self.policy_action_mask(rollout)
        if "intervened" in rollout.keys():
            # The policy did not earn the rewards of an intervention: bootstrap from the value.
            taken_over = rollout["intervened"][:, 1:] & ~done
            truncated = truncated | taken_over
            final_value = torch.where(taken_over, value[:, 1:], final_value)
        data = self.rewards(rollout), value, terminated, truncated, final_value
        # V-trace corrects the advantage; the other corrections weight the loss.
        traces = self.may_be_stale and self.correction.method == "vtrace"
        estimate = partial(vtrace, self.correction.log_ratio(rollout)) if traces else gae
        advantage, target = estimate(
            *data, gamma=discount_of(rollout, self.gamma), gae_lambda=self.gae_lambda
        )
        # Only steps with the policy's own action, on which the critic is trained.
        pair = (x if policy_mask is None else x[policy_mask] for x in (value[:, :-1], target))
        self.statistics.set("explained_variance", explained_variance(*pair))
        if self.normalize_advantage == "rollout":
            # Padding and interventions must not change mean and standard deviation.
            x = advantage if policy_mask is None else advantage[policy_mask]
            if ranks.world_size() > 1:
                x = normalize_over_ranks(x.flatten(), [x.numel()]).view_as(x)
            else:
                x = normalize_advantage(x)
            advantage = x if policy_mask is None else advantage.masked_scatter(policy_mask, x)
        add_transition_field(rollout, "advantage", advantage)
        add_transition_field(rollout, "return", target)

    def prepared_fields(
        self, flat: TensorDict, order: Tensor, sizes: Sequence[int]
    ) -> dict[str, Tensor]:
        fields = super().prepared_fields(flat, order, sizes)
        if self.normalize_advantage == "minibatch":
            advantage = flat["advantage"].index_select(0, order)
            fields["advantage"] = normalize_over_ranks(advantage, sizes)
        return fields

    def prepare(self, minibatch: TensorDict) -> TensorDict:
        if minibatch["sample_log_prob"].dim() > 1:
            minibatch = add_part_weights(minibatch)
        if self.normalize_advantage == "minibatch":
            return minibatch.set("advantage", normalize_advantage(minibatch["advantage"]))
        return minibatch

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        policy = self.policy.evaluate_actions(minibatch)
        old, target = minibatch["sample_log_prob"], minibatch["return"]
        if self.may_be_stale:
            old = self.correction.proximal(policy["sample_log_prob"], minibatch)
        joint = self.correction.joint_ratio
        terms = ratio_terms(policy, minibatch, old, torch.ones_like(target), joint)

        clip = {"clip_low": self.clip_coef, "clip_high": self.clip_coef}
        if self.may_be_stale and self.correction.weighs_samples:
            policy_loss = self.correction.policy_loss(terms, **clip)
        else:
            policy_loss = clipped_surrogate_loss(terms.new, terms.old, terms.advantage, **clip)

        if self.clip_value_loss:
            critic_loss = clipped_value_loss(
                policy["value"], target, minibatch["value"], clip_coef=self.clip_coef
            )
        else:
            critic_loss = value_loss(policy["value"], target)

        entropy = (terms.entropy_weight * policy["entropy"]).mean()
        loss = self.vf_coef * critic_loss
        if not self.warms_up:
            loss = loss + policy_loss - self.ent_coef * entropy
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": critic_loss,
            **({"entropy": entropy} if self.policy.has_entropy else {}),
            # `target_kl` and the adaptive learning rate read it.
            "approx_kl": approx_kl(terms.whole_new, terms.whole_old),
            "clip_fraction": clip_fraction(
                terms.new.detach(), terms.old, **clip, mask=terms.counted
            ),
        }
