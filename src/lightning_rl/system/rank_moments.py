"""Compute means and variances of samples that lie on several processes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rl.system import ranks


def moments_over_ranks(
    count: Tensor, mean: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of samples on several ranks; in float64 if there are several.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", equation
    2.1. Takes counts, means and sums of squared deviations, [D] or [] each.
    """
    if ranks.world_size() == 1:
        return count, mean, square
    counts = count.expand_as(mean)
    # Without samples, mean and square may be NaN: do not add them.
    row = torch.stack([counts, mean.where(counts > 0, 0.0), square.where(counts > 0, 0.0)]).double()
    # Sum a row per rank, which gathers tensors without pickling them.
    table = row.new_zeros(ranks.world_size(), *row.shape)
    table[ranks.rank()] = row
    counts, means, squares = ranks.sum_over_ranks(table).unbind(1)
    total = counts.sum(0)
    merged = (counts * means).sum(0) / total
    return total, merged, (squares + counts * (means - merged).square()).sum(0)


def normalize_over_ranks(values: Tensor, sizes: Sequence[int], *, eps: float = 1e-8) -> Tensor:
    """Apply `normalize_advantage` to minibatches with parts on several ranks.

    `values` [M] are this rank's parts, concatenated; `sizes` are their lengths.
    """
    # Use float64: a variance as a difference of sums of squares loses half of the digits.
    exact, lengths = values.double(), torch.tensor(sizes, device=values.device)
    sums = [torch.segment_reduce(x, "sum", lengths=lengths) for x in (exact, exact.square())]
    count, total, squares = ranks.sum_over_ranks(torch.stack([lengths, *sums]))
    mean = total / count
    variance = (squares - total * mean) / (count - 1).clamp(min=1)
    scale = variance.clamp(min=0).sqrt() + eps
    normalized: Tensor = (exact - mean.repeat_interleave(lengths)) / scale.repeat_interleave(
        lengths
    )
    return normalized.to(values.dtype)
