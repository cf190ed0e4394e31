"""Compute the terms of a policy-gradient loss.

Pure functions of tensors, each returning a scalar to minimise.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound on |log ratio| before exp.

So that a collapsed probability gives a large number rather than infinity.
"""


def masked_mean(value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average over the elements where `mask` is true, or over all; zero where no element counts.

    Args:
        value: any shape.
        mask: bool, same shape, or None.
    """
    if mask is None:
        return value.mean()
    return torch.where(mask, value, 0.0).sum() / mask.sum().clamp(min=1)


def _refuse_broadcast(**tensors: Tensor) -> None:
    """Refuse tensors of different shapes: [B, 1] beside [B] would make an average over [B, B].

    Raises:
        ValueError: with the shapes by name.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(
            f"Expected one shape for all, got {shapes}: leave out trailing dimensions of one, in "
            "what the policy's evaluate_actions and get_value return too."
        )


def clipped_surrogate_loss(
    log_prob: Tensor,
    sample_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return PPO's policy loss, -mean(min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)).

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7. Differs
    from the paper: the two
    sides of the clip may differ ("clip-higher", Yu et al. 2025, DAPO, equation 10), and log rho is
    bounded to ±20.

    Args:
        log_prob: [B], of the policy being trained.
        sample_log_prob: [B], of the policy that acted.
        advantage: [B].
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1.
    """
    _refuse_broadcast(log_prob=log_prob, sample_log_prob=sample_log_prob, advantage=advantage)
    rho = ratio(log_prob, sample_log_prob)
    clipped = rho.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(rho * advantage, clipped * advantage).mean()


def ratio(log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """Return pi(a|s) / mu(a|s) from log-probs, with the log bounded to ±20."""
    return bounded_exp(log_prob - sample_log_prob)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log ratio bounded to ±20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


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
    """Return PPO's policy loss for samples of an older policy mu than the one the update began at.

        rho = pi / prox,   w = sg(prox / mu)
        L   = -mean(w * min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A))

    where w is 0 for samples with w > weight_cap, and the mean is over all samples nevertheless:
    leaving some out must not give the others more weight. The trust region is around prox, the
    proximal policy, and the weight corrects for who sampled. With mu = prox this is
    `clipped_surrogate_loss`, bit for bit.

    Source: Hilton et al. 2021, "Batch size-invariance for policy optimization" (the decoupled
    objective); Fu et al. 2025, "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for
    Language Reasoning", whose code has the cap. Differs from the papers: both log ratios are
    bounded to ±20.

    Args:
        log_prob: [B], of the policy being trained.
        proximal_log_prob: [B], of the policy as the update began; no gradient flows into it.
        sample_log_prob: [B], of the policy that acted.
        advantage: [B].
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1.
        weight_cap: the largest weight that counts, at least 1.
    """
    _refuse_broadcast(log_prob=log_prob, sample_log_prob=sample_log_prob, advantage=advantage)
    proximal_log_prob = proximal_log_prob.detach()
    rho = ratio(log_prob, proximal_log_prob)
    clipped = rho.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain = torch.minimum(rho * advantage, clipped * advantage)
    weight = behavior_weight(proximal_log_prob, sample_log_prob, weight_cap=weight_cap)
    return -(weight * gain).mean()


def behavior_weight(
    proximal_log_prob: Tensor, sample_log_prob: Tensor, *, weight_cap: float
) -> Tensor:
    """Return w = prox / mu without a gradient; 0, which it is nowhere else, where above the cap.

    Args:
        proximal_log_prob: any shape.
        sample_log_prob: the same shape.
        weight_cap: the largest weight that counts.
    """
    weight = ratio(proximal_log_prob, sample_log_prob).detach()
    return torch.where(weight > weight_cap, 0.0, weight)  # NaN is not hidden


def loglinear_proximal(
    log_prob: Tensor, sample_log_prob: Tensor, learner_version: Tensor | int, policy_version: Tensor
) -> Tensor:
    """Guess the log-prob of the policy at which the update began, without running it.

        log prox = log mu + alpha * sg(log pi - log mu)
        alpha    = (v_prox - v_mu) / (v_pi - v_mu)

    on the line through the versions of mu (v_mu = `policy_version`) and pi. The update under way
    begins at v_prox = `learner_version` and makes v_pi = v_prox + 1, so alpha = s / (s + 1) for
    samples of staleness s: 0, prox = mu, on fresh ones, and 1/2, 2/3, ... on older ones.

    Source: the log-linear proximal approximation of AReaL (see `decoupled_surrogate_loss`), which
    has v_prox = v_pi - 1. Differs from it: the log ratio is bounded to ±20.

    Args:
        log_prob: [B], of the policy being trained; no gradient flows into it.
        sample_log_prob: [B], of the policy that acted.
        learner_version: updates completed when this one began (`policy.version`).
        policy_version: [B] int64, updates completed when the action was sampled; not above
            `learner_version`.

    Returns:
        log prox, [B].
    """
    staleness = (learner_version - policy_version).to(log_prob.dtype)
    log_ratio = (log_prob.detach() - sample_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return sample_log_prob + staleness / (staleness + 1) * log_ratio


def effective_sample_size(log_weight: Tensor) -> Tensor:
    """Return (sum w)^2 / (n * sum w^2), the share of n samples that is left by their weights.

    1 where all weights are equal, 1/n where one has all the weight, 0 where all are 0.

    Source: Kish 1965, "Survey Sampling"; Kong 1992, "A note on importance sampling using
    standardized weights".

    Args:
        log_weight: any shape, log w; a common constant changes nothing.
    """
    largest = log_weight.max().clamp(min=torch.finfo(log_weight.dtype).min)
    weight = (log_weight - largest).exp()
    # The largest weight is 1, so the lower bound acts only where all are 0.
    return weight.sum().square() / (weight.numel() * weight.square().sum()).clamp(min=1)


def value_loss(value: Tensor, value_target: Tensor) -> Tensor:
    """Return mean((V - target)^2); all tensors [B]."""
    _refuse_broadcast(value=value, value_target=value_target)
    return (value - value_target).square().mean()


def clipped_value_loss(
    value: Tensor,
    value_target: Tensor,
    old_value: Tensor,
    *,
    clip_coef: float,
) -> Tensor:
    """Return mean(max((V - target)^2, (V_old + clip(V - V_old, ±clip_coef) - target)^2)).

    Source: the value clipping of OpenAI's baselines `ppo2`; Engstrom et al. 2020, "Implementation
    Matters in Deep RL",
    section 3.1. Differs from them: no factor one half, as in `value_loss`.

    Args:
        value: [B], of the critic being trained.
        value_target: [B].
        old_value: [B], of the critic before the update.
        clip_coef: how far the value may move from the old one, in units of the value.
    """
    _refuse_broadcast(value=value, value_target=value_target, old_value=old_value)
    clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
    errors = torch.maximum((value - value_target).square(), (clipped - value_target).square())
    return errors.mean()


def approx_kl(log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """Estimate KL(mu || pi) from samples of mu by k3 = (rho - 1) - log rho.

    Unbiased, never negative, low variance.

    Source: Schulman 2020, "Approximating KL Divergence". For KL(pi || reference) from samples of
    pi, pass the
    reference's log-prob first.
    """
    log_ratio = (log_prob - sample_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(log_ratio) - log_ratio).mean()


def kl_penalty(
    log_prob: Tensor,
    sample_log_prob: Tensor,
    reference_log_prob: Tensor,
    behavior_weight: Tensor | None = None,
) -> Tensor:
    """Estimate KL(pi || reference) per sample of mu, so that value and gradient are both right.

        value     rho * (exp(d) - 1 - d),              d = log reference - log pi
        gradient  rho * (-d) * grad log pi,            rho = pi / mu

    Of a stale sample rho is pi / prox * w, with the weight w of `behavior_weight`, which is 0
    beyond its cap; prox is then given in place of mu.

    Both are unbiased under samples of mu: the value is k3 (Schulman 2020, "Approximating KL
    Divergence"), whose own gradient is that of another divergence; the gradient is that of
    KL(pi || reference) itself, E_pi[log(pi / reference) * grad log pi] (Tang and Munos 2025, "On a
    few pitfalls in KL divergence gradient estimation for RL").

    Args:
        log_prob: [B], of the policy being trained.
        sample_log_prob: [B], of the policy that acted; with a weight, of the proximal policy.
        reference_log_prob: [B], of the policy to stay close to.
        behavior_weight: [B], prox / mu of stale samples; None for 1.

    Returns:
        [B].
    """
    rho = ratio(log_prob.detach(), sample_log_prob)
    if behavior_weight is not None:
        rho = rho * behavior_weight
    d = (reference_log_prob - log_prob.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    value = torch.expm1(d) - d
    return rho * (value - d * (log_prob - log_prob.detach()))


def clip_fraction(
    log_prob: Tensor,
    sample_log_prob: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the share of samples whose ratio lies outside [1 - clip_low, 1 + clip_high]."""
    rho = ratio(log_prob, sample_log_prob)
    return masked_mean(((rho < 1.0 - clip_low) | (rho > 1.0 + clip_high)).to(rho.dtype), mask)


def explained_variance(value: Tensor, value_target: Tensor) -> Tensor:
    """Return 1 - Var(target - V) / Var(target): 1 is perfect, 0 no better than a constant.

    It is NaN where the targets are constant.

    Args:
        value: any shape.
        value_target: the same shape.
    """
    variance = value_target.var(correction=0)
    explained = 1.0 - (value_target - value).var(correction=0) / variance
    return torch.where(variance > 0, explained, torch.nan)


def normalize_advantage(advantage: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Shift to mean 0 and scale to standard deviation 1 (unbiased).

    A single sample becomes 0 rather than NaN.

    Args:
        advantage: any shape.
        eps: added to the standard deviation.
    """
    std, mean = torch.std_mean(advantage, correction=min(1, advantage.numel() - 1))
    return (advantage - mean) / (std + eps)
