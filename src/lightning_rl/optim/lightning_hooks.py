"""Run backward pass and optimizer step through Lightning, which calls its hooks."""

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
"""The hooks that Lightning calls for each minibatch."""


class LightningHooks:
    """Backward pass and optimizer step with Lightning's hooks.

    Used only if a callback or the module overrides a hook, because calling all callbacks twice per
    minibatch takes longer than a small network's step. With several processes `on_after_backward`
    sees the gradient of one rank, and `on_before_optimizer_step` the gradient of all ranks.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    @staticmethod
    def overrides_minibatch_hooks(module: LightningModule) -> bool:
        """Return whether the module or a callback overrides one of `MINIBATCH_HOOKS`."""
        listeners = (module, *cast(Any, module.trainer).callbacks)
        return any(is_overridden(hook, user) for hook in MINIBATCH_HOOKS for user in listeners)

    def backward(self, loss: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
        """Run `manual_backward` of a loss [] without DDP's reducer; see `step_together`."""
        strategy = self._module.trainer.strategy
        # DDP's reducer would sum the gradients of this micro-batch alone.
        ours = isinstance(strategy, DDPStrategy)
        with strategy.block_backward_sync() if ours else nullcontext():  # type: ignore[attr-defined]  # narrowed by `ours`
            self._module.manual_backward(loss, inputs=inputs)

    def step(self, optimizer: Optimizer) -> None:
        """Step the plain optimizer, because LightningOptimizer counts each minibatch as a step."""
        self._module.trainer.strategy.optimizer_step(optimizer, closure=_no_closure)


def _no_closure() -> None: ...
