"""Log-probs of whole actions [B], or of their parts [B, L]: tokens, or actions of a chunk.

If an episode ends within a chunk, the actions after its end do not count.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.system import ranks


class RatioTerms(NamedTuple):
    """The inputs of a policy loss: [B], or [B, L] if each part of an action has its own ratio.

    Attributes:
        new: log-probs of the current policy.
        old: log-probs of the policy at the center of the clip: the acting policy, or with stale
            data the policy at the start of the update.
        behavior: log-probs of the acting policy.
        advantage: advantage of each ratio.
        counted: [B, L] bool, the executed parts; None for all.
        whole_new, whole_old: [B], log-probs of whole actions, detached, for the KL of an update.
        entropy_weight: factor of the entropies.
    """

    new: Tensor
    old: Tensor
    behavior: Tensor
    advantage: Tensor
    counted: Tensor | None
    whole_new: Tensor
    whole_old: Tensor
    entropy_weight: Tensor


def ratio_terms(
    policy: TensorDict, minibatch: TensorDict, old: Tensor, weight: Tensor, joint_ratio: bool
) -> RatioTerms:
    """Compute the inputs of a policy loss, for log-probs of whole actions or of parts.

    With `joint_ratio` each action has one ratio, otherwise each part has its own.

    Args:
        policy: [B], result of `Policy.evaluate_actions`.
        minibatch: [B], with `sample_log_prob` and `advantage`.
        old: [B] or [B, L], log-probs of the policy at the center of the clip.
        weight: [B], weights of the samples.
        joint_ratio: see `Policy.joint_ratio`.
    """
    new, behavior = policy["sample_log_prob"], minibatch["sample_log_prob"]
    whole_new, whole_old = whole_action(new.detach(), minibatch), whole_action(old, minibatch)
    counted = None
    if joint_ratio:
        new, old, behavior = (whole_action(each, minibatch) for each in (new, old, behavior))
    elif new.dim() == 2:
        counted = executed_parts(minibatch, new)
    return RatioTerms(
        new,
        old,
        behavior,
        weigh_parts(minibatch["advantage"] * weight, new, minibatch),
        counted,
        whole_new,
        whole_old,
        weigh_parts(weight, policy["entropy"], minibatch),
    )


def executed_parts(minibatch: TensorDict, log_prob: Tensor) -> Tensor:
    """Return a mask of the executed parts [B, L]; all without a field `executed` [B, K]."""
    if "executed" not in minibatch.keys():
        return torch.ones_like(log_prob, dtype=torch.bool)
    executed: Tensor = minibatch["executed"]
    # K actions of a chunk, each with L / K parts.
    return executed.repeat_interleave(log_prob.shape[-1] // executed.shape[-1], -1)


def whole_action(log_prob: Tensor, minibatch: TensorDict) -> Tensor:
    """Sum log-probs [B] or [B, L] over the executed parts of samples [B], to [B]."""
    if log_prob.dim() == len(minibatch.batch_size):
        return log_prob
    # `where`, not a product: 0 times an infinite log-prob would be NaN.
    return torch.where(executed_parts(minibatch, log_prob), log_prob, 0.0).sum(-1)


def add_part_weights(minibatch: TensorDict) -> TensorDict:
    """Write `part_weight` [B, L], of mean 1: 0 for parts that were not executed."""
    mask = _counted(minibatch)
    if mask is None or "part_weight" in minibatch.keys():
        return minibatch
    return minibatch.set("part_weight", mask * (mask.numel() / mask.sum().clamp(min=1.0)))


def part_weights_over_ranks(
    flat: TensorDict, order: Tensor, sizes: Sequence[int]
) -> dict[str, Tensor]:
    """Return `part_weight` [S, L] with mean 1 over the minibatches of all ranks; {} without parts.

    Args:
        flat: [M], the transitions of this rank.
        order: [S], indices of the drawn samples of all passes.
        sizes: number of samples of this rank in each minibatch.
    """
    mask = _counted(flat)
    if mask is None:
        return {}
    mask = mask[order]
    lengths = torch.tensor(sizes, device=mask.device)
    rank_counts = torch.segment_reduce(mask.sum(1), "sum", lengths=lengths)
    counted, parts = ranks.sum_over_ranks(torch.stack([rank_counts, lengths * mask.shape[1]]))
    # Minibatches of all ranks have mean 1 together: ranks may have counted different parts.
    scale: Tensor = parts / counted.clamp(min=1.0)
    return {"part_weight": mask * scale.repeat_interleave(lengths)[:, None]}


def _counted(samples: TensorDict) -> Tensor | None:
    log_prob = samples.get("sample_log_prob", None)  # a custom loss may not need it
    if log_prob is None or log_prob.dim() == 1:
        return None
    return executed_parts(samples, log_prob).to(log_prob.dtype)


def weigh_parts(weight: Tensor, like: Tensor, minibatch: TensorDict) -> Tensor:
    """Expand numbers [B] to the shape of log-probs, [B] or [B, L], times the weights of parts."""
    if like.dim() == weight.dim():
        return weight
    part_weight = minibatch.get("part_weight", None)
    if part_weight is None:
        mask = executed_parts(minibatch, like).to(like.dtype)
        part_weight = mask * (mask.numel() / mask.sum().clamp(min=1.0))
    spread_out: Tensor = weight[:, None] * part_weight
    return spread_out
