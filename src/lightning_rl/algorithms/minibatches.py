"""Draw minibatches, alone or with processes that have parts of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.distributed import ranks
from lightning_rl.rollout import gather

Draw = Callable[[TensorDict, Tensor, Sequence[int]], dict[str, Tensor]]
"""Makes fields of the samples drawn: see `OnPolicyAlgorithm.drawn_fields`."""

GATHER_BYTES = 2**22
"""How much is gathered at once for minibatches."""


def epochs(
    flat: TensorDict,
    mask: Tensor | None,
    n_epochs: int,
    batch_size: int,
    generator: torch.Generator,
    draw: Draw,
) -> Iterator[Iterator[TensorDict]]:
    """Yield the minibatches [B] of each of some passes: every transition once, in random order.

    With several processes what they have to exchange for it is exchanged before the first pass.

    Args:
        flat: [M], the transitions of this rank, see `flat_transitions`.
        mask: [N, T], true where a transition counts; the others are left out. None for all.
        n_epochs: passes.
        batch_size: the most that a rank adds to a minibatch; the last of a pass is smaller where
            it does not divide the transitions.
        generator: draws the permutations, on the device of `flat`.
        draw: with several processes, makes fields of the samples drawn.
    """
    if ranks.world_size() == 1:
        for _ in range(n_epochs):  # drawn as they come: an update may end before the last pass
            yield gathered(flat, shuffled(flat, generator, mask).split(batch_size))
        return
    orders = [shuffled(flat, generator, mask) for _ in range(n_epochs)]
    size = len(orders[0])
    # Masks differ by rank, and all have to take part in as many minibatches as the fullest needs.
    count = None if mask is None else ranks.max_over_ranks(-(-size // batch_size))
    if count == 0:
        return
    parts = [o.split(batch_size) if count is None else o.tensor_split(count) for o in orders]
    sizes = [len(part) for part in parts[0]]
    drawn = draw(flat, torch.cat(orders), sizes * n_epochs)
    rest = flat.exclude(*drawn)
    for epoch, own_parts in enumerate(parts):
        own = {key: value[epoch * size : (epoch + 1) * size] for key, value in drawn.items()}
        yield gathered(rest, own_parts, own)


def shuffled(
    flat: TensorDict, generator: torch.Generator | None, mask: Tensor | None = None
) -> Tensor:
    """Return, in random order, the indices of the transitions [M] that count; see `epochs`."""
    counted = None if mask is None else mask.t().flatten().nonzero().flatten()
    count = flat.batch_size[0] if counted is None else len(counted)
    permutation = torch.randperm(count, generator=generator, device=flat.device)
    return permutation if counted is None else counted[permutation]


def gathered(
    flat: TensorDict, parts: Sequence[Tensor], drawn: Mapping[str, Tensor] | None = None
) -> Iterator[TensorDict]:
    """Yield the samples at each of some indices into [M].

    Many small minibatches are gathered at once and cut apart: cutting is cheaper than gathering.

    Args:
        flat: [M].
        parts: the indices.
        drawn: more fields, of the samples in the order of all parts.
    """
    if not parts:
        return
    sample_bytes = flat.bytes() / flat.batch_size[0]
    size = max(1, max(len(index) for index in parts))
    together = max(1, int(GATHER_BYTES / (sample_bytes * size)))
    done = 0
    for first in range(0, len(parts), together):
        group = parts[first : first + together]
        samples = gather(flat, torch.cat(list(group)))
        for key, value in (drawn or {}).items():
            samples[key] = value[done : done + len(samples)]
        done += len(samples)
        yield from samples.split([len(index) for index in group])
