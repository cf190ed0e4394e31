"""Take the two steps of a minibatch that Lightning has hooks around, at the least cost."""

from contextlib import nullcontext
from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

MINIBATCH_HOOKS = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""What Lightning calls for each minibatch."""


class MinibatchHooks:
    """Backward pass and optimizer step: by way of Lightning only where somebody listens.

    With several processes `on_after_backward` sees the gradient of its own rank, and
    `on_before_optimizer_step` that of all.

    Args:
        module: attached to a trainer.

    Attributes:
        in_use: whether the module or a callback overrides one of `MINIBATCH_HOOKS`.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.in_use = any(
            is_overridden(hook, listener)
            for hook in MINIBATCH_HOOKS
            for listener in (module, *cast(Any, module.trainer).callbacks)
        )

    def backward(self, loss: Tensor) -> None:
        """Do what `manual_backward` does, which asks every callback twice, mostly in vain.

        Less DDP's reducer, which wants one pass per step: see `GradientReduction`.
        """
        if not self.in_use:
            loss.backward()
            return
        strategy = self.module.trainer.strategy
        ours = isinstance(strategy, DDPStrategy)
        with strategy.block_backward_sync() if ours else nullcontext():  # type: ignore[attr-defined]  # narrowed by `ours`
            self.module.manual_backward(loss)

    def step(self, optimizer: Optimizer) -> None:
        """Step, but not a LightningOptimizer: it would count each minibatch as a global step."""
        if self.in_use:
            self.module.trainer.strategy.optimizer_step(optimizer, closure=_no_closure)
        else:
            optimizer.step()


def _no_closure() -> None:
    """Stand for the closure that Lightning wants: the gradients are there already."""
