"""Terms of a policy-gradient loss: pure functions of tensors; losses are scalars [] to minimize."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound on |log ratio| before exp, so that the ratio of a collapsed probability is finite."""


def refuse_broadcast(**tensors: Tensor) -> None:
    """Refuse tensors of different shapes: [B, 1] and [B] would broadcast to a mean over [B, B].

    Raises:
        ValueError: if the shapes differ.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(
            f"Expected equal shapes, got {shapes}: remove trailing dimensions of one, also from "
            "the results of the policy's evaluate_actions and get_value."
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
    from the paper: the two sides of the clip may differ ("clip-higher", Yu et al. 2025, DAPO,
    equation 10), and log rho is bounded to ±20.

    Args:
        log_prob: [B], of the current policy.
        sample_log_prob: [B], of the acting policy.
        advantage: [B].
        clip_low: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1.

    Raises:
        ValueError: if the shapes differ.
    """
    refuse_broadcast(log_prob=log_prob, sample_log_prob=sample_log_prob, advantage=advantage)
    rho = ratio(log_prob, sample_log_prob)
    clipped = rho.clamp(1.0 - clip_low, 1.0 + clip_high)
    # The minimum is a lower bound of the gain: the clip never hides a loss.
    return -torch.minimum(rho * advantage, clipped * advantage).mean()


def ratio(log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """Return pi(a|s) / mu(a|s) [...] from log-probs of pi [...] and mu [...].

    Source: the likelihood ratio r_t of Schulman et al. 2017, "Proximal Policy Optimization
    Algorithms", equation 6. Differs from the paper: the log ratio is bounded to ±20.
    """
    return bounded_exp(log_prob - sample_log_prob)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(x) of a log ratio x [...], bounded to ±20 so that exp(x) is finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def value_loss(value: Tensor, value_target: Tensor) -> Tensor:
    """Return mean((V - target)^2) of V [B] and target [B], without the usual factor one half.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", L^VF of equation 9.

    Raises:
        ValueError: if the shapes differ.
    """
    refuse_broadcast(value=value, value_target=value_target)
    return (value - value_target).square().mean()


def clipped_value_loss(
    value: Tensor, value_target: Tensor, old_value: Tensor, *, clip_coef: float
) -> Tensor:
    """Return mean(max((V - target)^2, (V_old + clip(V - V_old, ±clip_coef) - target)^2)).

    Source: the value clipping of OpenAI's baselines `ppo2`; Engstrom et al. 2020, "Implementation
    Matters in Deep RL", section 3.1. Differs from them: no factor one half, as in `value_loss`.

    Args:
        value: [B], of the current critic.
        value_target: [B].
        old_value: [B], of the critic before the update.
        clip_coef: largest change of the value, in units of the value.

    Raises:
        ValueError: if the shapes differ.
    """
    refuse_broadcast(value=value, value_target=value_target, old_value=old_value)
    clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
    errors = torch.maximum((value - value_target).square(), (clipped - value_target).square())
    return errors.mean()


def approx_kl(log_prob: Tensor, sample_log_prob: Tensor) -> Tensor:
    """Estimate KL(mu || pi) [], in nats, from samples of mu by k3 = (rho - 1) - log rho.

    Unbiased, never negative, low variance. For KL(pi || reference) from samples of pi, pass the
    reference's log-prob first.

    Source: Schulman 2020, "Approximating KL Divergence". Differs from it: log rho is bounded to
    ±20.

    Args:
        log_prob: [...], any shape, of pi.
        sample_log_prob: [...], of the acting policy mu.
    """
    log_ratio = (log_prob - sample_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # `expm1` keeps the digits of tiny ratios, where exp(x) - 1 - x would be rounding noise.
    return (torch.expm1(log_ratio) - log_ratio).mean()


def clip_fraction(
    log_prob: Tensor,
    sample_log_prob: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the fraction [] of ratios outside [1 - clip_low, 1 + clip_high]; 0 without samples.

    Source: no paper; `clipfrac` of OpenAI's baselines `ppo2` (2017).

    Args:
        log_prob: [...], any shape, of the current policy.
        sample_log_prob: [...], of the acting policy.
        clip_low: largest distance of the ratio below 1.
        clip_high: largest distance of the ratio above 1.
        mask: [...], the same shape, bool, true for samples that count; None for all.
    """
    rho = ratio(log_prob, sample_log_prob)
    outside = ((rho < 1.0 - clip_low) | (rho > 1.0 + clip_high)).to(rho.dtype)
    if mask is None:
        return outside.mean()
    return torch.where(mask, outside, 0.0).sum() / mask.sum().clamp(min=1)


def normalize_advantage(advantage: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Return (A - mean A) / (std A + eps) [...] of A [...], with the unbiased standard deviation.

    A single sample becomes 0 rather than NaN.

    Source: no equation of the PPO paper; item 7 of Huang et al. 2022, "The 37 Implementation
    Details of Proximal Policy Optimization".
    """
    # One sample has no unbiased standard deviation.
    std, mean = torch.std_mean(advantage, correction=min(1, advantage.numel() - 1))
    return (advantage - mean) / (std + eps)
