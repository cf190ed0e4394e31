"""Advantages and value targets from rewards and values: pure functions of tensors."""

import torch
from torch import Tensor


def gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    *,
    gamma: float | Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by generalized advantage estimation.

        delta_t = r_t + gamma * V'_t - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}

    with done = terminated or truncated, and V'_t = V(s_{t+1}) within an episode, 0 if `terminated`,
    and V(true final observation) if only `truncated`.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", equations 11 and 16. Differs from the paper: truncated episodes bootstrap from
    `final_value` (Pardo et al. 2018, "Time Limits in Reinforcement Learning").

    Args:
        reward: [N, T].
        value: [N, T+1], including the bootstrap value of the last observation.
        terminated: [N, T] bool.
        truncated: [N, T] bool.
        final_value: [N, T], V of the true final observation; read only if truncated and not
            terminated.
        gamma: discount per step; or [N, T]: gamma^k for an action of k env steps (Sutton et al.
            1999, "Between MDPs and semi-MDPs").
        gae_lambda: trace decay per step.

    Returns:
        advantage [N, T], and value_target [N, T] = advantage + value (the lambda-return).

    Raises:
        ValueError: if the shapes do not match.
    """
    check_shapes(reward, value, terminated, truncated, final_value)
    done = terminated | truncated
    delta = temporal_difference(reward, value, terminated, truncated, final_value, gamma)
    advantage = reversed_scan(delta, decay_of(done, gamma * gae_lambda, like=delta))
    return advantage, advantage + value[:, :-1]


def discounted_return(
    reward: Tensor, done: Tensor, initial: Tensor, *, gamma: float | Tensor
) -> Tensor:
    """Accumulate rewards forward in time, [N, T].

        G_t = r_t + gamma_t * (1 - done_{t-1}) * G_{t-1}

    The variance of G scales rewards (Engstrom et al. 2020, "Implementation Matters in Deep RL",
    3.2); G is not the return-to-go.

    Args:
        reward: [N, T].
        done: [N, T] bool.
        initial: [N], G of the step before the first, without its discount; zero at an episode
            start.
        gamma: discount per step; or [N, T]: gamma^k for an action of k env steps.
    """
    decay = (
        torch.cat([torch.ones_like(reward[:, :1]), (~done[:, :-1]).to(reward.dtype)], dim=1) * gamma
    )
    start = reward.clone()
    start[:, 0] += (gamma[:, 0] if isinstance(gamma, Tensor) else gamma) * initial
    decay[:, 0] = 0.0
    return reversed_scan(start.flip(1), decay.flip(1)).flip(1)


def explained_variance(value: Tensor, value_target: Tensor) -> Tensor:
    """Return 1 - Var(target - V) / Var(target) [] of V [...] and target [...].

    1 is perfect, 0 no better than a constant; NaN for constant targets.

    Source: the coefficient of determination R^2 (Wright 1921, "Correlation and Causation"), as
    OpenAI's baselines (2017) report it for a critic.
    """
    variance = value_target.var(correction=0)
    explained = 1.0 - (value_target - value).var(correction=0) / variance
    return torch.where(variance > 0, explained, torch.nan)


def temporal_difference(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    gamma: float | Tensor,
) -> Tensor:
    """Return r + gamma * V' - V, [N, T], see `gae`.

    Takes reward [N, T], value [N, T+1], terminated [N, T], truncated [N, T], final_value [N, T].
    """
    done = terminated | truncated
    next_value = torch.where(done, torch.where(terminated, 0.0, final_value), value[:, 1:])
    return reward + gamma * next_value - value[:, :-1]


def decay_of(done: Tensor, factor: float | Tensor, *, like: Tensor) -> Tensor:
    """Return a factor [N, T], or number, as [N, T]: 0 where an episode is `done`."""
    # `torch.where` of two numbers would be float32 for any dtype.
    if isinstance(factor, Tensor):
        return factor.to(like.dtype).masked_fill(done, 0.0)
    return torch.full_like(like, factor).masked_fill_(done, 0.0)


def reversed_scan(term: Tensor, decay: Tensor) -> Tensor:
    """Solve x_t = term_t + decay_t * x_{t+1} backwards in time, for term and decay [N, T].

    Source: Hillis & Steele 1986, "Data Parallel Algorithms", for terms and decays [N, T].
    """
    # Doubling in log2(T) rounds: each round doubles the later steps in x_t, and `reach_t` is the
    # product of their decays. A loop over T = 2,048 takes 50 times as long on a CPU.
    x, reach, stride = term.clone(memory_format=torch.contiguous_format), decay.contiguous(), 1
    while stride < x.shape[1]:
        later = x[:, stride:]
        x[:, :-stride] = torch.addcmul(x[:, :-stride], reach[:, : later.shape[1]], later)
        reach = reach[:, :-stride] * reach[:, stride:]
        stride *= 2
    return x


def check_shapes(reward: Tensor, value: Tensor, *flags: Tensor) -> None:
    """Check for reward [N, T], value [N, T+1], and others [N, T].

    Raises:
        ValueError: naming the shapes.
    """
    if reward.ndim != 2 or value.shape != (reward.shape[0], reward.shape[1] + 1):
        raise ValueError(
            f"Expected reward [N, T] and value [N, T + 1], got {list(reward.shape)} and "
            f"{list(value.shape)}. "
            "Pass whole rollouts, with the bootstrap value in the last column, not flattened "
            "transitions."
        )
    for other in flags:
        if other.shape != reward.shape:
            raise ValueError(
                "Expected all other tensors (terminated, truncated, ...) of shape "
                f"{list(reward.shape)} like reward, got {list(other.shape)}."
            )
