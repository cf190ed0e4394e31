"""Make one gradient and one set of statistics of those of all ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_rl import ranks
from lightning_rl.phases import PhaseTimer


class GradientReduction:
    """Add up gradients and scalars of ranks by one sum of one flat tensor per minibatch.

    DDP's own reducer wants one backward pass per step, through hooks that a compiled graph does not
    call. A rank weighs as much as its part of the minibatch has samples, none included; and what is
    not finite on one rank is not finite on all.

    Args:
        parameters: whose gradients these are, in the same order on all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        # A gradient, what it reaches, and a one: see `flattened`.
        self._size = sum(parameter.numel() for parameter in parameters) + len(parameters) + 1
        self._device = parameters[0].device
        self._names: list[str] = []

    def __call__(
        self, count: int, local: Callable[[], tuple[list[str], Tensor]], phase: PhaseTimer
    ) -> tuple[list[str], Tensor]:
        """Return the names of the scalars, and the sum of what ranks have of the minibatch.

        Args:
            count: samples of this rank.
            local: returns the names, and scalars and gradients of this rank, as `flattened` does;
                not called where there are no samples.
            phase: times the phase `reduction`, which waits for the slowest rank.
        """
        names, flat = local() if count else ([], None)
        if not self._names:  # the first call: a rank without samples learns what is reported
            self._names = next(filter(None, ranks.gather_over_ranks(names)))
        if flat is None:
            flat = torch.zeros(len(self._names) + self._size, device=self._device)
        with phase("reduction"):
            return self._names, ranks.sum_over_ranks(flat)


def normalize_over_ranks(values: Tensor, sizes: Sequence[int], *, eps: float = 1e-8) -> Tensor:
    """Do what `normalize_advantage` does, for several minibatches that ranks have parts of.

    Args:
        values: [M], this rank's parts, one after the other.
        sizes: of the parts; their sum is M.
        eps: added to the standard deviation.
    """
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
