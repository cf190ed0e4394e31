"""Step down several losses by each minibatch, one after the other."""

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.optim.update import Update


class UpdateSequence:
    """Step down several objectives by each minibatch, one after the other, and do what follows.

    What a loss reports is a field [B] of the minibatch for those after it, the same number for each
    sample: so that a temperature can go by the entropy that the actor's loss has found.

    Args:
        updates: of the objectives, in their order.
        follow_up: what comes after them, such as moving target networks.
        written: the tensors that `follow_up` writes, each a parameter or buffer of the owner; it
            reads what it likes.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        follow_up: Callable[[], None],
        written: Sequence[Tensor],
    ) -> None:
        self.updates = updates
        self.follow_up = follow_up
        self.written = written

    @torch.no_grad()
    def _follow_up(self) -> None:
        self.follow_up()

    def __call__(self, minibatch: TensorDict) -> None:
        """Step down each of the losses of a minibatch [B]; with several processes, as `Update`."""
        *others, last = self.updates
        for update in others:
            update(minibatch)
            for name, scalar in zip(update.names, update.scalars, strict=True):
                minibatch.set(name, scalar.expand(len(minibatch)))
        last(minibatch)
        self._follow_up()
