"""Adam's step as tensor operations, for a compiled graph."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl.compiled.graphs import computed_once
from lightning_rl.system.torch_private import flatten, has_step_hooks, unflatten

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Entries of `torch.optim.Adam`'s state per parameter, besides `step`."""


class TracedAdam:
    """The step of a `torch.optim.Adam`, on the optimizer's own state and learning rate.

    `TracedAdam.fits` must hold. The optimizer can still read, save and use its state.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._rate = math.nan  # differs from any rate, so the first call fills the tensor
        like = parameters[0]
        self._rate_tensor = torch.zeros((), device=like.device, dtype=like.dtype)
        self._tensors: list[Tensor] | None = None
        self._counts: list[float] = []  # steps of each parameter when the tensors were made
        self._reached: Sequence[bool] | None = None  # by the only loss that was traced
        self._mixed = False
        # Loading replaces the state's tensors, which are then no longer views of the flat ones.
        optimizer.register_load_state_dict_post_hook(self._forget)

    @staticmethod
    def fits(optimizer: Optimizer | None, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether an optimizer is plain Adam of these parameters, on one device."""
        if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) != 1:
            return False
        group = optimizer.param_groups[0]
        return (
            {id(p) for p in group["params"]} == {id(p) for p in parameters}
            and len({(p.device, p.dtype) for p in parameters}) == 1  # needed for flat tensors
            and min(group["betas"]) > 0  # `update` takes their logarithms
            and group["weight_decay"] == 0
            and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
            and not isinstance(group["lr"], Tensor)  # `tensors` makes a tensor of the number
            and not has_step_hooks(optimizer)
        )

    @property
    def settings(self) -> tuple[Any, ...]:
        """The constants of a traced step; the last one: trained parameters have equal counts."""
        self.tensors()
        group = self._optimizer.param_groups[0]
        return (*group["betas"], group["eps"], self._equal_steps)

    def tensors(self) -> list[Tensor]:
        # The rate is a tensor, because a number would become a constant of the graph.
        rate = self._optimizer.param_groups[0]["lr"]
        if rate != self._rate:
            self._rate_tensor.fill_(rate)
            self._rate = rate
        if self._tensors is None:
            self._tensors = [self._rate_tensor, *self._flat_state()]
        return self._tensors

    def update(
        self,
        parameters: Sequence[Tensor],
        gradient: Tensor,
        tensors: Sequence[Tensor],
        accept: Tensor,
        reached: Sequence[bool] | Tensor,
    ) -> None:
        """Take a step in place, if the bool tensor `accept` is true; to be traced.

        Source: Kingma & Ba 2015, "Adam", algorithm 1, in the order of operations of
        `torch.optim.Adam`.

        Args:
            parameters: the parameters, in the constructor's order.
            gradient: [P], of all parameters.
            tensors: result of `tensors`.
            accept: [].
            reached: [number of parameters], false for a parameter that must not change; a tensor if
                the traced function computes it.
        """
        mask = self._mask(reached, accept.device)
        self._compare_steps()
        beta1, beta2, eps, equal_steps = self.settings
        rate, step, average, square = tensors
        count = step + 1
        # 1 - beta^count, without float32's cancellation at small counts.
        exact = count.to(rate.dtype)
        correction1, correction2 = (-torch.expm1(exact * math.log(beta)) for beta in (beta1, beta2))
        rates, roots = rate / correction1, correction2.sqrt()
        if equal_steps:
            # Parameters with equal steps share one correction: a number replaces a vector [P].
            first = list(reached).index(True)
            rates, roots = computed_once(rates[first]), computed_once(roots[first])
        else:
            rates, roots = (_elementwise(numbers, parameters) for numbers in (rates, roots))
        per_parameter = per_element = accept
        if mask is not None:
            per_parameter = accept & mask
            per_element = _elementwise(per_parameter, parameters)
        # All parameters are one vector: the compiled step has a fifth fewer operations (PPO).
        mean = average + (gradient - average) * (1 - beta1)
        variance = square * beta2 + gradient.square() * (1 - beta2)
        old_values = flatten(parameters)
        new_values = old_values - rates * mean / (variance.sqrt() / roots + eps)
        # Use `where` instead of a branch: a refused step changes nothing.
        moved = unflatten(torch.where(per_element, new_values, old_values), parameters)
        for parameter, value in zip(parameters, moved, strict=True):
            parameter.copy_(value)
        for old, new, counts in (
            (step, count, per_parameter),
            (average, mean, per_element),
            (square, variance, per_element),
        ):
            old.copy_(torch.where(counts, new, old))

    def _mask(self, reached: Sequence[bool] | Tensor, device: torch.device) -> Tensor | None:
        """Return the mask of the parameters that change; None if all do."""
        if isinstance(reached, Tensor) or self._reached not in (None, reached):
            self._mixed = True  # graphs of several losses: parameters may differ in their steps
            return torch.as_tensor(reached, device=device)
        self._reached = reached
        return None if all(reached) else torch.tensor(reached, device=device)

    def _flat_state(self) -> list[Tensor]:
        """Move the optimizer's state into flat tensors: steps [parameters], averages [P]."""
        # Three flat tensors with views for the optimizer: a graph of two small networks takes 17
        # tensors instead of 50, and steps in 25 µs instead of 39.
        states: list[dict[str, Tensor]] = [self._optimizer.state[p] for p in self._parameters]
        device = self._parameters[0].device
        steps = torch.zeros(len(states), dtype=torch.float32, device=device)
        size = sum(parameter.numel() for parameter in self._parameters)
        flat = [steps, *(self._parameters[0].new_zeros(size) for _ in AVERAGES)]
        views = [steps.unbind(), *(unflatten(f, self._parameters) for f in flat[1:])]
        for state, *parameter_views in zip(states, *views, strict=True):
            for key, view in zip(("step", *AVERAGES), parameter_views, strict=True):
                state[key] = view.copy_(state[key]) if key in state else view
        self._counts = steps.tolist()  # waits for the device: once, and after a load
        self._compare_steps()
        return flat

    def _compare_steps(self) -> None:
        reached = self._reached or [True] * len(self._counts)
        # A parameter that no loss reaches keeps its count, which may lag behind the others.
        counts = {n for n, is_reached in zip(self._counts, reached, strict=True) if is_reached}
        self._equal_steps = len(counts) == 1 and not self._mixed

    def _forget(self, optimizer: Optimizer) -> None:
        self._tensors = None


def _elementwise(numbers: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Repeat the number [parameters] of each parameter for its elements [P]."""
    pairs = zip(numbers.unbind(), parameters, strict=True)
    return torch.cat([number.expand(parameter.numel()) for number, parameter in pairs])
