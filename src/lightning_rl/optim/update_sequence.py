"""Optimizer steps on several losses per minibatch, in order."""

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.optim.objective_checks import quoted
from lightning_rl.optim.update import Update
from lightning_rl.system.errors import ConfigurationError, require


class UpdateSequence:
    """Take a step on several objectives per minibatch, in order, then run a follow-up.

    A scalar in `Objective.forwarded_scalars` becomes a field [B] of the minibatch for later losses,
    with the same number for each sample.

    Args:
        updates: the updates of the objectives, in order.
        follow_up: runs after them, such as moving target networks.
        moved: the tensors that `follow_up` writes: parameters or buffers of the owner.

    Raises:
        ConfigurationError: if two objectives pass a scalar of the same name.
    """

    def __init__(
        self, updates: Sequence[Update], follow_up: Callable[[], None], moved: Sequence[Tensor]
    ) -> None:
        self.updates = updates
        self.follow_up = follow_up
        self.written = moved
        self._forwarded = [
            name for update in updates for name in update.objective.forwarded_scalars
        ]
        # The second scalar would silently replace the first.
        for name in self._forwarded:
            require(
                self._forwarded.count(name) == 1,
                f"Two objectives pass '{name}' to later losses: rename one of these scalars.",
            )

    @torch.no_grad()
    def _follow_up(self) -> None:
        self.follow_up()

    def __call__(self, minibatch: TensorDict) -> None:
        """Take a step on each loss for a minibatch [B], or for this rank's part of it."""
        self.check_fields(minibatch)
        # Shallow copies: a loss may add fields, and neither the caller nor the next loss sees them.
        minibatch = minibatch.copy()
        for update in self.updates:
            update(minibatch.copy())
            objective = update.objective
            if objective.forwarded_scalars:
                scalars = dict(zip(update.names, update.scalars, strict=True))
                forwarded = select_forwarded(objective.name, objective.forwarded_scalars, scalars)
                for name, scalar in forwarded.items():
                    # A field [B], not a number: micro-batches split it together with the samples.
                    minibatch.set(name, scalar.expand(len(minibatch)))
        self._follow_up()

    def check_fields(self, minibatch: TensorDict) -> None:
        """Refuse a scalar that would replace a field of the minibatch [B].

        Raises:
            ConfigurationError: if the minibatch has a field of that name.
        """
        for name in self._forwarded:
            if name in minibatch.keys():
                raise ConfigurationError(
                    f"An objective passes '{name}' to the losses after it, but the minibatch "
                    f"already has a field '{name}': report the scalar under another name, and pass "
                    "that name."
                )


def select_forwarded(
    name: str, forwarded: Sequence[str], scalars: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the scalars of a loss that later losses read.

    Raises:
        ConfigurationError: if the loss does not return one of `forwarded`.
    """
    missing = [key for key in forwarded if key not in scalars]
    if not missing:
        return {key: scalars[key] for key in forwarded}
    raise ConfigurationError(
        f"The objective '{name}' passes {quoted(missing)} to the losses after it, but its loss "
        f"reports {quoted(scalars) or 'nothing'}. Return {quoted(missing)} among its scalars, or "
        "remove it from forwarded_scalars=."
    )
