"""Compile functions of tensors to graphs, and call them with as little Python as that takes."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from lightning_rl.compiled.choice import Choice
from lightning_rl.compiled.cuda_graphs import CapturedGraph, is_worth_capturing
from lightning_rl.compiled.onednn import route_products
from lightning_rl.compiled.products import choose_products
from lightning_rl.compiled.reads import Place, Read, Reads
from lightning_rl.system.torch_private import list_options, make_fx, standalone_compile

T = TypeVar("T")

Graph = Callable[..., Sequence[Tensor]]

Function = Callable[..., list[Tensor]]
"""What a graph is made of."""

Make = Callable[[], tuple[Function, dict[str, None]]]
"""Gives the function of a graph, and a dict in which it notes names when it is traced."""

MOST_GRAPHS = 8
"""Of the same inputs: where one more would be needed, what the function reads never settles."""

CPU_OPTIONS: dict[str, Any] = {"cpp_wrapper": True, "cpp.use_decompose_tanh": True}
"""Inductor's, where everything lies on the CPU: kernels that take microseconds are called from C++,
and tanh is made of an exponential, which is three times as fast and exact to float32's last place
around 1."""


class Graphs:
    """The graphs of an algorithm, by what they compute and the layout of what they get.

    What a function reads of the algorithm and of all that hangs on it may change: it is compared
    before each call (`Reads`), and what is no longer right is compiled anew. A number that changes,
    such as an annealed coefficient, becomes an input of its graph, so that this happens once.

    Args:
        root: the algorithm.
        device: where it computes.
        choice: of the run, which hears where graphs are not to be had.
        driven: what the functions set themselves before they read it, see `Reads`.
        cure_of_draws: how a function comes by random numbers instead, which it then may not draw.

    Attributes:
        available: whether graphs can be had; where not, `choice` says why.
        captured: whether one of them is replayed as a CUDA graph.
        have_served: whether a loss has been differentiated, so that a later failure is not one of
            compiling.
    """

    def __init__(
        self,
        root: Any,
        device: torch.device,
        choice: Choice | None = None,
        driven: Collection[Place] = (),
        cure_of_draws: str = "",
    ) -> None:
        self.available = True
        self._choice = choice or Choice(True, None)
        self._driven = driven
        self._cure_of_draws = cure_of_draws
        if device.type == "cpu" and self._choice.products is None:
            choose_products(
                self._choice
            )  # here, where all ranks are: a graph is made by each alone
        self.captured = False
        self.have_served = False
        self._root = root
        self._device = device
        self._compiled: dict[tuple[Any, ...], list[_Compiled]] = {}
        self._varying: dict[Place, Read] = {}
        self._constant: set[Place] = set()  # numbers that cannot vary

    def attempt(
        self, call: Callable[[], T], place_of: Callable[[Exception], str] | None = None
    ) -> T | None:
        """Return what a call of graphs gives, or None where they are not to be had.

        In that case `choice` hears why, and it is not tried again.

        Args:
            call: calls graphs.
            place_of: says of an exception where in a user's code it comes from.
        """
        if not self.available:
            return None
        try:
            return call()
        except EverChangingError as error:
            self.give_up(f"{self._choice.traced}, {error}")
        except Exception as error:
            if self.have_served:
                raise
            why = f"{(str(error).strip() or 'failed').splitlines()[0]} ({type(error).__name__})"
            if place_of is not None:
                why = f"{place_of(error)}: {why}"
            self._choice.give_up(
                why,
                f"compile: true has no effect, {self._choice.subject} uncompiled: {why}. On a CPU "
                f"it needs a C++ compiler (g++, or the variable CXX), on a GPU Triton; and "
                f"{self._choice.traced} in which no Python decision depends on the values of "
                "tensors.",
            )
        self.available = False
        return None

    def give_up(self, why: str) -> None:
        """Have no more graphs, and say why, once."""
        if self.available:
            self._choice.give_up(
                why, f"From here on {self._choice.subject} uncompiled, since {why}."
            )
        self.available = False

    def call(
        self, key: tuple[Any, ...], make: Make, inputs: list[Tensor], moving: slice
    ) -> tuple[Tensor, dict[str, None]]:
        """Call the graph `key`; return its result, and the names that its function has noted.

        Args:
            key: says which graph. One that is new is compiled.
            make: gives its function.
            inputs: what the graph takes.
            moving: those of them that lie elsewhere at each call.

        Raises:
            Exception: of whatever kind, where tracing or compiling fails.
            EverChangingError: where it would compile without end.
        """
        compiled = self.prepare(key, make, inputs, moving)
        return compiled.graph(*inputs)[0], compiled.noted

    def prepare(
        self, key: tuple[Any, ...], make: Make, inputs: list[Tensor], moving: slice
    ) -> "_Compiled":
        """Return the graph that is right for what its function would read now; see `call`."""
        known = self._compiled.setdefault(key, [])
        for compiled in known:
            if compiled.reads.still_hold():
                return compiled
        changed = known[0].reads.changed() if known else []
        if len(known) >= MOST_GRAPHS:
            raise EverChangingError(sorted({read.label for read in changed}))
        numbers = {
            read.place: read
            for read in changed
            if read.is_number() and read.place not in self._constant
        }
        # What changes once is likely to change at each iteration, as what is annealed does.
        new = self._compile_varying(make, inputs, moving, numbers)
        # First, as the next call most likely wants this one again.
        known.insert(0, new or self._compile(make, inputs, moving, self._varying))
        return known[0]

    def _compile_varying(
        self, make: Make, inputs: list[Tensor], moving: slice, numbers: dict[Place, Read]
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
        self, make: Make, inputs: list[Tensor], moving: slice, varying: dict[Place, Read]
    ) -> "_Compiled":
        reads = Reads(self._root, varying.values(), self._device, self._driven)
        function, noted = make()
        # Tracing runs the function, which may move running statistics: the graph is to move them.
        kept = [(buffer, buffer.clone()) for buffer in self._root.buffers()]
        graph = compile_graph(
            function, inputs, moving, reads, self._choice.products, self._cure_of_draws
        )
        for buffer, value in kept:
            buffer.copy_(value)
        self.captured |= is_worth_capturing(inputs)
        return _Compiled(graph, reads, noted)


class _Compiled(NamedTuple):
    """A graph, what it is right for, and the names that its function has noted."""

    graph: Graph
    reads: Reads
    noted: dict[str, None]


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


def compile_graph(
    function: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    moving: slice = slice(0),
    reads: Reads | None = None,
    products: str | None = None,
    cure_of_draws: str = "",
) -> Graph:
    """Compile a function that takes tensors, may write into them, and returns a list of tensors.

    It is traced to tensor operations with these inputs: any Python may stand in it as long as it
    does not depend on the values of tensors. The graph takes inputs of the same layout (`layout`),
    in the same order; nothing checks that, since Inductor's asserts take a sixth of a small graph's
    time.

    `torch.compile` would do, but looks at every input before each call: 30 to 50 µs for a graph
    that itself takes 100. On a GPU small graphs are replayed as CUDA graphs.

    Args:
        function: is traced.
        inputs: to trace and compile it with.
        moving: which of them, only read, lie elsewhere at each call.
        reads: record what the function reads of Python objects. The graph is right as long as
            `reads.still_hold()`.
        products: what multiplies float32 matrices on a CPU: `onednn`, whose operator must be ready,
            or torch's own way, MKL.
        cure_of_draws: see `Graphs`.

    Raises:
        Exception: of whatever kind, where tracing or compiling fails.
    """
    # Of copies: tracing runs the function, and it may write.
    copies = [tensor.detach().clone() for tensor in inputs]
    with nullcontext() if reads is None else reads.recorded():
        traced = make_fx(function)(*copies)
    for node in traced.graph.nodes if cure_of_draws else ():
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise RuntimeError(f"random numbers are drawn by {node.target}: {cure_of_draws}")
    held = _lift_tensors(traced)
    if reads is not None:
        for i, tensor in enumerate(held):
            reads.rebind(tensor, partial(held.__setitem__, i))
    # `layout` is in the key of each graph: Inductor's asserts would ask the same again.
    options: dict[str, Any] = {"size_asserts": False}
    if all(tensor.device.type == "cpu" for tensor in (*inputs, *held)):
        options |= {key: value for key, value in CPU_OPTIONS.items() if key in list_options()}
        if products == "onednn":
            route_products(traced)
    compiled = standalone_compile(
        traced,
        [*inputs, *held],
        dynamic_shapes="from_example_inputs",  # their sizes are constants of the code
        options={"config_patches": options},
    )

    graph: Graph = compiled
    if is_worth_capturing((*inputs, *held)):
        # What is held is among its inputs: it begins anew where another tensor takes its place.
        graph = CapturedGraph(compiled, slice(*moving.indices(len(inputs))))
    if not held:
        return graph
    return lambda *tensors: graph(*tensors, *held)


def layout(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return what a graph depends on of its inputs."""
    return tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)


def computed_once(tensor: Tensor) -> Tensor:
    """Return a small tensor as it is; in a graph it is computed once and not once for each use.

    Inductor would compute it anew for every 16 elements of what it is combined with.
    """
    return tensor.as_strided(tensor.shape, tensor.stride())


def _lift_tensors(traced: GraphModule) -> list[Tensor]:
    """Make inputs of the tensors that a traced function took from elsewhere; return them.

    As constants they would be compiled in with the values that they have now, and a buffer such as
    the mean of a normaliser moves.
    """
    held = []
    first = next(node for node in traced.graph.nodes if node.op != "placeholder")
    for node in traced.graph.find_nodes(op="get_attr"):
        held.append(getattr(traced, node.target))
        with traced.graph.inserting_before(first):
            lifted = traced.graph.placeholder(f"held_{len(held)}")
        lifted.meta = node.meta
        node.replace_all_uses_with(lifted)
        if node is first:
            first = node.next
        traced.graph.erase_node(node)
    traced.recompile()
    return held
