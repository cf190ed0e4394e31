"""Draw the minibatches of an update: passes over a rollout, freshly shuffled."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.distributed import ranks

Draw = Callable[[TensorDict, Tensor, Sequence[int]], dict[str, Tensor]]
"""Makes fields of the samples drawn: see `OnPolicyAlgorithm.drawn_fields`."""

GATHER_BYTES = 2**22
"""How much is gathered at once for minibatches."""


class Drawing(ABC):
    """What minibatches are drawn from: some units, each of one sample or of a few.

    Args:
        flat: [M], the transitions of this rank, with the fields of the samples.
        varies: whether ranks may have different numbers of units.
    """

    def __init__(self, flat: TensorDict, varies: bool) -> None:
        self.flat = flat
        self.varies = varies

    @abstractmethod
    def __len__(self) -> int:
        """Return how many units there are."""

    @abstractmethod
    def units_in(self, batch_size: int) -> int:
        """Return how many units make a minibatch of so many samples, at least one."""

    @abstractmethod
    def samples(self, units: Tensor) -> Tensor:
        """Return which transitions [M] the samples of units [U] are, in their order."""

    @abstractmethod
    def minibatches(
        self, parts: Sequence[Tensor], drawn: Mapping[str, Tensor] | None = None
    ) -> Iterator[TensorDict]:
        """Yield a minibatch [M] of each of some groups of units.

        Args:
            parts: the units of each.
            drawn: more fields, of the samples in the order of all parts.
        """


class Transitions(Drawing):
    """Each transition that counts is a unit.

    Args:
        flat: [M], the transitions of this rank, see `flat_transitions`.
        mask: [N, T], true where a transition counts; None for all.
    """

    def __init__(self, flat: TensorDict, mask: Tensor | None = None) -> None:
        super().__init__(flat, varies=mask is not None)
        self._counted = None if mask is None else mask.t().flatten().nonzero().flatten()

    def __len__(self) -> int:
        return len(self.flat) if self._counted is None else len(self._counted)

    def units_in(self, batch_size: int) -> int:
        return batch_size

    def samples(self, units: Tensor) -> Tensor:
        return units if self._counted is None else self._counted[units]

    def minibatches(
        self, parts: Sequence[Tensor], drawn: Mapping[str, Tensor] | None = None
    ) -> Iterator[TensorDict]:
        """Yield the samples; many small minibatches are gathered at once and cut apart.

        Cutting is cheaper than gathering.
        """
        if not parts:
            return
        sample_bytes = self.flat.bytes() / len(self.flat)
        size = max(1, max(len(units) for units in parts))
        together = max(1, int(GATHER_BYTES / (sample_bytes * size)))
        done = 0
        for first in range(0, len(parts), together):
            group = parts[first : first + together]
            samples = gather(self.flat, self.samples(torch.cat(list(group))))
            for key, value in (drawn or {}).items():
                samples[key] = value[done : done + len(samples)]
            done += len(samples)
            yield from samples.split([len(units) for units in group])


def epochs(
    drawing: Drawing, n_epochs: int, batch_size: int, generator: torch.Generator, draw: Draw
) -> Iterator[Iterator[TensorDict]]:
    """Yield the minibatches [M] of each of some passes: every sample once, in random order.

    With several processes what they have to exchange for it is exchanged before the first pass.

    Args:
        drawing: what they are drawn from.
        n_epochs: passes.
        batch_size: the most samples that a rank adds to a minibatch; the last of a pass is smaller
            where it does not divide them, and all are where sequences do not divide it.
        generator: draws the permutations, on the device of the rollout.
        draw: with several processes, makes fields of the samples drawn.
    """
    size = drawing.units_in(batch_size)
    if ranks.world_size() == 1:
        for _ in range(n_epochs):  # drawn as they come: an update may end before the last pass
            yield drawing.minibatches(_shuffled(drawing, generator).split(size))
        return
    orders = [_shuffled(drawing, generator) for _ in range(n_epochs)]
    # Masks differ by rank, and all have to take part in as many minibatches as the fullest needs.
    count = ranks.max_over_ranks(-(-len(drawing) // size)) if drawing.varies else None
    if count == 0:
        return
    parts = [o.split(size) if count is None else o.tensor_split(count) for o in orders]
    samples = [[drawing.samples(units) for units in epoch] for epoch in parts]
    sizes = [len(one) for epoch in samples for one in epoch]
    drawn = draw(drawing.flat, torch.cat([one for epoch in samples for one in epoch]), sizes)
    drawing.flat = drawing.flat.exclude(*drawn)
    done = 0
    for units, of_epoch in zip(parts, samples, strict=True):
        end = done + sum(len(one) for one in of_epoch)
        yield drawing.minibatches(units, {key: value[done:end] for key, value in drawn.items()})
        done = end


def _shuffled(drawing: Drawing, generator: torch.Generator) -> Tensor:
    """Return all units [U] in random order."""
    return torch.randperm(len(drawing), generator=generator, device=drawing.flat.device)


def gather(data: TensorDict, index: Tensor) -> TensorDict:
    """Return the samples [B] at an index [B]; several times as fast as TensorDict's indexing."""

    def select(value: Any) -> Any:
        if isinstance(value, TensorDict):
            return gather(value, index)
        return value.index_select(0, index)  # a third of the time of value[index]

    return TensorDict(
        {key: select(value) for key, value in data.items()}, index.shape, device=data.device
    )
