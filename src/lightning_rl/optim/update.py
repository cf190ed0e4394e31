"""Step down a loss, once for each minibatch: zero, backward, clip, step."""

from contextlib import nullcontext
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_rl.distributed import ranks
from lightning_rl.optim.gradients import FlatGradient
from lightning_rl.optim.objective import Objective
from lightning_rl.phases import PhaseTimer, no_phases
from lightning_rl.policies.micro_batches import micro_batches

MINIBATCH_HOOKS = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""What Lightning calls for each minibatch."""


class Update:
    """Take one optimizer step by a minibatch, unless its loss or gradient is not finite.

    This is the update operation by operation; `CompiledUpdate` does the same by graphs. A large
    minibatch on a CPU goes through in micro-batches whose gradients add up to the same. With
    several processes a minibatch is that of all ranks together; each has a part.

    Args:
        objective: the loss.
        optimizer: of its parameters.
        hooks: where a callback or the module listens to what Lightning calls for each minibatch;
            None where nobody does.
        phase: times the parts of the update.

    Attributes:
        names: of the scalars of a minibatch: the loss, what it reports, the norm of the gradient.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        hooks: "LightningHooks | None" = None,
        phase: PhaseTimer = no_phases,
    ) -> None:
        self.objective = objective
        self.optimizer = optimizer
        self.phase = phase
        self.parameters = objective.parameters
        self.gradient = FlatGradient(self.parameters)
        self.names: list[str] = []
        self._hooks = hooks
        self._agreed = False  # with the other ranks, on the names

    def __call__(self, minibatch: TensorDict) -> None:
        """Step down the loss of a minibatch [B]; with several processes, of their parts of one."""
        if ranks.world_size() == 1:
            self.step(minibatch)
        else:
            self.step_together(minibatch)

    def step(self, minibatch: TensorDict) -> None:
        """Step down the loss of a minibatch [B]."""
        minibatch = self.objective.prepare(minibatch)
        self.zero_gradient()
        row = self.backward(minibatch)
        norm = clip_grad_norm_(self.parameters, self.objective.max_grad_norm)
        if self.is_finite(torch.cat([row, norm[None]])):
            self.optimizer_step()

    def zero_gradient(self) -> None:
        """Forget the gradients of the minibatch before."""
        for parameter in self.parameters:
            parameter.grad = None

    def backward(self, minibatch: TensorDict) -> Tensor:
        """Add the gradients of a prepared minibatch [B]; return its scalars but their norm."""
        rows = []
        for samples, share in micro_batches(minibatch, self.objective.micro_batch_size):
            with self.phase("loss"):
                loss, scalars = self.objective.loss(samples)
            with self.phase("backward"):
                self._differentiate(loss if share == 1 else loss * share)
            self.names = self.scalar_names(scalars)
            row = torch.stack([loss, *scalars.values()]).detach()
            rows.append(row if share == 1 else row * share)
        return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)

    def _differentiate(self, loss: Tensor) -> None:
        if self._hooks is None:
            loss.backward()
        else:
            self._hooks.backward(loss)

    def is_finite(self, scalars: Tensor) -> bool:
        """Tell whether loss and gradient are finite; keep the scalars of the minibatch if so."""
        if not self.objective.guard.passes(self.names, scalars):
            return False
        self.objective.statistics.add(self.names, scalars)
        return True

    def optimizer_step(self) -> None:
        """Move the parameters by their gradients."""
        with self.phase("optimizer"):
            if self._hooks is None:
                self.optimizer.step()
            else:
                self._hooks.step(self.optimizer)

    def scalar_names(self, reported: dict[str, Any]) -> list[str]:
        """Return how the scalars of a minibatch are called, in their order."""
        label = self.objective.label
        return [label("loss"), *reported, label("grad_norm")]

    # --- with several processes ---

    def step_together(self, minibatch: TensorDict) -> None:
        """Step down the loss of a minibatch of which this rank has the part [B], all ranks alike.

        Gradients and scalars of all ranks are added up by one sum of one flat tensor. DDP's own
        reducer wants one backward pass per step, through hooks that a compiled graph does not call.
        A rank weighs as much as its part of the minibatch has samples, none included; and what is
        not finite on one rank is not finite on all.
        """
        minibatch = self.objective.prepare(minibatch)
        sums = self.local_sums(minibatch) if len(minibatch) else None
        if not self._agreed:  # a rank without samples learns what is reported
            self.names = next(filter(None, ranks.gather_over_ranks(self.names)))
            self._agreed = True
        if sums is None:
            sums = self.gradient.no_sums(len(self.names) - 1)
        with self.phase("reduction"):  # waits for the slowest rank
            total = ranks.sum_over_ranks(sums)
        self.step_by(total)

    def local_sums(self, minibatch: TensorDict) -> Tensor:
        """Return scalars and gradients of a prepared minibatch [B], as `flattened` does."""
        self.gradient.clear()
        row = self.backward(minibatch)
        return self.gradient.with_scalars(row, len(minibatch))

    def step_by(self, total: Tensor) -> None:
        """Clip and step by the sum of what `local_sums` has returned on all ranks."""
        scalars = self.gradient.set_clipped(total, self.objective.max_grad_norm)
        if self.is_finite(scalars):
            self.optimizer_step()

    def first_iteration_done(self) -> None:
        """Take notice that the first iteration is over: nothing depends on it here."""


class LightningHooks:
    """Backward pass and optimizer step by way of Lightning, for who listens to its hooks.

    Asking every callback twice for each minibatch, mostly in vain, costs more than a small
    network's step: so this is used only where `listened_to`. With several processes
    `on_after_backward` sees the gradient of its own rank, and `on_before_optimizer_step` that of
    all.

    Args:
        module: attached to a trainer.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    @staticmethod
    def listened_to(module: LightningModule) -> bool:
        """Tell whether the module or a callback overrides one of `MINIBATCH_HOOKS`."""
        listeners = (module, *cast(Any, module.trainer).callbacks)
        return any(is_overridden(hook, one) for hook in MINIBATCH_HOOKS for one in listeners)

    def backward(self, loss: Tensor) -> None:
        """Do what `manual_backward` does, less DDP's reducer: see `Update.step_together`."""
        strategy = self._module.trainer.strategy
        ours = isinstance(strategy, DDPStrategy)
        with strategy.block_backward_sync() if ours else nullcontext():  # type: ignore[attr-defined]  # narrowed by `ours`
            self._module.manual_backward(loss)

    def step(self, optimizer: Optimizer) -> None:
        """Step, but not a LightningOptimizer: it would count each minibatch as a global step."""
        self._module.trainer.strategy.optimizer_step(optimizer, closure=_no_closure)


def _no_closure() -> None:
    """Stand for the closure that Lightning wants: the gradients are there already."""
