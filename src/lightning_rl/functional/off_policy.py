"""Weights, proximal policy, losses [] for samples of an older policy: pure functions of tensors."""

import torch
from torch import Tensor

from lightning_rl.functional.advantages import (
    check_shapes,
    decay_of,
    reversed_scan,
    temporal_difference,
)
from lightning_rl.functional.losses import LOG_RATIO_LIMIT, bounded_exp, ratio, refuse_broadcast


def decoupled_surrogate_loss(
    log_prob: Tensor,
    proximal_log_prob: Tensor,
    sample_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> Tensor:
    """Return PPO's policy loss for samples of an older policy mu, with a proximal policy prox.

        rho = pi / prox,   w = sg(prox / mu)
        L   = -mean(w * min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A))

    w is 0 if w > weight_cap; the mean is over all samples, so that ignored samples do not increase
    the weight of others. The clip is around prox; the weight corrects for the sampling policy. With
    mu = prox this is `clipped_surrogate_loss`, bit for bit.

    Source: Hilton et al. 2021, "Batch size-invariance for policy optimization" (the decoupled
    objective); Fu et al. 2025, "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for
    Language Reasoning" (the cap, in its code). Differs from the papers: both log ratios are bounded
    to ±20.

    Args:
        log_prob: [B], of the current policy.
        proximal_log_prob: [B], of the policy at the start of the update; no gradient flows into it.
        sample_log_prob: [B], of the acting policy.
        advantage: [B].
        clip_low: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1.
        weight_cap: the largest weight that counts, at least 1.

    Raises:
        ValueError: if the shapes differ.
    """
    refuse_broadcast(log_prob=log_prob, sample_log_prob=sample_log_prob, advantage=advantage)
    proximal_log_prob = proximal_log_prob.detach()
    rho = ratio(log_prob, proximal_log_prob)
    clipped = rho.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain = torch.minimum(rho * advantage, clipped * advantage)
    weight = behavior_weight(proximal_log_prob, sample_log_prob, weight_cap=weight_cap)
    return -(weight * gain).mean()


def behavior_weight(
    proximal_log_prob: Tensor, sample_log_prob: Tensor, *, weight_cap: float
) -> Tensor:
    """Return w = prox / mu [...] without a gradient, or 0 above the cap.

    Source: the weight of Hilton et al. 2021, "Batch size-invariance for policy optimization"; the
    cap from the code of AReaL (Fu et al. 2025).

    Args:
        proximal_log_prob: [...], any shape, of the policy at the start of the update.
        sample_log_prob: [...], the same shape, of the acting policy mu.
        weight_cap: the largest weight that counts.
    """
    weight = ratio(proximal_log_prob, sample_log_prob).detach()
    return torch.where(weight > weight_cap, 0.0, weight)  # NaN stays visible


def loglinear_proximal(
    log_prob: Tensor, sample_log_prob: Tensor, learner_version: Tensor | int, policy_version: Tensor
) -> Tensor:
    """Approximate log-probs [B] of the policy at the start of the update, without a forward pass.

        log prox = log mu + alpha * sg(log pi - log mu)
        alpha    = (v_prox - v_mu) / (v_pi - v_mu)

    with v_mu = `policy_version`, v_prox = `learner_version` and v_pi = v_prox + 1. So alpha = s /
    (s + 1) for samples of staleness s: 0 (prox = mu) for fresh samples, then 1/2, 2/3, ...

    Source: the log-linear proximal approximation in the code of AReaL (Fu et al. 2025), which has
    v_prox = v_pi - 1. Differs from it: the log ratio is bounded to ±20.

    Args:
        log_prob: [B], of the current policy; no gradient flows into it.
        sample_log_prob: [B], of the acting policy.
        learner_version: updates completed at the start of this update (`policy.version`).
        policy_version: [B] int64, updates completed when the action was sampled; at most
            `learner_version`.
    """
    staleness = (learner_version - policy_version).to(log_prob.dtype)
    log_ratio = (log_prob.detach() - sample_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return sample_log_prob + staleness / (staleness + 1) * log_ratio


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """Return (sum w)^2 / (n * sum w^2) [] of log w [...], the effective fraction of n samples.

    1 for equal weights, 1/n if one sample has all the weight, 0 if all weights are 0. A constant
    added to log w has no effect.

    Source: Kish 1965, "Survey Sampling"; Kong 1992, "A note on importance sampling using
    standardized weights".
    """
    largest = log_weight.max().clamp(min=torch.finfo(log_weight.dtype).min)
    weight = (log_weight - largest).exp()
    # The largest weight is 1, so the bound matters only if all weights are 0.
    return weight.sum().square() / (weight.numel() * weight.square().sum()).clamp(min=1)


def kl_penalty(
    log_prob: Tensor,
    sample_log_prob: Tensor,
    reference_log_prob: Tensor,
    behavior_weight: Tensor | None = None,
) -> Tensor:
    """Estimate KL(pi || reference) [B] per sample of mu, with unbiased value and gradient.

        value     rho * (exp(d) - 1 - d),              d = log reference - log pi gradient  rho *
        (-d) * grad log pi,            rho = pi / mu

    For a stale sample, pass prox instead of mu, and w of `behavior_weight`: rho is pi / prox * w,
    and 0 above the cap.

    Source: the value is k3 (Schulman 2020, "Approximating KL Divergence"); the gradient is
    E_pi[log(pi / reference) * grad log pi] (Tang and Munos 2025, "On a few pitfalls in KL
    divergence gradient estimation for RL"), because k3's own gradient belongs to another
    divergence.

    Args:
        log_prob: [B], of the current policy.
        sample_log_prob: [B], of the acting policy; with a weight, of the proximal policy.
        reference_log_prob: [B], of the reference policy.
        behavior_weight: [B], prox / mu of stale samples; None for 1.
    """
    rho = ratio(log_prob.detach(), sample_log_prob)
    if behavior_weight is not None:
        rho = rho * behavior_weight
    d = (reference_log_prob - log_prob.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value = torch.expm1(d) - d
    return rho * (value - d * (log_prob - log_prob.detach()))


def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    *,
    gamma: float | Tensor,
    gae_lambda: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Estimate values and advantages of pi from actions of another policy mu, by V-trace.

        rho_t = min(rho_bar, pi / mu),   c_t = lambda * min(c_bar, pi / mu)
        v_t   = V(s_t) + rho_t * delta_t + gamma * c_t * (1 - done_t) * (v_{t+1} - V(s_{t+1}))
        A_t   = rho_t * (delta_t + gamma * lambda * (1 - done_t) * (v_{t+1} - V(s_{t+1})))

    with delta_t and done as in `gae`. The advantage includes the weight rho_t: do not multiply it
    by pi / mu again. Use it with log pi, or with the ratio of pi to the policy in `log_ratio`.

    Source: Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
    Actor-Learner Architectures", equation 1 (lambda: remark 2) and, for A, section 4.2. Differs
    from the paper: truncated episodes bootstrap from `final_value`; and the next value in A is
    lambda * v_{t+1} + (1 - lambda) * V(s_{t+1}) instead of v_{t+1}. So both results equal `gae`'s
    at ratio 1 (with rho_bar, c_bar of at least 1) for every lambda. At lambda = 1 there is no
    difference from the paper.

    Args:
        log_ratio: [N, T], log pi(a|s) - log mu(a|s) of the taken actions; bounded to ±20.
        reward: [N, T].
        value: [N, T+1], of the current critic, including the bootstrap value.
        terminated: [N, T] bool.
        truncated: [N, T] bool.
        final_value: [N, T], as in `gae`.
        gamma: discount per step, or [N, T]; as in `gae`.
        gae_lambda: trace decay per step.
        rho_bar: bound on the weight of a step. Infinite: v is the value of pi; near 0: of mu.
        c_bar: bound on the trace weights, for low variance; at most rho_bar.

    Returns:
        advantage [N, T], and value_target v [N, T].

    Raises:
        ValueError: if the shapes do not match.
    """
    check_shapes(reward, value, terminated, truncated, final_value, log_ratio)
    weight = bounded_exp(log_ratio)
    rho, done = weight.clamp(max=rho_bar), terminated | truncated
    delta = temporal_difference(reward, value, terminated, truncated, final_value, gamma)
    decay = decay_of(done, gamma * gae_lambda, like=delta)
    correction = reversed_scan(rho * delta, decay * weight.clamp(max=c_bar))  # v - V
    following = torch.cat([correction[:, 1:], torch.zeros_like(correction[:, :1])], dim=1)
    return rho * torch.addcmul(delta, decay, following), correction + value[:, :-1]
