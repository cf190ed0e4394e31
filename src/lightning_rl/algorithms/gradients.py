"""Put the gradient of a minibatch's loss into the parameters: eagerly, or as one compiled graph."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_rl import ranks
from lightning_rl.algorithms.adam import TracedAdam
from lightning_rl.algorithms.graphs import Graph, compile_graph
from lightning_rl.algorithms.reduction import GradientReduction
from lightning_rl.phases import PhaseTimer


class Objective(Protocol):
    """What is minimised."""

    phase: PhaseTimer

    @property
    def policy(self) -> nn.Module:
        """Whose parameters are trained."""

    @property
    def settings(self) -> tuple[Any, ...]:
        """The plain numbers in the loss: where one changes, a compiled loss is compiled anew."""

    def prepare(self, minibatch: TensorDict) -> TensorDict:
        """Do what needs the whole minibatch at once, such as normalising."""

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and scalars to report, all averages over the samples given."""


CPU_CHUNK = 2048
"""Samples that go through the networks at once on a CPU.

The activations of a larger chunk leave the cache, and their memory is asked for anew each time.
"""


class Gradients:
    """Differentiate a loss that is an average over samples, and clip the gradient.

    A large minibatch on a CPU goes through in chunks whose gradients add up to the same. With
    several processes a minibatch is that of all ranks together; each has a part.

    Args:
        objective: the loss, and the policy whose parameters get the gradient.
        max_norm: bound on the norm of the whole gradient; None for none.
        compile: run one compiled graph; where that cannot be made, warn and run eagerly.
        optimizer: whose step a compiled graph may include.

    Attributes:
        stepped: whether the last call has taken the optimizer's step too, if all was finite.
    """

    def __init__(
        self,
        objective: Objective,
        max_norm: float | None,
        *,
        compile: bool,
        optimizer: Optimizer | None = None,
    ) -> None:
        self._limit = math.inf if max_norm is None else max_norm
        self._objective = objective
        self._eager = EagerGradients(objective, self._limit)
        self._compiled = CompiledGradients(objective, self._limit, optimizer) if compile else None
        self._reduce = GradientReduction(self._eager.parameters)
        self.stepped = False

    def __call__(
        self, minibatch: TensorDict, backward: Callable[[Tensor], None]
    ) -> tuple[list[str], Tensor]:
        """Set the gradients; return names and values of the scalars.

        They are `loss`, what the loss reports, and `grad_norm`.

        Args:
            minibatch: [B].
            backward: what stands for `Tensor.backward`.
        """
        if ranks.world_size() > 1:
            return self._over_ranks(minibatch, backward)
        if self._compiled is not None and self._compiled.serves(minibatch):
            scalars = self._tried(lambda compiled: compiled(minibatch))
            if scalars is not None and self._compiled is not None:
                self.stepped = self._compiled.stepped
                return self._compiled.names, scalars
        self.stepped = False
        scalars = self._eager(minibatch, backward)
        return self._eager.names, scalars

    def _over_ranks(
        self, minibatch: TensorDict, backward: Callable[[Tensor], None]
    ) -> tuple[list[str], Tensor]:
        """Reduce before clipping; what is compiled ends with the gradients of this rank."""
        minibatch = self._objective.prepare(minibatch)

        def local() -> tuple[list[str], Tensor]:
            row = None
            if self._compiled is not None and self._compiled.serves(minibatch):
                row = self._tried(lambda compiled: compiled.add_up(minibatch))
            if row is not None and self._compiled is not None:
                return self._compiled.names[:-1], row
            row = self._eager.add_up(minibatch, backward)
            return self._eager.names[:-1], row

        names, row = self._reduce(len(minibatch), local, self._objective.phase)
        return [*names, "grad_norm"], _clipped(row, self._eager.parameters, self._limit)

    def _tried(self, call: Callable[["CompiledGradients"], Tensor]) -> Tensor | None:
        """Return what the compiled update gives, or None where it is not wanted, or not to be had.

        Then a warning says why, and it is not tried again.
        """
        if self._compiled is None:
            return None
        try:
            return call(self._compiled)
        except Exception as error:
            if self._compiled.succeeded:
                raise
            rank_zero_warn(
                "compile: true has no effect, the update runs uncompiled: "
                f"{str(error).strip().splitlines()[0]} ({type(error).__name__}). On a CPU it "
                "needs a C++ compiler (g++, or the variable CXX), on a GPU Triton; and a loss "
                "in which no Python decision depends on the values of tensors.",
            )
            self._compiled = None
            return None

    def settle(self) -> None:
        """Compile for no other sizes of minibatches than have come so far.

        Called after the first update: where samples are left out, the last minibatch of a pass has
        another size each time, and each graph takes seconds.
        """
        if self._compiled is not None:
            self._compiled.settled = True


class EagerGradients:
    """Set gradients operation by operation.

    Args:
        objective, max_norm: see `Gradients`.

    Attributes:
        names: of the scalars that a call returns.
    """

    def __init__(self, objective: Objective, max_norm: float) -> None:
        self.objective = objective
        self.max_norm = max_norm
        self.names: list[str] = []
        self.parameters = _trained(objective.policy)

    def __call__(self, minibatch: TensorDict, backward: Callable[[Tensor], None]) -> Tensor:
        """Set the gradients; return the scalars [len(names)]."""
        row = self.add_up(self.objective.prepare(minibatch), backward)
        return _clipped(row, self.parameters, self.max_norm)

    def add_up(self, minibatch: TensorDict, backward: Callable[[Tensor], None]) -> Tensor:
        """Set the gradients of a prepared minibatch, not clipped; return the scalars but theirs."""
        for parameter in self.parameters:
            parameter.grad = None
        rows = []
        for chunk, weight in chunks(minibatch):
            with self.objective.phase("loss"):
                loss, scalars = self.objective.loss(chunk)
            with self.objective.phase("backward"):
                backward(loss if weight == 1 else loss * weight)
            self.names = ["loss", *scalars, "grad_norm"]
            row = torch.stack([loss, *scalars.values()]).detach()
            rows.append(row if weight == 1 else row * weight)
        return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)


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
        succeeded: whether a call has returned, so that a later failure is not one of compiling.
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
        self.parameters = _trained(objective.policy)
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
            if _is_large(minibatch):
                self.stepped = False
                row = self.add_up(self.objective.prepare(minibatch.copy()))
                return _clipped(row, self.parameters, self.max_norm)
            self.stepped = self._adam is not None
            row, *gradients = self._run(minibatch, self._adam, whole=True)
            if not self.stepped:
                self._set(gradients)
            return row

    @torch.no_grad()
    def add_up(self, minibatch: TensorDict) -> Tensor:
        """See `EagerGradients.add_up`."""
        parts = [
            (self._run(chunk, None, whole=False), weight) for chunk, weight in chunks(minibatch)
        ]
        row = torch.stack([row * weight for (row, *_), weight in parts]).sum(0)
        (_, *first), weight = parts[0]
        total = torch._foreach_mul(first, weight)
        for (_, *gradients), weight in parts[1:]:
            torch._foreach_add_(total, gradients, alpha=weight)
        self._set(total)
        return row

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
        if key not in self._compiled:
            self._compiled[key] = compile_graph(
                self._graph(chunk, fields, adam, whole=whole), inputs
            )
        result = self._compiled[key](*inputs)
        self.succeeded = True
        return result

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
                return [row, *gradients]
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            gradients = [g * (self.max_norm / (norm + 1e-6)).clamp(max=1.0) for g in gradients]
            row = torch.cat([row, norm[None]])
            if adam is None:
                return [row, *gradients]
            # The guard's own test: a step is taken just where the guard counts none as skipped.
            accept = (row[0] + row[-1]).isfinite()
            adam.update(parameters, gradients, inputs[first + num_fields :], accept)
            return [row]

        return differentiate


class _LossModule(nn.Module):
    """A loss as a module, so that it can be called with other parameters than the policy's own."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.policy = objective.policy
        self._objective = (objective,)  # in a tuple, so that a module in it is no child

    def forward(self, minibatch: TensorDict, whole: bool) -> tuple[Tensor, dict[str, Tensor]]:
        (objective,) = self._objective
        return objective.loss(objective.prepare(minibatch) if whole else minibatch)


def chunks(minibatch: TensorDict) -> list[tuple[TensorDict, float]]:
    """Split a minibatch [B] for the cache; return the parts and their shares of the samples."""
    if not _is_large(minibatch):
        return [(minibatch, 1.0)]
    return [(chunk, len(chunk) / len(minibatch)) for chunk in minibatch.split(CPU_CHUNK)]


def _clipped(row: Tensor, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the gradient, and put its norm behind the other scalars."""
    return torch.cat([row, clip_grad_norm_(parameters, max_norm)[None]])


def _is_large(minibatch: TensorDict) -> bool:
    field = cast(Tensor, next(iter(minibatch.values(True, True))))
    return field.device.type == "cpu" and len(minibatch) >= 2 * CPU_CHUNK


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
