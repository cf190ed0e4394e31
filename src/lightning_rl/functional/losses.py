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


def clipped_surrogate_loss(
    log_prob: Tensor,
    sample_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    mask: Tensor | None = None,
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
        mask: [B] bool, true where a sample counts, or None.
    """
    rho = ratio(log_prob, sample_log_prob)
    clipped = rho.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -masked_mean(torch.minimum(rho * advantage, clipped * advantage), mask)


def ratio(log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """Return pi(a|s) / mu(a|s) from log-probs, with the log bounded to ±20."""
    return (log_prob - sample_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def value_loss(value: Tensor, value_target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return mean((V - target)^2); all tensors [B]."""
    return masked_mean((value - value_target).square(), mask)


def clipped_value_loss(
    value: Tensor,
    value_target: Tensor,
    old_value: Tensor,
    *,
    clip_coef: float,
    mask: Tensor | None = None,
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
        mask: [B] bool, true where a sample counts, or None.
    """
    clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
    return masked_mean(
        torch.maximum((value - value_target).square(), (clipped - value_target).square()), mask
    )


def approx_kl(log_prob: Tensor, sample_log_prob: Tensor, mask: Tensor | None = None) -> Tensor:
    """Estimate KL(mu || pi) from samples of mu by k3 = (rho - 1) - log rho.

    Unbiased, never negative, low variance.

    Source: Schulman 2020, "Approximating KL Divergence". For KL(pi || reference) from samples of
    pi, pass the
    reference's log-prob first.
    """
    log_ratio = (log_prob - sample_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return masked_mean(torch.expm1(log_ratio) - log_ratio, mask)


def simple_kl(log_prob: Tensor, sample_log_prob: Tensor, mask: Tensor | None = None) -> Tensor:
    """Estimate KL(mu || pi) from samples of mu by k1 = -log rho.

    Unbiased, of high variance, may be negative.
    """
    return masked_mean(sample_log_prob - log_prob, mask)


def kl_penalty(log_prob: Tensor, sample_log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Estimate KL(pi || reference) per sample of mu, so that value and gradient are both right.

        value     rho * (exp(d) - 1 - d),              d = log reference - log pi
        gradient  rho * (-d) * grad log pi,            rho = pi / mu

    Both are unbiased under samples of mu: the value is k3 (Schulman 2020, "Approximating KL
    Divergence"), whose own gradient is that of another divergence; the gradient is that of
    KL(pi || reference) itself, E_pi[log(pi / reference) * grad log pi] (Tang and Munos 2025, "On a
    few pitfalls in KL divergence gradient estimation for RL").

    Args:
        log_prob: [B], of the policy being trained.
        sample_log_prob: [B], of the policy that acted.
        reference_log_prob: [B], of the policy to stay close to.

    Returns:
        [B].
    """
    rho = ratio(log_prob.detach(), sample_log_prob)
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


def normalize_advantage(
    advantage: Tensor, mask: Tensor | None = None, *, eps: float = 1e-8
) -> Tensor:
    """Shift to mean 0 and scale to standard deviation 1 (unbiased).

    A single sample becomes 0 rather than NaN.

    Args:
        advantage: any shape.
        mask: bool, same shape, or None; the statistics are those of the samples that count.
        eps: added to the standard deviation.
    """
    if mask is None:
        std, mean = torch.std_mean(advantage, correction=min(1, advantage.numel() - 1))
        return (advantage - mean) / (std + eps)
    count = mask.sum()
    centered = advantage - masked_mean(advantage, mask)
    variance = masked_mean(centered.square(), mask)
    correction = torch.as_tensor(count, device=advantage.device, dtype=advantage.dtype)
    std = (variance * correction / (correction - 1).clamp(min=1)).sqrt()
    return centered / (std + eps)
