"""Run forward pass, backward pass, clipping and Adam as one compiled graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_rl.algorithms.adam import TracedAdam
from lightning_rl.algorithms.flat import flattened, set_clipped, unflattened
from lightning_rl.algorithms.graphs import Graph, compile_graph
from lightning_rl.algorithms.objective import Objective, piece_size, trained_parameters
from lightning_rl.algorithms.pieces import chunks


class CompiledGradients:
    """The same, with forward pass, backward pass and clipping in one graph, compiled by Inductor.

    Adam's step is in it too, where the optimizer is Adam: gradients are set only where that is not
    so. The loss is traced to tensor operations once per minibatch size, so any Python may stand in
    it as long as it does not depend on the values of tensors.

    Args:
        objective, max_norm, optimizer: see `Gradients`.

    Attributes:
        names: see `EagerGradients`.
        stepped: whether the last call has stepped too, if all was finite.
        succeeded: whether the loss has been differentiated, so that a later failure is not one of
            compiling.
        settled: see `Gradients.settle`.

    Raises:
        Exception: from the first call, of whatever kind, where tracing or compiling fails.
    """

    def __init__(
        self, objective: Objective, max_norm: float, optimizer: Optimizer | None = None
    ) -> None:
        self.objective = objective
        self.max_norm = max_norm
        self.names: list[str] = []
        self.parameters = trained_parameters(objective.policy)
        self.stepped = False
        self.succeeded = False
        self.settled = False
        self._sizes: set[int] = set()
        self._module = _LossModule(objective)
        self._trained = [n for n, p in self._module.named_parameters() if p.requires_grad]
        self._compiled: dict[tuple[Any, ...], Graph] = {}
        self._adam = None
        if optimizer is not None and TracedAdam.fits(optimizer, self.parameters):
            self._adam = TracedAdam(optimizer, self.parameters)

    def serves(self, minibatch: TensorDict) -> bool:
        """Tell whether there is a graph for a minibatch of this size, or may still be one."""
        if not self.settled:
            self._sizes.add(len(minibatch))
        return len(minibatch) in self._sizes

    @torch.no_grad()
    def __call__(self, minibatch: TensorDict) -> Tensor:
        """Set the gradients, or step; return the scalars [len(names)]."""
        with self.objective.phase("minibatch, compiled"):
            if len(chunks(minibatch, piece_size(self.objective))) > 1:
                flat = self.add_up(self.objective.prepare(minibatch.copy()))
                row = self.step(flat)
                self.stepped = row is not None
                return set_clipped(flat, self.parameters, self.max_norm) if row is None else row
            self.stepped = self._adam is not None
            row, *gradients = self._run(minibatch, self._adam, whole=True)
            if not self.stepped:
                self._set(gradients)
            return row

    @torch.no_grad()
    def add_up(self, minibatch: TensorDict) -> Tensor:
        """Return scalars and gradients of a prepared minibatch, as `flattened` does."""
        parts = [
            (self._run(chunk, None, whole=False)[0], weight)
            for chunk, weight in chunks(minibatch, piece_size(self.objective))
        ]
        if len(parts) == 1:
            return parts[0][0]
        total = parts[0][0] * parts[0][1]
        for flat, weight in parts[1:]:
            total.add_(flat, alpha=weight)
        return total

    @torch.no_grad()
    def step(self, flat: Tensor) -> Tensor | None:
        """Clip what `add_up` returned and step by it; return the scalars [len(names)].

        None where the graph has no optimizer in it.
        """
        adam = self._adam
        if adam is None:
            return None
        first = len(self.parameters)

        def update(*inputs: Tensor) -> list[Tensor]:
            parameters, flat = inputs[:first], inputs[first]
            row, gradients = self._clip(*unflattened(flat, parameters))
            adam.update(parameters, gradients, inputs[first + 1 :], _finite(row))
            return [row]

        key = (len(flat), adam.settings)
        inputs = [*self.parameters, flat, *adam.tensors()]
        return self._call(key, update, inputs)[0]

    def values(self, observations: TensorDict) -> Tensor:
        """Return the values [B] of observations [B]."""
        keys = list(observations.keys(include_nested=True, leaves_only=True))
        size = observations.batch_size

        def value_of(*fields: Tensor) -> list[Tensor]:
            td = TensorDict(dict(zip(keys, fields, strict=True)), size)
            return [self.objective.policy.get_value(td)["value"]]

        inputs: list[Any] = list(observations.values(True, True))
        return self._call(("values", size), value_of, inputs)[0]

    def _set(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _run(self, chunk: TensorDict, adam: TracedAdam | None, *, whole: bool) -> Sequence[Tensor]:
        """Return scalars, and gradients unless `adam` steps by them.

        A `whole` minibatch is prepared and clipped in it.
        """
        key = (len(chunk), whole, self.objective.settings, adam and adam.settings)
        inputs: list[Any] = [*self.parameters, *chunk.values(True, True)]
        fields = len(inputs) - len(self.parameters)
        if adam is not None:
            inputs += adam.tensors()
        result = self._call(key, self._graph(chunk, fields, adam, whole=whole), inputs)
        self.succeeded = True
        return result

    def _call(
        self, key: tuple[Any, ...], function: Callable[..., list[Tensor]], inputs: list[Tensor]
    ) -> Sequence[Tensor]:
        """Call the graph `key`; one that is new is compiled from `function`."""
        if key not in self._compiled:
            self._compiled[key] = compile_graph(function, inputs)
        return self._compiled[key](*inputs)

    def _graph(
        self, chunk: TensorDict, num_fields: int, adam: TracedAdam | None, *, whole: bool
    ) -> Callable[..., list[Tensor]]:
        keys = list(chunk.keys(include_nested=True, leaves_only=True))
        size = chunk.batch_size
        first = len(self.parameters)

        def differentiate(*inputs: Tensor) -> list[Tensor]:
            parameters, fields = inputs[:first], inputs[first : first + num_fields]
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            minibatch = TensorDict(dict(zip(keys, fields, strict=True)), size)
            with torch.enable_grad():
                state = dict(zip(self._trained, leaves, strict=True))
                loss, scalars = functional_call(self._module, state, (minibatch, whole))
                gradients = list(torch.autograd.grad(loss, leaves, materialize_grads=True))
            self.names = ["loss", *scalars, "grad_norm"]
            row = torch.stack([loss, *scalars.values()]).detach()
            if not whole:
                return [flattened(row, gradients)]
            row, gradients = self._clip(row, gradients)
            if adam is None:
                return [row, *gradients]
            adam.update(parameters, gradients, inputs[first + num_fields :], _finite(row))
            return [row]

        return differentiate

    def _clip(self, row: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Clip the gradients, and put their norm behind the other scalars."""
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return torch.cat([row, norm[None]]), [gradient * factor for gradient in gradients]


class _LossModule(nn.Module):
    """A loss as a module, so that it can be called with other parameters than the policy's own."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.policy = objective.policy
        self._objective = (objective,)  # in a tuple, so that a module in it is no child

    def forward(self, minibatch: TensorDict, whole: bool) -> tuple[Tensor, dict[str, Tensor]]:
        (objective,) = self._objective
        return objective.loss(objective.prepare(minibatch) if whole else minibatch)


def _finite(row: Tensor) -> Tensor:
    """Tell whether to step: the guard's own test, so that none is counted that is not taken."""
    return (row[0] + row[-1]).isfinite()
