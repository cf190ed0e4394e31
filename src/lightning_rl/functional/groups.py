"""Advantages by comparing the members of a group: pure functions of tensors."""

from typing import Literal

import torch
from torch import Tensor

from lightning_rl.functional.advantages import reversed_scan

NOISE = 1e-5
"""Returns with a smaller relative difference count as equal: the rounding of a float32 sum."""


def group_relative_advantage(
    reward: Tensor,
    done: Tensor,
    *,
    group_size: int,
    gamma: float | Tensor,
    mode: Literal["step", "trajectory"] = "step",
    std_floor: float = 1e-3,
    normalize: bool = True,
    leave_one_out: bool = False,
    truncate_at_first_done: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compare each row's return with the other rows of its group: GRPO's critic-free advantage.

        R_t = r_t + gamma * (1 - done_t) * R_{t+1},  R_T = 0
        A_t = (R_t - mean_g R_t) / max(std_g R_t, std_floor)

    Rows g*G to g*G + G - 1 form group g. With `mode="step"` mean and population std are taken at
    each step, over the members in their first episode. With `mode="trajectory"` they are taken over
    the members' returns from step 0, and all steps of a row have the same advantage.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2 (trajectory), and EmbodiChain's
    step-wise form. `normalize=False` is Dr. GRPO's (Liu et al. 2025, "Understanding R1-Zero-Like
    Training", equation 2); `leave_one_out` RLOO's (Ahmadian et al. 2024, "Back to Basics", equation
    6). Differs from the papers: the std has a lower bound instead of a small added number; the
    advantage is exactly 0 for members that are equal up to float32 rounding, and for the last
    member in its first episode.

    Args:
        reward: [N, T].
        done: [N, T] bool.
        group_size: G, which divides N.
        gamma: discount per step, or [N, T].
        mode: `step` for dense rewards, `trajectory` for a sparse one.
        std_floor: lower bound on the standard deviation, in units of the reward.
        normalize: divide by the standard deviation.
        leave_one_out: compare with the mean of the others: A * c / (c - 1) for c members.
        truncate_at_first_done: count only a row's first episode, including its last step.

    Returns:
        advantage [N, T], 0 for steps that do not count, and mask [N, T] bool, true for steps that
        count.

    Raises:
        ValueError: if the shapes do not match, or `mode="trajectory"` without
            `truncate_at_first_done`.
    """
    _check(reward, done, group_size, mode, truncate_at_first_done)
    mask = first_episode_mask(done) if truncate_at_first_done else torch.ones_like(done)
    returns = reversed_scan(reward, (~done).to(reward.dtype) * gamma)
    members = mask
    if mode == "trajectory":
        returns, members = returns[:, :1], mask[:, :1]
    advantage = _compare(
        returns.unflatten(0, (-1, group_size)),
        members.unflatten(0, (-1, group_size)),
        std_floor if normalize else None,
        leave_one_out,
    )
    return torch.where(mask, advantage.flatten(0, 1), 0.0), mask


def first_episode_mask(done: Tensor) -> Tensor:
    """Return a mask [N, T] of each row's first episode, including its last step.

        mask_t = 1 for t <= min {u : done_u = 1}

    `done` [N, T] bool marks the last steps. Source: one completion per row, as in Shao et al. 2024,
    "DeepSeekMath".
    """
    ended_before = done[:, :-1].long().cumsum(1) > 0
    return torch.cat([torch.ones_like(done[:, :1]), ~ended_before], dim=1)


def _compare(
    returns: Tensor, members: Tensor, std_floor: float | None, leave_one_out: bool
) -> Tensor:
    count = members.sum(1, keepdim=True)
    mean = torch.where(members, returns, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    centered = torch.where(members, returns - mean, 0.0)
    size = torch.where(members, returns.abs(), 0.0).amax(1, keepdim=True)
    # Otherwise rounding noise could exceed the lower bound of the std, and become an advantage.
    equal = centered.abs().amax(1, keepdim=True) <= NOISE * size
    advantage = torch.where(equal, 0.0, centered)
    if std_floor is not None:
        variance = centered.square().sum(1, keepdim=True) / count.clamp(min=1)
        advantage = advantage / variance.sqrt().clamp(min=std_floor)
    # A - mean of the others = c / (c - 1) * (A - mean of all).
    return advantage * count / (count - 1).clamp(min=1) if leave_one_out else advantage


def _check(
    reward: Tensor, done: Tensor, group_size: int, mode: str, truncate_at_first_done: bool
) -> None:
    if reward.ndim != 2 or done.shape != reward.shape:
        raise ValueError(
            f"Expected reward and done of shape [N, T], got {list(reward.shape)} and "
            f"{list(done.shape)}. Pass whole rollouts, not flattened transitions."
        )
    if group_size < 2 or len(reward) % group_size:
        raise ValueError(
            f"group_size must be at least 2 and divide the {len(reward)} envs, got {group_size}."
        )
    if mode == "trajectory" and not truncate_at_first_done:
        raise ValueError(
            "mode='trajectory' compares whole episodes, one per row: it needs "
            "truncate_at_first_done=True, or use mode='step'."
        )
