"""Put the gradient of a minibatch's loss into the parameters: eagerly, or as one compiled graph."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import clip_grad_norm_

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

    A large minibatch on a CPU goes through in chunks whose gradients add up to the same.

    Args:
        objective: the loss, and the policy whose parameters get the gradient.
        max_norm: bound on the norm of the whole gradient; None for none.
        compile: run one compiled graph; where that cannot be made, warn and run eagerly.
    """

    def __init__(self, objective: Objective, max_norm: float | None, *, compile: bool) -> None:
        limit = math.inf if max_norm is None else max_norm
        self._eager = EagerGradients(objective, limit)
        self._compiled = CompiledGradients(objective, limit) if compile else None

    def __call__(
        self, minibatch: TensorDict, backward: Callable[[Tensor], None]
    ) -> tuple[list[str], Tensor]:
        """Set the gradients; return names and values of the scalars.

        They are `loss`, what the loss reports, and `grad_norm`.

        Args:
            minibatch: [B].
            backward: what stands for `Tensor.backward`.
        """
        if self._compiled is not None:
            try:
                scalars = self._compiled(minibatch)
                return self._compiled.names, scalars
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
        scalars = self._eager(minibatch, backward)
        return self._eager.names, scalars


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
        for parameter in self.parameters:
            parameter.grad = None
        row = torch.zeros(())
        for chunk, weight in chunks(self.objective.prepare(minibatch)):
            with self.objective.phase("loss"):
                loss, scalars = self.objective.loss(chunk)
            with self.objective.phase("backward"):
                backward(loss if weight == 1 else loss * weight)
            self.names = ["loss", *scalars, "grad_norm"]
            row = row + weight * torch.stack([loss, *scalars.values()]).detach()
        return torch.cat([row, clip_grad_norm_(self.parameters, self.max_norm)[None]])


class CompiledGradients:
    """The same, with forward pass, backward pass and clipping in one graph, compiled by Inductor.

    The loss is traced to tensor operations once per minibatch size, so any Python may stand in it
    as long as it does not depend on the values of tensors.

    Args:
        objective, max_norm: see `Gradients`.

    Attributes:
        names: see `EagerGradients`.
        succeeded: whether a call has returned, so that a later failure is not one of compiling.

    Raises:
        Exception: from the first call, of whatever kind, where tracing or compiling fails.
    """

    def __init__(self, objective: Objective, max_norm: float) -> None:
        self.objective = objective
        self.max_norm = max_norm
        self.names: list[str] = []
        self.parameters = _trained(objective.policy)
        self._module = _LossModule(objective)
        self._trained = [n for n, p in self._module.named_parameters() if p.requires_grad]
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.succeeded = False

    @torch.no_grad()
    def __call__(self, minibatch: TensorDict) -> Tensor:
        """Set the gradients; return the scalars [len(names)]."""
        with self.objective.phase("loss and backward, compiled"):
            return self._differentiate(minibatch)

    def _differentiate(self, minibatch: TensorDict) -> Tensor:
        if not _is_large(minibatch):
            row, gradients = self._run(minibatch, whole=True)
            self._set(gradients)
            return row
        parts = [
            (self._run(chunk, whole=False), weight)
            for chunk, weight in chunks(self.objective.prepare(minibatch.copy()))
        ]
        row = torch.stack([row * weight for (row, _), weight in parts]).sum(0)
        total = torch._foreach_mul(parts[0][0][1], parts[0][1])
        for (_, gradients), weight in parts[1:]:
            torch._foreach_add_(total, gradients, alpha=weight)
        self._set(total)
        return torch.cat([row, clip_grad_norm_(self.parameters, self.max_norm)[None]])

    def _set(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _run(self, chunk: TensorDict, *, whole: bool) -> tuple[Tensor, list[Tensor]]:
        """Return scalars and gradients; a `whole` minibatch is prepared and clipped in it."""
        key = (len(chunk), whole, self.objective.settings)
        fields = list(chunk.values(include_nested=True, leaves_only=True))
        parameters = [parameter.detach() for parameter in self.parameters]
        inputs = (parameters, fields)
        if key not in self._compiled:
            self._compiled[key] = self._compile(chunk, inputs, whole=whole)
        scalars, gradients = self._compiled[key](*inputs)
        self.succeeded = True
        return scalars, gradients

    def _compile(self, chunk: TensorDict, inputs: Any, *, whole: bool) -> Callable[..., Any]:
        keys = list(chunk.keys(include_nested=True, leaves_only=True))
        size = chunk.batch_size

        def differentiate(parameters: list[Tensor], fields: list[Tensor]) -> Any:
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            minibatch = TensorDict(dict(zip(keys, fields, strict=True)), size)
            with torch.enable_grad():
                state = dict(zip(self._trained, leaves, strict=True))
                loss, scalars = functional_call(self._module, state, (minibatch, whole))
                gradients = list(torch.autograd.grad(loss, leaves, materialize_grads=True))
            self.names = ["loss", *scalars, "grad_norm"]
            row = torch.stack([loss, *scalars.values()]).detach()
            if whole:
                norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
                gradients = [g * (self.max_norm / (norm + 1e-6)).clamp(max=1.0) for g in gradients]
                row = torch.cat([row, norm[None]])
            return row, gradients

        return torch.compile(make_fx(differentiate)(*inputs), fullgraph=True, dynamic=False)


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


def _is_large(minibatch: TensorDict) -> bool:
    field = cast(Tensor, next(iter(minibatch.values(True, True))))
    return field.device.type == "cpu" and len(minibatch) >= 2 * CPU_CHUNK


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
