"""Draw the minibatches of an update, alone or with processes that have parts of each."""

from collections.abc import Callable, Iterator, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ranks
from lightning_rl.rollout import gathered, minibatches, shuffled

Draw = Callable[[TensorDict, Tensor, Sequence[int]], dict[str, Tensor]]
"""See `Algorithm.drawn_fields`."""


def epochs(
    flat: TensorDict,
    mask: Tensor | None,
    n_epochs: int,
    batch_size: int,
    generator: torch.Generator,
    draw: Draw,
) -> Iterator[Iterator[TensorDict]]:
    """Yield the minibatches of each of some passes, freshly shuffled.

    With several processes what they have to exchange for it is exchanged before the first pass.

    Args:
        flat: [M], the transitions of this rank, see `flat_transitions`.
        mask: [N, T], true where a transition counts.
        n_epochs: passes.
        batch_size: the most that a rank adds to a minibatch.
        generator: draws the permutations.
        draw: with several processes, makes fields of the samples drawn.
    """
    if ranks.world_size() == 1:
        for _ in range(n_epochs):
            yield minibatches(flat, batch_size, generator, mask)
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
