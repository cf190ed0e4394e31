"""Adam's step as tensor operations, to stand in a compiled graph."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STATE = ("step", "exp_avg", "exp_avg_sq")
"""What `torch.optim.Adam` keeps of a parameter."""


class TracedAdam:
    """The step of a `torch.optim.Adam`, on that optimizer's own state and learning rate.

    Whoever reads the optimizer's state or saves it finds what its own `step` would have left there,
    and may go on with that.

    Args:
        optimizer: `TracedAdam.fits` must hold.
        parameters: in the order in which the graph gets their gradients.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._rate = math.nan
        self._rate_tensor = torch.zeros((), device=parameters[0].device)
        self._tensors: list[Tensor] | None = None
        optimizer.register_load_state_dict_post_hook(self._forget)

    @staticmethod
    def fits(optimizer: Optimizer | None, parameters: Sequence[nn.Parameter]) -> bool:
        """Tell whether an optimizer is plain Adam over just these parameters, on one device."""
        if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) != 1:
            return False
        group = optimizer.param_groups[0]
        return (
            {id(p) for p in group["params"]} == {id(p) for p in parameters}
            and len({p.device for p in parameters}) == 1
            and min(group["betas"]) > 0
            and group["weight_decay"] == 0
            and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
            and not isinstance(group["lr"], Tensor)
            and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        )

    @property
    def settings(self) -> tuple[Any, ...]:
        """The plain numbers in `update`."""
        group = self._optimizer.param_groups[0]
        return (*group["betas"], group["eps"])

    def tensors(self) -> list[Tensor]:
        """Return what `update` takes beside parameters and gradients, as it is now."""
        rate = self._optimizer.param_groups[0]["lr"]
        if rate != self._rate:
            self._rate_tensor.fill_(rate)
            self._rate = rate
        if self._tensors is None:
            states = [self._state(parameter) for parameter in self._parameters]
            self._tensors = [self._rate_tensor, *(s[key] for key in STATE for s in states)]
        return self._tensors

    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        tensors: Sequence[Tensor],
        accept: Tensor,
    ) -> None:
        """Step in place, unless `accept`, a bool tensor, is false; to be traced.

        Source: Kingma & Ba 2015, "Adam", algorithm 1, in the order of operations of
        `torch.optim.Adam`.
        """
        beta1, beta2, eps = self.settings
        rate, rest = tensors[0], iter(tensors[1:])
        steps, averages, squares = (_take(rest, len(parameters)) for _ in STATE)
        for parameter, gradient, step, average, square in zip(
            parameters, gradients, steps, averages, squares, strict=True
        ):
            count = step + 1
            # 1 - beta^count, without the cancellation that float32 would suffer at small counts.
            correction1 = -torch.expm1(count * math.log(beta1))
            correction2 = -torch.expm1(count * math.log(beta2))
            mean = average + (gradient - average) * (1 - beta1)
            variance = square * beta2 + gradient.square() * (1 - beta2)
            scale = variance.sqrt() / correction2.sqrt() + eps
            moved = parameter - rate / correction1 * mean / scale
            pairs = ((parameter, moved), (average, mean), (square, variance), (step, count))
            for old, new in pairs:
                old.copy_(torch.where(accept, new, old))

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter, made as `torch.optim.Adam` makes it where it is new."""
        state: dict[str, Tensor] = self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for key in STATE[1:]:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _forget(self, optimizer: Optimizer) -> None:
        """Look for the state anew: the optimizer has loaded another one."""
        self._tensors = None


def _take(tensors: Iterator[Any], count: int) -> list[Any]:
    return [next(tensors) for _ in range(count)]
