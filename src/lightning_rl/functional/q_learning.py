"""Targets and losses of off-policy actor-critic training; E is the number of critics."""

import torch
from torch import Tensor

from lightning_rl.functional.losses import refuse_broadcast


def double_q_target(
    reward: Tensor, discount: Tensor, next_q: Tensor, next_target_q: Tensor
) -> Tensor:
    """Return r + discount * Q'(s', argmax_a Q(s', a)), [B].

    Source: van Hasselt et al. 2016, "Deep Reinforcement Learning with Double Q-learning", equation
    4. Time limits: `discount` is zero only if s' is terminal.

    Args:
        reward: [B], summed over the steps to s'.
        discount: [B], gamma^k for k env steps to s', zero if the episode terminated.
        next_q: [B, M], of the M actions in s', by the network; selects the action.
        next_target_q: [B, M], by the target network; gives its value.
    """
    refuse_broadcast(reward=reward, discount=discount, next_q=next_q[:, 0])
    best = next_q.argmax(-1, keepdim=True)
    return reward + discount * next_target_q.gather(-1, best).squeeze(-1)


def ensemble_loss(q: Tensor, target: Tensor) -> Tensor:
    """Return the sum over critics of mean((Q_e - target)^2) / 2 [], for Q [E, B] and target [B].

    Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", equation 5.
    """
    if q[0].shape != target.shape:  # called at each update: `refuse_broadcast` only explains
        refuse_broadcast(q=q[0], target=target)
    return 0.5 * (q - target).square().mean(-1).sum()


def categorical_projection(values: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    """Return the distribution on the atoms [B, K] of the values [K, B] with probabilities [B, K].

    Each value's probability is split linearly between its two nearest atoms, or goes to the end
    atom. This keeps the total probability, and the mean unless values lie beyond the ends.

    Source: Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning",
    algorithm 1.

    Args:
        values: [K, B], the atoms of the next state, discounted and shifted for each sample.
        probs: [B, K], of these values.
        atoms: [K], evenly spaced, ascending.
    """
    refuse_broadcast(values=values.t(), probs=probs)
    last = len(atoms) - 1
    width = (atoms[-1] - atoms[0]) / last
    place = ((values.t() - atoms[0]) / width).clamp(0, last)
    # The last value has no atom above it: it lies at the upper end of the last interval.
    below = place.floor().clamp(max=last - 1)
    upper = place - below
    index = below.long()
    projected = torch.zeros_like(probs).scatter_add(-1, index, probs * (1 - upper))
    return projected.scatter_add(-1, index + 1, probs * upper)


def categorical_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sum over critics of the mean cross-entropy -sum_k target_k log p_k.

    Source: Bellemare et al. 2017, algorithm 1. Takes logits [E, B, K] and detached targets [B, K].
    """
    refuse_broadcast(logits=logits[0], target=target)
    return -(target * logits.log_softmax(-1)).sum(-1).mean(-1).sum()


def expected_soft_value(log_probs: Tensor, q: Tensor, alpha: Tensor | float) -> Tensor:
    """Return sum_a pi(a|s) (Q(s, a) - alpha * log pi(a|s)), [B], over all actions.

    Source: Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings", equation 10; the
    actor's loss (equation 12) is minus its mean.

    Args:
        log_probs: [B, M], of the M actions; finite.
        q: [B, M].
        alpha: the temperature; zero for no entropy bonus.
    """
    refuse_broadcast(log_probs=log_probs, q=q)
    return (log_probs.exp() * (q - alpha * log_probs)).sum(-1)


def soft_policy_loss(log_prob: Tensor, q: Tensor, alpha: Tensor | float) -> Tensor:
    """Return mean(alpha * log pi(a|s) - Q(s, a)) of reparametrized actions.

    Source: Haarnoja et al. 2018, equation 7. Takes log-probs [B], values [B] and a detached alpha.
    """
    if log_prob.shape != q.shape:
        refuse_broadcast(log_prob=log_prob, q=q)
    return (alpha * log_prob - q).mean()


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Return mean(-log_alpha * (log pi(a|s) + target_entropy)).

    Source: Haarnoja et al. 2018, equation 18. Differs from the paper, like most implementations:
    the loss is linear in log alpha, not alpha, so that small and
    large temperatures change at the same rate.

    Args:
        log_alpha: [].
        log_prob: [B], without gradients.
        target_entropy: in nats, of actions in [-1, 1].
    """
    return -(log_alpha * (log_prob + target_entropy)).mean()


def min_of_subset(q: Tensor, subset: Tensor | None = None) -> Tensor:
    """Return the minimum of the critics [B], over all or over a subset per sample.

    Source: Chen et al. 2021, "Randomized Ensembled Double Q-Learning", algorithm 1. Differs from
    the paper: one subset per sample, not per minibatch.

    Args:
        q: [E, B], or [E, B, n] of n actions.
        subset: [B, M], indices of critics; None for all.
    """
    if subset is not None:
        index = subset.t().reshape(-1, q.shape[1], *[1] * (q.dim() - 2))
        q = q.gather(0, index.expand(-1, -1, *q.shape[2:]))
    return q.amin(0)


def outputs_of_min(outputs: Tensor, q: Tensor, subset: Tensor | None = None) -> Tensor:
    """Return, for each sample, the output of the critic with the smallest value, [B, K].

    Source: as `min_of_subset`; for whole distributions as in Seo et al. 2025, "FastTD3: Simple,
    Fast, and Capable Reinforcement Learning for Humanoid Control".

    Args:
        outputs: [E, B, K].
        q: [E, B], the values of the outputs.
        subset: [B, M], indices of critics; None for all.
    """
    if subset is None:
        index = q.argmin(0)
    else:
        place = q.gather(0, subset.t()).argmin(0)
        index = subset.gather(1, place[:, None]).squeeze(1)
    index = index[None, :, None].expand(1, -1, outputs.shape[-1])
    return outputs.gather(0, index).squeeze(0)


def random_subsets(
    count: int, num_critics: int, size: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Draw `size` of the critics for each of `count` samples; return indices [count, size].

    Source: Chen et al. 2021, "Randomized Ensembled Double Q-Learning", algorithm 1.
    """
    keys = torch.rand(count, num_critics, generator=generator, device=device)
    return keys.argsort(-1)[:, :size]


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Return the asymmetric squared error [], the mean of |e - 1(u < 0)| u^2 for u [B].

    u is target minus value. The minimum is at the e-expectile of the targets, e in (0, 1).

    Source: Newey and Powell 1987, "Asymmetric Least Squares Estimation and Testing"; Kostrikov,
    Nair and Levine 2022, "Offline Reinforcement Learning with Implicit Q-Learning", equation 5.
    """
    weight = torch.where(difference < 0, 1.0 - expectile, expectile)
    return (weight * difference.square()).mean()


def advantage_weight(advantage: Tensor, scale: float, max_weight: float) -> Tensor:
    """Return the weights min(exp(scale * A), max_weight) [B] of actions with the advantages A [B].

    Source: Peng et al. 2019, "Advantage-Weighted Regression", algorithm 1; the bound as in
    Kostrikov, Nair and Levine 2022, "Offline Reinforcement Learning with Implicit Q-Learning".
    """
    # exp(88) is the largest of float32.
    return (scale * advantage).clamp(max=80.0).exp().clamp(max=max_weight)
