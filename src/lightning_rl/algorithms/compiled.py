"""Run forward pass, backward pass, clipping and Adam as one compiled graph."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_rl.algorithms.adam import TracedAdam
from lightning_rl.algorithms.flat import FlatGradient, averages, clip_factor, flattened
from lightning_rl.algorithms.graphs import Graph, compile_graph, computed_once, layout
from lightning_rl.algorithms.objective import Objective, piece_size, trained_parameters
from lightning_rl.algorithms.pieces import chunks
from lightning_rl.algorithms.reads import Place, Read, Reads

Function = Callable[..., list[Tensor]]
"""What a graph is made of."""

MOST_GRAPHS = 8
"""Of the same inputs: where one more would be needed, what the loss reads never settles."""


class CompiledGradients:
    """Differentiate a loss and step down it by graphs that Inductor has compiled.

    Where the optimizer is Adam, a minibatch is one graph, its step included; in pieces, or over
    ranks, it is one graph for each piece and one for clipping and stepping. With another optimizer
    gradients are set. The loss is traced to tensor operations once per minibatch size, so any
    Python may stand in it as long as it does not depend on the values of tensors.

    What the loss reads of the objective and of all that hangs on it may change: it is compared
    before each call (`Reads`), and what is no longer right is compiled anew. A number that changes,
    such as an annealed coefficient, becomes an input of its graph, so that this happens once.

    Args:
        objective, max_norm, optimizer: see `Gradients`.
        flat: the gradient to set, with another optimizer than Adam.

    Attributes:
        names: of the scalars that a call returns.
        stepped: whether the last call has stepped too, if all was finite.
        succeeded: whether the loss has been differentiated, so that a later failure is not one of
            compiling.
        settled: see `Gradients.settle`.

    Raises:
        Exception: from the first call, of whatever kind, where tracing or compiling fails.
        EverChangingError: from any call, where it would compile without end.
    """

    def __init__(
        self,
        objective: Objective,
        flat: FlatGradient,
        max_norm: float,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.objective = objective
        self._flat = flat
        self.max_norm = max_norm
        self.names: list[str] = []
        self.parameters = trained_parameters(objective.policy)
        self.stepped = False
        self.succeeded = False
        self.settled = False
        self._sizes: set[int] = set()
        self._module = _LossModule(objective)
        self._trained = [n for n, p in self._module.named_parameters() if p.requires_grad]
        self._compiled: dict[tuple[Any, ...], list[_Compiled]] = {}
        self._varying: dict[Place, Read] = {}
        self._constant: set[Place] = set()  # numbers that cannot vary
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
            self.stepped = self._adam is not None
            if self._adam is not None and len(self._pieces(minibatch)) == 1:
                return self._run(minibatch, self._adam)
            flat = self.add_up(self.objective.prepare(minibatch.copy()))
            row = self.step(flat)
            return self._flat.set_clipped(flat, self.max_norm) if row is None else row

    @torch.no_grad()
    def add_up(self, minibatch: TensorDict) -> Tensor:
        """Return scalars and gradients of a prepared minibatch, as `flattened` does."""
        first, *rest = self._pieces(minibatch)
        total = self._run(first[0])
        for piece, _ in rest:
            total += self._run(piece)
        return total

    @torch.no_grad()
    def step(self, flat: Tensor) -> Tensor | None:
        """Clip what `add_up` returned and step by it; return the scalars [len(names)].

        None where the graph has no optimizer in it.
        """
        if self._adam is None:
            return None
        return self._call(*self._stepping(flat, self._adam))

    def can_step(self, flat: Tensor) -> bool:
        """Compile `step` for what `add_up` returns; tell whether there is one.

        Raises:
            Exception: of whatever kind, where compiling fails.
        """
        if self._adam is None:
            return False
        self._graph(*self._stepping(flat, self._adam))
        return True

    def values(self, observations: TensorDict) -> Tensor:
        """Return the values [B] of observations [B]."""
        inputs: list[Any] = list(observations.values(True, True))
        key = ("values", layout(inputs))
        return self._call(key, lambda: self._values_function(observations), inputs, slice(None))

    def _pieces(self, minibatch: TensorDict) -> list[tuple[TensorDict, float]]:
        return chunks(minibatch, piece_size(self.objective))

    def _run(self, chunk: TensorDict, adam: TracedAdam | None = None) -> Tensor:
        """Return the scalars of a minibatch that `adam` steps by.

        Without it, return scalars and gradients of a piece that is prepared, as `flattened` does.
        """
        fields: list[Any] = list(chunk.values(True, True))
        key = ("loss", layout(fields), adam and adam.settings)
        inputs = [*self.parameters, *fields]
        moving = slice(len(self.parameters), len(inputs))
        if adam is not None:
            inputs += adam.tensors()
        result = self._call(key, lambda: self._loss_function(chunk, adam), inputs, moving)
        self.succeeded = True
        return result

    def _stepping(self, flat: Tensor, adam: TracedAdam) -> "_Call":
        first = len(self.parameters)
        return (
            ("step", len(flat), adam.settings),
            lambda: self._step_function(adam),
            [*self.parameters, flat, *adam.tensors()],
            slice(first, first + 1),
        )

    def _call(
        self,
        key: tuple[Any, ...],
        make: Callable[[], Function],
        inputs: list[Tensor],
        moving: slice,
    ) -> Tensor:
        """Call the graph `key`; one that is new is compiled from the function that `make` gives.

        The inputs `moving` lie elsewhere at each call.
        """
        compiled = self._graph(key, make, inputs, moving)
        self.names = compiled.names or self.names
        return compiled.graph(*inputs)[0]

    def _graph(
        self,
        key: tuple[Any, ...],
        make: Callable[[], Function],
        inputs: list[Tensor],
        moving: slice,
    ) -> "_Compiled":
        """Return the graph that is right for what the function would read now; see `_call`."""
        known = self._compiled.setdefault(key, [])
        for compiled in known:
            if compiled.reads.hold():
                return compiled
        changed = known[0].reads.changed() if known else []
        if len(known) >= MOST_GRAPHS:
            raise EverChangingError(sorted({read.label for read in changed}))
        numbers = {
            read.place: read
            for read in changed
            if read.is_number() and read.place not in self._constant
        }
        new = self._compile_varying(make, inputs, moving, numbers)
        known.insert(0, new or self._compile(make, inputs, moving, self._varying))
        return known[0]

    def _compile_varying(
        self,
        make: Callable[[], Function],
        inputs: list[Tensor],
        moving: slice,
        numbers: dict[Place, Read],
    ) -> "_Compiled | None":
        """Compile with some more numbers as inputs; return None where that cannot be."""
        if not numbers:
            return None
        try:
            compiled = self._compile(make, inputs, moving, self._varying | numbers)
        except Exception:  # the loss decides by one of them, say: each value has its own graph
            self._constant |= numbers.keys()
            return None
        self._varying |= numbers
        return compiled

    def _compile(
        self,
        make: Callable[[], Function],
        inputs: list[Tensor],
        moving: slice,
        varying: dict[Place, Read],
    ) -> "_Compiled":
        reads = Reads(self.objective, varying.values(), self.parameters[0].device)
        self._traced_names: list[str] = []
        graph = compile_graph(make(), inputs, moving, reads)
        return _Compiled(graph, reads, self._traced_names)

    def _loss_function(self, chunk: TensorDict, adam: TracedAdam | None) -> Function:
        keys = list(chunk.keys(include_nested=True, leaves_only=True))
        size, first, last = chunk.batch_size, len(self.parameters), len(self.parameters) + len(keys)

        def differentiate(*inputs: Tensor) -> list[Tensor]:
            parameters, fields = inputs[:first], inputs[first:last]
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            minibatch = TensorDict(dict(zip(keys, fields, strict=True)), size)
            with torch.enable_grad():
                state = dict(zip(self._trained, leaves, strict=True))
                prepared = adam is None
                loss, scalars = functional_call(self._module, state, (minibatch, prepared))
                found = torch.autograd.grad(loss, leaves, allow_unused=True)
            reached = [gradient is not None for gradient in found]
            gradients = [
                torch.zeros_like(leaf) if gradient is None else gradient
                for gradient, leaf in zip(found, leaves, strict=True)
            ]
            self._traced_names = ["loss", *scalars, "grad_norm"]
            row = torch.stack([loss, *scalars.values()]).detach()
            if adam is None:
                return [flattened(row, gradients, reached, len(chunk))]
            gradient = _flatten_dense_tensors(gradients)
            mask = None if all(reached) else torch.tensor(reached, device=row.device)
            return [self._stepped(parameters, row, gradient, adam, inputs[last:], mask)]

        return differentiate

    def _step_function(self, adam: TracedAdam) -> Function:
        first = len(self.parameters)

        def update(*inputs: Tensor) -> list[Tensor]:
            parameters = inputs[:first]
            row, gradient, reached = averages(inputs[first], parameters)
            return [self._stepped(parameters, row, gradient, adam, inputs[first + 1 :], reached)]

        return update

    def _values_function(self, observations: TensorDict) -> Function:
        keys = list(observations.keys(include_nested=True, leaves_only=True))
        size = observations.batch_size

        def value_of(*fields: Tensor) -> list[Tensor]:
            td = TensorDict(dict(zip(keys, fields, strict=True)), size)
            return [self.objective.policy.get_value(td)["value"]]

        return value_of

    def _stepped(
        self,
        parameters: Sequence[Tensor],
        row: Tensor,
        gradient: Tensor,
        adam: TracedAdam,
        state: Sequence[Tensor],
        reached: Tensor | None,
    ) -> Tensor:
        """Clip and step, unless something is not finite; return the scalars, the norm as well."""
        norm = gradient.square().sum().sqrt()
        row = torch.cat([row, norm[None]])
        clipped = gradient * computed_once(clip_factor(norm, self.max_norm))
        # The guard's own test, so that none is counted that is not taken.
        accept = computed_once((row[0] + norm).isfinite())
        adam.update(parameters, clipped, state, accept, reached)
        return row


class EverChangingError(RuntimeError):
    """What a loss reads changes at each call, and no graph is right for long.

    Args:
        names: of what changes.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(
            f"what it reads of {', '.join(names) or 'a tensor, as a number,'} is another value at "
            f"each call, and the graph depends on it ({MOST_GRAPHS} graphs were made). Make it a "
            "tensor or a plain number that the loss only calculates with"
        )


class _Compiled(NamedTuple):
    """A graph, what it is right for, and the names of its scalars if it has some."""

    graph: Graph
    reads: Reads
    names: list[str]


_Call = tuple[tuple[Any, ...], Callable[[], Function], list[Tensor], slice]
"""What `CompiledGradients._call` takes."""


class _LossModule(nn.Module):
    """A loss as a module, so that it can be called with other parameters than the policy's own."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.policy = objective.policy
        self._objective = (objective,)  # in a tuple, so that a module in it is no child

    def forward(self, minibatch: TensorDict, prepared: bool) -> tuple[Tensor, dict[str, Tensor]]:
        (objective,) = self._objective
        return objective.loss(minibatch if prepared else objective.prepare(minibatch))
