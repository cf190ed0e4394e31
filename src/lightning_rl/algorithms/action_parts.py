"""Weigh the parts that the log-prob of an action comes in: its tokens, or a chunk's actions.

A policy may give log-probs [B, L]. Of a chunk that an episode's end cut short, the parts that were
not executed do not count.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.system import ranks


class RatioTerms(NamedTuple):
    """What a policy loss is made of, in the shape of its ratios.

    That is [B], or [B, L] where each part of an action has a ratio of its own.

    Attributes:
        new: log-probs of the policy that is trained.
        old: of the policy that the ratio is clipped around, that is of the one that acted, or of
            the one that the update began at where data is stale.
        behavior: of the policy that acted.
        advantage: of each ratio.
        counted: [B, L] bool, which parts were executed; None for all.
        whole_new, whole_old: [B], of whole actions and without gradients. The KL of an update is
            that between these, in any case.
        entropy_weight: what to multiply entropies by.
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
    """Lay out what a policy loss takes, for log-probs of whole actions and of parts alike.

    Parts have a ratio each and share the advantage of their sample; or, with `joint_ratio`, the
    action has one.

    Args:
        policy: [B], what `Policy.evaluate_actions` has returned.
        minibatch: [B], with `sample_log_prob` and `advantage`.
        old: [B] or [B, L], log-probs of the policy that the ratio is clipped around.
        weight: [B], of the samples.
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
    """Return which parts [B, L] were executed; all, where `executed` [B, K] is not there."""
    if "executed" not in minibatch.keys():
        return torch.ones_like(log_prob, dtype=torch.bool)
    executed: Tensor = minibatch["executed"]
    return executed.repeat_interleave(log_prob.shape[-1] // executed.shape[-1], -1)


def whole_action(log_prob: Tensor, minibatch: TensorDict) -> Tensor:
    """Return the log-prob [B] of all executed parts together.

    Args:
        log_prob: [B], of whole actions already, or [B, L].
        minibatch: [B], with `executed` where parts may not count.
    """
    if log_prob.dim() == len(minibatch.batch_size):
        return log_prob
    return torch.where(executed_parts(minibatch, log_prob), log_prob, 0.0).sum(-1)


def add_part_weights(minibatch: TensorDict) -> TensorDict:
    """Write `part_weight` [B, L]: 0 where a part does not count, and of mean 1 over the minibatch.

    An average of weighted parts is then the average over all executed parts of the minibatch, also
    where that goes through the network in micro-batches with different numbers of them.
    """
    mask = _counted(minibatch)
    if mask is None or "part_weight" in minibatch.keys():
        return minibatch
    return minibatch.set("part_weight", mask * (mask.numel() / mask.sum().clamp(min=1.0)))


def part_weights_over_ranks(
    flat: TensorDict, order: Tensor, sizes: Sequence[int]
) -> dict[str, Tensor]:
    """Return `part_weight` [S, L] for minibatches that ranks have parts of; {} for no parts.

    The weights are of mean 1 over all ranks together.

    Args:
        flat: [M], the transitions of this rank.
        order: [S], indices of those that are drawn, in all passes.
        sizes: of the parts that follow each other in it, one for each minibatch.
    """
    mask = _counted(flat)
    if mask is None:
        return {}
    mask = mask[order]
    lengths = torch.tensor(sizes, device=mask.device)
    own = torch.segment_reduce(mask.sum(1), "sum", lengths=lengths)
    counted, parts = ranks.sum_over_ranks(torch.stack([own, lengths * mask.shape[1]]))
    scale: Tensor = parts / counted.clamp(min=1.0)
    return {"part_weight": mask * scale.repeat_interleave(lengths)[:, None]}


def _counted(samples: TensorDict) -> Tensor | None:
    """Return 1 for each part [B, L] that counts, else 0; None where there are no parts."""
    log_prob = samples.get("sample_log_prob", None)  # a loss of its own may not want it
    if log_prob is None or log_prob.dim() == 1:
        return None
    return executed_parts(samples, log_prob).to(log_prob.dtype)


def weigh_parts(weight: Tensor, like: Tensor, minibatch: TensorDict) -> Tensor:
    """Give numbers [B] the shape of log-probs, [B] or [B, L], times the weights of the parts."""
    if like.dim() == weight.dim():
        return weight
    part_weight = minibatch.get("part_weight", None)
    if part_weight is None:
        mask = executed_parts(minibatch, like).to(like.dtype)
        part_weight = mask * (mask.numel() / mask.sum().clamp(min=1.0))
    spread_out: Tensor = weight[:, None] * part_weight
    return spread_out
