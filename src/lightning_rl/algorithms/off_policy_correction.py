"""Correct policy losses for stale rollouts."""

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.action_parts import RatioTerms, whole_action
from lightning_rl.algorithms.rollout_evaluation import log_prob_of
from lightning_rl.functional import (
    approx_kl,
    behavior_weight,
    decoupled_surrogate_loss,
    effective_sample_size,
    kl_penalty,
    loglinear_proximal,
)
from lightning_rl.policies import Policy
from lightning_rl.rollout.contract import add_transition_field
from lightning_rl.system.errors import check_range

Correction = Literal["decoupled", "loglinear", "vtrace", "bypass"]
"""The setting `off_policy_correction`."""


class OffPolicyCorrection:
    """The terms of a policy loss for samples of an older policy mu; used only for stale rollouts.

    The proximal policy is the policy at the start of the update; the ratio is clipped around it.
    `decoupled` recomputes its log-probs once per rollout, and weights a sample by prox / mu (Hilton
    et al. 2021). `loglinear` interpolates its log-probs between mu and the current policy, without
    a forward pass. `vtrace` recomputes its log-probs, and the advantage contains the weight
    (Espeholt et al. 2018). `bypass` uses mu as the proximal policy.

    Args:
        method: one of these methods.
        weight_cap: samples with a larger weight prox / mu do not count.
        joint_ratio: see `Policy.joint_ratio`.

    Raises:
        ConfigurationError: for a weight cap below 1.
    """

    def __init__(self, method: Correction, weight_cap: float, *, joint_ratio: bool = False) -> None:
        check_range("behavior_weight_cap", weight_cap, minimum=1)
        self.method = method
        self.weight_cap = weight_cap
        self.joint_ratio = joint_ratio

    @property
    def fields(self) -> tuple[str, ...]:
        """Additional fields that the loss reads."""
        if self.method == "bypass":
            return ()
        return ("lag",) if self.method == "loglinear" else ("proximal_log_prob",)

    @torch.no_grad()
    def add_fields(self, policy: Policy, rollout: TensorDict) -> dict[str, Tensor]:
        """Write `fields` [N, T+1]; return scalars about the staleness, to log."""
        transitions = rollout[:, :-1]
        lag = (policy.version - transitions["policy_version"]).float()
        scalars = {"async/staleness_mean": lag.mean(), "async/staleness_max": lag.max()}
        if self.method == "loglinear":
            add_transition_field(rollout, "lag", lag)
        # One forward pass per rollout, before the first update: this policy is the proximal one.
        if self.method in ("decoupled", "vtrace"):
            proximal, behavior = log_prob_of(policy, rollout), transitions["sample_log_prob"]
            add_transition_field(rollout, "proximal_log_prob", proximal)
            # Reported only: the loss computes its own weights per minibatch.
            weight = behavior_weight(proximal, behavior, weight_cap=self.weight_cap)
            scalars |= {
                "async/behavior_kl": approx_kl(proximal, behavior),
                "async/effective_samples": effective_sample_size(proximal - behavior),
                "async/masked_samples": (weight == 0).float().mean(),
            }
        return scalars

    def log_ratio(self, rollout: TensorDict) -> Tensor:
        """Return log prox - log mu [N, T] of whole actions; call `add_fields` first."""
        log_ratio: Tensor = rollout["proximal_log_prob"] - rollout["sample_log_prob"]
        return whole_action(log_ratio, rollout)[:, :-1]

    @property
    def weighs_samples(self) -> bool:
        """Whether to use `policy_loss` instead of the plain clipped loss."""
        return self.method in ("decoupled", "loglinear")

    def policy_loss(self, terms: RatioTerms, *, clip_low: float, clip_high: float) -> Tensor:
        """Return the policy loss [] with weights prox / mu; see `decoupled_surrogate_loss`."""
        return decoupled_surrogate_loss(
            terms.new,
            terms.old,
            terms.behavior,
            terms.advantage,
            clip_low=clip_low,
            clip_high=clip_high,
            weight_cap=self.weight_cap,
        )

    def kl_penalty(self, log_prob: Tensor, minibatch: TensorDict) -> Tensor:
        """Return KL(policy || reference) per sample, weighted, from log-probs [B] or [B, L]."""
        behavior: Tensor = minibatch["sample_log_prob"]
        reference: Tensor = minibatch["reference_log_prob"]
        if not self.weighs_samples:
            return kl_penalty(log_prob, behavior, reference)
        proximal = self.proximal(log_prob, minibatch)
        acted = (proximal, behavior)
        if self.joint_ratio:
            # A joint ratio is one weight per action, so sum the parts before the cap.
            acted = (whole_action(proximal, minibatch), whole_action(behavior, minibatch))
        weight = behavior_weight(*acted, weight_cap=self.weight_cap)
        # [B] to [B, 1], which broadcasts over parts [B, L].
        weight = weight.view(*weight.shape, *[1] * (log_prob.dim() - weight.dim()))
        return kl_penalty(log_prob, proximal, reference, weight)

    def proximal(self, log_prob: Tensor, minibatch: TensorDict) -> Tensor:
        """Return log-probs under the policy at the start of the update, detached.

        Args:
            log_prob: [B] or [B, L], of the current policy.
            minibatch: [B], with `sample_log_prob` and `fields`.
        """
        log_prob = log_prob.detach()
        sample_log_prob: Tensor = minibatch["sample_log_prob"]
        if self.method == "bypass":
            return sample_log_prob
        if self.method == "loglinear":
            lag: Tensor = minibatch["lag"].view(-1, *[1] * (log_prob.dim() - 1))
            # Only the difference of the versions matters: the lag stands for v_prox, 0 for v_mu.
            return loglinear_proximal(log_prob, sample_log_prob, lag, torch.zeros_like(lag))
        proximal: Tensor = minibatch["proximal_log_prob"]
        return proximal
