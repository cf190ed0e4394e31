"""Take the two steps of a minibatch that Lightning has hooks around by way of Lightning."""

from collections.abc import Sequence
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

    def backward(self, loss: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
        """Do what `manual_backward` does with a loss, less DDP's reducer.

        `Update.step_together` does without that.

        Args:
            loss: [].
            inputs: whose gradients are wanted; None for all.
        """
        strategy = self._module.trainer.strategy
        # Where the reducer would add up the gradients of this micro-batch alone.
        ours = isinstance(strategy, DDPStrategy)
        with strategy.block_backward_sync() if ours else nullcontext():  # type: ignore[attr-defined]  # narrowed by `ours`
            self._module.manual_backward(loss, inputs=inputs)

    def step(self, optimizer: Optimizer) -> None:
        """Step, but not a LightningOptimizer: it would count each minibatch as a global step."""
        self._module.trainer.strategy.optimizer_step(optimizer, closure=_no_closure)


def _no_closure() -> None:
    """Stand for the closure that Lightning wants: the gradients are there already."""
