"""Make one gradient and one set of statistics of those of all ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_rl import ranks
from lightning_rl.phases import PhaseTimer


class GradientReduction:
    """Average gradients and scalars over ranks by one sum of one flat tensor per minibatch.

    DDP's own reducer wants one backward pass per step, through hooks that a compiled graph does not
    call. A rank weighs as much as its part of the minibatch has samples, none included; and what is
    not finite on one rank is not finite on all.

    Args:
        parameters: whose gradients these are, in the same order on all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._names: list[str] = []

    def __call__(
        self, count: int, local: Callable[[], tuple[list[str], Tensor]], phase: PhaseTimer
    ) -> tuple[list[str], Tensor]:
        """Set the gradients of the whole minibatch; return names and values of its scalars.

        Args:
            count: samples of this rank.
            local: sets the gradients of this rank, and returns its scalars with their names; not
                called where there are no samples.
            phase: times the phase `reduction`, which waits for the slowest rank.
        """
        names, row = local() if count else ([], None)
        if not self._names:  # the first call: a rank without samples learns what is reported
            self._names = next(filter(None, ranks.gather_over_ranks(names)))
        if row is None:
            row = torch.zeros(len(self._names), device=self.parameters[0].device)
            for parameter in self.parameters:
                parameter.grad = None
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        parts = [row, *gradients, row.new_ones(1)]
        with phase("reduction"):
            total = ranks.sum_over_ranks(_flatten_dense_tensors(parts).mul_(count))
        average = total / total[-1]
        row, *gradients, _ = _unflatten_dense_tensors(average, parts)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return self._names, row


def parts_of_pass(permutation: Tensor, batch_size: int) -> list[Tensor]:
    """Split this rank's samples into as many parts, nearly equal, as the rank with most needs.

    A rank with fewer samples than that gets empty parts.

    Args:
        permutation: [M], of this rank's samples.
        batch_size: the most that a rank adds to a minibatch.
    """
    count = ranks.max_over_ranks(-(-len(permutation) // batch_size))
    return list(permutation.tensor_split(count)) if count else []


def normalize_over_ranks(values: Sequence[Tensor], *, eps: float = 1e-8) -> list[Tensor]:
    """Do what `normalize_advantage` does, for several minibatches that ranks have parts of.

    Args:
        values: this rank's part of each.
        eps: added to the standard deviation.
    """
    device = values[0].device
    counts = torch.tensor([len(part) for part in values], device=device)
    means = torch.stack([part.mean() for part in values])
    squares = torch.stack([(part - part.mean()).square().sum() for part in values])
    counts, means, squares = ranks.moments_over_ranks(counts, means, squares)
    stds = (squares / (counts - 1).clamp(min=1)).sqrt()
    return [
        ((part - mean) / (std + eps)).to(part.dtype)
        for part, mean, std in zip(values, means, stds, strict=True)
    ]
