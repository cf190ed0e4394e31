"""Make passes over the single steps of a rollout."""

from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.rollout import flat_transitions


def passes(
    rollout: TensorDict,
    fields: Sequence[str],
    n_epochs: int,
    batch_size: int,
    generator: torch.Generator,
    mask: Tensor | None = None,
) -> Iterator[TensorDict]:
    """Yield minibatches [B] of `n_epochs` shuffled passes over the steps of a rollout [N, T+1].

    `mask` [N, T] is true for the steps to train on; None: all.
    """
    steps = flat_transitions(rollout, fields)
    rows = torch.arange(len(steps), device=steps.device)
    # Indices, because a copy of the masked steps takes the memory of the rollout again.
    rows = rows if mask is None else rows[mask.t().flatten()]
    for _ in range(n_epochs):
        order = torch.randperm(len(rows), generator=generator, device=rows.device)
        for part in rows[order].split(batch_size):
            yield steps[part]
