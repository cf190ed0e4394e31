"""Step down several losses by each minibatch, one after the other."""

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.optim.objective_checks import passed_scalars
from lightning_rl.optim.update import Update
from lightning_rl.system.errors import require


class UpdateSequence:
    """Step down several objectives by each minibatch, one after the other, and do what follows.

    A scalar that an objective passes on (`Objective.passes`) is a field [B] of the minibatch for
    the losses after it, the same number for each sample: a temperature reads the entropy that the
    actor's loss has found. Nothing else passes from one loss to the next, neither what a loss
    reports nor a field that it writes.

    Args:
        updates: of the objectives, in their order.
        follow_up: what comes after them, such as moving target networks.
        written: the tensors that `follow_up` writes, each a parameter or buffer of the owner; it
            reads what it likes.

    Raises:
        ConfigurationError: where two objectives pass on the same name.
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
        self._passed = [name for update in updates for name in update.objective.passes]
        for name in self._passed:
            require(
                self._passed.count(name) == 1,
                f"Two objectives pass '{name}' to the losses after them: report one of them under "
                "another name.",
            )

    @torch.no_grad()
    def _follow_up(self) -> None:
        self.follow_up()

    def __call__(self, minibatch: TensorDict) -> None:
        """Step down each of the losses of a minibatch [B]; with several processes, as `Update`.

        Raises:
            ConfigurationError: where the minibatch has a field of the name of a passed scalar.
        """
        self.check_fields(minibatch)
        minibatch = minibatch.copy()
        for update in self.updates:
            update(minibatch.copy())
            objective = update.objective
            if objective.passes:
                scalars = dict(zip(update.names, update.scalars, strict=True))
                passed = passed_scalars(objective.name, objective.passes, scalars)
                for name, scalar in passed.items():
                    minibatch.set(name, scalar.expand(len(minibatch)))
        self._follow_up()

    def check_fields(self, minibatch: TensorDict) -> None:
        """Refuse a scalar that would replace a field of the minibatch [B].

        Raises:
            ConfigurationError: naming it.
        """
        for name in self._passed:
            require(
                name not in minibatch.keys(),
                f"An objective passes '{name}' to the losses after it, and the minibatch has a "
                f"field '{name}' already, which it would replace: report it under another name, "
                "and pass that.",
            )
