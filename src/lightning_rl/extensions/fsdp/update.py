"""One optimizer step per minibatch on a sharded policy (FSDP2), together on all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from lightning_rl.extend import ranks
from lightning_rl.extend.algorithms import Update


class ShardedUpdate(Update):
    """Take the same step on all ranks, for a minibatch of which each rank has a part.

    FSDP sums the gradients of all micro-batches of a minibatch. Each rank is weighted by its number
    of samples. All ranks have equally many micro-batches: a rank with fewer repeats a sample with
    weight 0.

    Args:
        synchronize_gradients: sets whether the next backward pass sums gradients over ranks.
        settings: see `Update`.
    """

    def __init__(self, synchronize_gradients: Callable[[bool], None], *settings: Any) -> None:
        super().__init__(*settings)
        self._synchronize_gradients = synchronize_gradients
        self._gated = False
        self._left = 0  # micro-batches of the minibatch

    def __call__(self, minibatch: TensorDict) -> None:
        if not self._several:
            minibatch = self.objective.prepare(minibatch)
        self._clear()
        row = self.backward(minibatch)
        with self.phase("reduction"):
            row = ranks.sum_over_ranks(row)
            norm: Any = clip_grad_norm_(self.parameters, self.objective.max_grad_norm)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.note(torch.cat([row, norm[None]]))
        self.optimizer_step()
        self._clear()  # acting may need memory for the whole policy

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def parts(self, minibatch: TensorDict) -> list[tuple[TensorDict, float]]:
        local_parts = super().parts(minibatch) if len(minibatch) else []
        counts = torch.zeros(ranks.world_size(), 2, dtype=torch.int64)
        counts[ranks.rank()] = torch.tensor([len(minibatch), len(local_parts)])
        samples, parts = ranks.sum_over_ranks(counts).unbind(1)
        filler = minibatch[:1]
        if not samples.all():  # a rank without samples repeats one
            lent = ranks.gather_over_ranks(filler.cpu() if len(filler) else None)
            filler = next(sample for sample in lent if sample is not None).to(minibatch.device)
        total, self._left = int(samples.sum()), int(parts.max())
        weighted = [(part, len(part) / total) for part, _ in local_parts]
        return [*weighted, *[(filler, 0.0)] * (self._left - len(local_parts))]

    def _differentiate(self, loss: Tensor) -> None:
        self._left -= 1
        self._synchronize_gradients(self._left == 0)
        super()._differentiate(loss * ranks.world_size())  # FSDP averages over ranks
