"""Formulas of flow matching: pure functions of tensors.

Time runs from 1 (noise e) to 0 (action a): x_t = (1 - t) a + t e, with the velocity v = e - a.
"""

import torch
from torch import Tensor


def flow_matching_loss(velocity: Tensor, action: Tensor, noise: Tensor) -> Tensor:
    """Return (v - (e - a))^2 for each number, [...].

    Source: Lipman et al. 2023, "Flow Matching for Generative Modeling", equation 23.

    Args:
        velocity: [...], v at x_t.
        action: [...], a.
        noise: [...], e.
    """
    return (velocity - (noise - action)).square()


def interpolate(action: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return x_t = (1 - t) a + t e, [B, ...], for a [B, ...], e [B, ...] and t [B].

    Source: Lipman et al. 2023, "Flow Matching for Generative Modeling", equation 22. Differs from
    the paper: time runs from noise to action backwards, and sigma_min is 0.
    """
    t = t.view(-1, *[1] * (action.dim() - 1))
    return torch.lerp(action, noise, t)


def flow_transition(
    x: Tensor, velocity: Tensor, t: Tensor, *, step_size: float, noise_level: float
) -> tuple[Tensor, Tensor]:
    """Return mean [B, ...] and standard deviation [B, 1, ...] of a stochastic Euler step.

    With x0 = x - t v, x1 = x + (1 - t) v and sigma = s sqrt(t / (1 - t)), the mean is
    (1 - (t - d)) x0 + (t - d - sigma^2 d / (2 t)) x1, and the deviation is sigma sqrt(d). The
    marginal distributions of x equal the ODE's, up to the error of the step size.

    Source: Liu et al. 2025, "Flow-GRPO: Training Flow Matching Models via Online RL", section 4.
    Differs from the paper: at t = 1 the next time replaces t in the denominator 1 - t.

    Args:
        x: [B, ...], at time t.
        velocity: [B, ...], at x and t.
        t: [B], in (0, 1].
        step_size: d, in time.
        noise_level: s.
    """
    t = t.view(-1, *[1] * (x.dim() - 1))
    sigma_squared = noise_level**2 * t / (1.0 - t.clamp(max=1.0 - step_size))
    start, end = x - t * velocity, x + (1.0 - t) * velocity
    drift = t - step_size - sigma_squared * step_size / (2.0 * t)
    return (1.0 - t + step_size) * start + drift * end, (sigma_squared * step_size).sqrt()


def guide(conditional: Tensor, absent: Tensor, guidance: Tensor) -> Tensor:
    """Return absent + guidance (conditional - absent), [B, ...].

    Source: Ho and Salimans 2022, "Classifier-Free Diffusion Guidance", equation 6. Differs from the
    paper: guidance is 1 + w, and the outputs may be logits or means.

    Args:
        conditional: [B, ...], output with the condition.
        absent: [B, ...], output without the condition.
        guidance: [B].
    """
    return torch.lerp(absent, conditional, guidance.view(-1, *[1] * (absent.dim() - 1)))
