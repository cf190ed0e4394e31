"""Compile functions of tensors to graphs, and call the graphs with little Python overhead."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from lightning_rl.compiled.attributes import (
    MISSING,
    Attribute,
    Place,
    Snapshot,
    TensorReadRecorder,
    replaced,
    same,
)
from lightning_rl.compiled.choice import CompileDecision
from lightning_rl.compiled.cuda_graphs import CapturedGraph, is_worth_capturing
from lightning_rl.compiled.writes import Contents, draws_of_python
from lightning_rl.system.torch_private import list_options, standalone_compile, trace, version_of

T = TypeVar("T")

Graph = Callable[..., Sequence[Tensor]]

Function = Callable[..., list[Tensor]]
"""The function that a graph computes."""

Make = Callable[[], tuple[Function, dict[str, None]]]
"""Returns the function of a graph, and a dict of names that the function fills when traced."""

MOST_GRAPHS = 8
"""Most graphs per input layout; more graphs mean that an attribute changes at each call."""

VARYING = ".env_steps"
"""Path of the algorithm's own counter, which changes in each iteration."""

PRECOMPILE = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Inductor's variable of the environment; 1: compile its headers once, for all graphs to come."""

CPU_OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,
    "cpp.use_decompose_tanh": True,
    "cpp.vec_isa_ok": True,
    "cpp_cache_precompile_headers": os.environ.get(PRECOMPILE) == "1",
}
"""Options of Inductor on the CPU.

C++ calls the kernels, which take microseconds; tanh uses an exponential, which is three times as
fast and exact to float32's last digit; and Inductor skips a trial of each instruction set (6 s).
Precompiled headers (147 MB) take as long as three graphs, and make a graph a third faster: they pay
from the fourth graph on.
"""


class Graphs:
    """The compiled graphs of an algorithm, by function and input layout.

    A trace stores attributes as constants, so the attributes of the algorithm and its objects are
    compared with the trace's before each iteration, the algorithm's own before each call. A changed
    attribute leads to a new graph. A number that changes, such as an annealed coefficient, becomes
    an input of its graph. An attribute that tracing does not need is no longer compared.

    Args:
        root: the algorithm.
        device: the device of the graphs.
        choice: records why graphs are unavailable.
        left_out: attributes that are not compared: constants, or written by the functions.
        hidden: attributes of the algorithm that are not compared, and must not be read.
        cure_of_draws: advice for random numbers; if set, a graph must not draw them.
        functions: functions that are traced and that the algorithm may not hold.

    Attributes:
        available: whether graphs can be compiled.
        captured: whether a graph is replayed as a CUDA graph.
        have_served: whether a graph has run, so that later errors are not compile errors.
    """

    def __init__(
        self,
        root: Any,
        device: torch.device,
        choice: CompileDecision | None = None,
        left_out: Collection[Place] = (),
        hidden: Collection[str] = (),
        cure_of_draws: str = "",
        functions: Sequence[Any] = (),
    ) -> None:
        self.available = True
        self._choice = choice or CompileDecision(True, None)
        self._left_out = {*left_out, *((id(root), name) for name in hidden)}
        self._hidden = hidden
        self._cure_of_draws = cure_of_draws
        self.captured = False
        self.have_served = False
        self._root, self._functions = root, functions
        self._device = device
        self._compiled: dict[tuple[Any, ...], list[_Compiled]] = {}
        self._snapshot: Snapshot | None = None
        self._is_fresh = False  # whether it belongs to this iteration
        self._varying: set[str] = set()  # numbers that are graph inputs
        self._constant: set[str] = set()  # attributes that must be compiled in

    def attempt(
        self, call: Callable[[], T], place_of: Callable[[Exception], str] | None = None
    ) -> T | None:
        """Return the result of a call of graphs; after an error None, now and later."""
        if not self.available:
            return None
        try:
            return call()
        except NoGraphError as error:
            self.give_up(f"{self._choice.traced} cannot be a graph: {error}")
        except Exception as error:
            if self.have_served:  # no compile error, so it must not be hidden
                raise
            reason = f"{(str(error).strip() or 'failed').splitlines()[0]} ({type(error).__name__})"
            if place_of is not None:
                reason = f"{place_of(error)}: {reason}"
            self._choice.give_up(
                reason,
                f"compile: true has no effect, {self._choice.subject} uncompiled: {reason}. "
                "Compiling needs a C++ compiler on a CPU (g++, or the variable CXX), Triton on a "
                f"GPU, and {self._choice.traced} in which no Python decision depends on the values "
                "of tensors.",
            )
        self.available = False
        return None

    def give_up(self, reason: str) -> None:
        if self.available:
            self._choice.give_up(
                reason, f"From now on {self._choice.subject} uncompiled, because {reason}."
            )
        self.available = False

    def call(
        self, key: tuple[Any, ...], make: Make, inputs: list[Tensor], moving: slice
    ) -> tuple[Tensor, dict[str, None]]:
        """Call the graph `key`; return its result, and the names that its function has recorded.

        A new graph is compiled from `make`. `moving` are the inputs whose address changes between
        calls. Raise `NoGraphError` if an attribute changes at each call, or the function draws
        random numbers.
        """
        compiled = self.prepare(key, make, inputs, moving)
        return compiled.graph(*inputs)[0], compiled.noted

    def prepare(
        self, key: tuple[Any, ...], make: Make, inputs: list[Tensor], moving: slice
    ) -> "_Compiled":
        attributes = self._current_attributes()
        graphs = self._compiled.setdefault(key, [])
        for compiled in graphs:
            if compiled.holds(attributes):  # the newest graph comes first
                return compiled
        # The counter is assumed to change, so that the second iteration needs no second trace.
        changed = set(graphs[0].changes(attributes)) if graphs else {VARYING} & attributes.keys()
        loose, trace = self._trace_without_constants(make, inputs, changed - self._constant)
        if graphs and changed and changed <= loose and not trace.uses_numbers(loose):
            graphs[0].ignore(loose)  # the graph does not read the changed attributes
            return self.prepare(key, make, inputs, moving)
        if len(graphs) >= MOST_GRAPHS:
            names = sorted({attributes[path].label for path in changed & attributes.keys()})
            raise NoGraphError(
                f"the value of {', '.join(names) or 'a tensor, read as a number,'} changes at each "
                f"call, and the graph depends on it ({MOST_GRAPHS} graphs were made). Make it a "
                "tensor, or a plain number that the loss uses in calculations only"
            )
        self._varying |= loose & trace.numbers.keys()  # inputs of all later graphs, too
        graph = compile_graph(trace.traced, trace.held, inputs, moving)
        self.captured |= is_worth_capturing(inputs)
        # Move this graph to the front: the next call will probably need it.
        graphs.insert(0, _Compiled(graph, trace, attributes, loose))
        return graphs[0]

    def recheck(self) -> None:
        self._is_fresh = False

    def _current_attributes(self) -> dict[str, Attribute]:
        snapshot = self._snapshot
        # The cheapest test first: the root (1 µs), then all known attributes; a new search last.
        is_current = self._is_fresh and snapshot is not None and snapshot.root_is_current()
        if snapshot is None or not (is_current or snapshot.refresh()):
            snapshot = self._snapshot = self._take_snapshot()
        self._is_fresh = True
        return snapshot.attributes

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(self._root, self._left_out, self._functions)

    def _trace_without_constants(
        self, make: Make, inputs: list[Tensor], loose: set[str]
    ) -> tuple[set[str], "_Trace"]:
        """Trace without constants for changed attributes; return these attributes, and the trace.

        A changed number becomes a tensor; other changed attributes are removed while tracing. If
        tracing then fails, the attribute stays a constant, and each of its values has its own
        graph.
        """
        try:
            # Example: a coefficient was 0.2 and is 0.1 now, and a list has grown. Try the
            # coefficient as an input, and delete the list while tracing. If the loss reads the
            # list, this fails, and each is tried alone: the list becomes a constant, with a graph
            # per value, and the coefficient stays an input.
            return loose, self._trace(make, inputs, loose)
        except Exception:
            if not loose:
                raise
        if len(loose) == 1:
            self._constant |= loose
            return self._trace_without_constants(make, inputs, set())
        for path in loose:
            self._trace_without_constants(make, inputs, {path})
        if not loose & self._constant:  # each may be missing alone, but not all together
            self._constant |= loose
        return self._trace_without_constants(make, inputs, loose - self._constant)

    def _trace(self, make: Make, inputs: list[Tensor], loose: set[str]) -> "_Trace":
        current = self._current_attributes()
        nonconstant = {p: current[p] for p in (*self._varying, *loose) if p in current}
        numbers = {
            # float32, so that the number does not promote a tensor's dtype.
            path: torch.tensor(float(attribute.value), dtype=torch.float32, device=self._device)
            for path, attribute in nonconstant.items()
            if attribute.is_number()
        }
        absent = dict.fromkeys(loose & nonconstant.keys() - numbers.keys(), MISSING)
        for path in absent:
            if not isinstance(current[path].holder, MutableMapping):
                raise RuntimeError(f"{current[path].label} belongs to a class")
        namespace = vars(self._root)
        values = [(current[p].holder, current[p].name, v) for p, v in (numbers | absent).items()]
        values += [(namespace, name, _Hidden(name)) for name in self._hidden if name in namespace]
        with replaced(values):
            traced, reads, noted = self._trace_alone(make, inputs)
        # `_trace_without_constants` catches this, and leaves the number a constant.
        for tensor, _, _ in reads:
            if any(tensor is number for number in numbers.values()):
                raise RuntimeError("a Python decision depends on the number")
        # Inductor has its own random numbers: the run's generators would have no effect.
        for node in traced.graph.nodes if self._cure_of_draws else ():
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise NoGraphError(
                    f"random numbers are drawn by {node.target}: {self._cure_of_draws}"
                )
        return _Trace(traced, lift_tensors(traced), numbers, reads, noted)

    def _trace_alone(
        self, make: Make, inputs: list[Tensor]
    ) -> tuple[GraphModule, list[tuple[Tensor, int, Any]], dict[str, None]]:
        """Trace without effects; refuse a function whose effects are not in the graph."""
        results = []

        def run() -> None:
            function, noted = make()
            copies = [tensor.detach().clone() for tensor in inputs]  # tracing runs the function
            with TensorReadRecorder() as recorder:
                results.append((trace(function, *copies), recorder.reads, noted))

        contents = Contents(lambda: self._take_snapshot().attributes)
        try:
            draws = draws_of_python(run)
            changes = contents.changes()
        finally:
            contents.restore()  # also what the graph repeats: writes into tensors
        if draws:
            raise NoGraphError(
                "it draws random numbers of Python or NumPy, which would be constants: "
                f"{self._cure_of_draws or 'draw by torch, such as torch.rand'}"
            )
        if changes:
            raise NoGraphError(
                f"it changes {', '.join(dict.fromkeys(changes.values()))}, which a graph does not "
                "repeat: change it in training_step, or make it a tensor that the loss writes in "
                "place, by self.register_buffer in __init__"
            )
        return results[0]


class NoGraphError(RuntimeError):
    """A function cannot become a graph; the message gives the reason."""


class _Hidden:
    """Replaces a hidden attribute while tracing, and refuses to be read."""

    name: str

    def __init__(self, name: str) -> None:
        vars(self)["name"] = name

    def _refuse(self, *args: Any) -> NoReturn:
        call = ".".join([self.name.lstrip("_"), *(arg for arg in args if isinstance(arg, str))])
        raise NoGraphError(
            f"it reads {call}, whose value would become a constant: copy it to an attribute in "
            "training_step, and read the attribute"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse


class _Trace(NamedTuple):
    """Traced operations, the tensors that they hold, and the tensors that replace numbers."""

    traced: GraphModule
    held: list[Tensor]
    numbers: dict[str, Tensor]
    reads: list[tuple[Tensor, int, Any]]
    noted: dict[str, None]

    def uses_numbers(self, paths: set[str]) -> bool:
        tensor_ids = {id(tensor) for tensor in self.held}
        return any(id(self.numbers[path]) in tensor_ids for path in paths & self.numbers.keys())


class _Compiled:
    """A graph, the attributes at compile time, and those that it does not read."""

    def __init__(
        self, graph: Graph, trace: _Trace, attributes: dict[str, Attribute], unread: set[str]
    ) -> None:
        self._held, self._numbers, self._reads = trace.held, trace.numbers, trace.reads
        self.noted = trace.noted
        self.graph = graph
        self._attributes = self._checked = attributes
        self._unread = set(unread)
        slot = {id(tensor): i for i, tensor in enumerate(self._held)}
        # -1: Python has read its value, so another tensor cannot replace it.
        slot |= {id(tensor): -1 for tensor, _, _ in self._reads}
        self._places = {p: slot[id(a.value)] for p, a in attributes.items() if id(a.value) in slot}

    def holds(self, attributes: dict[str, Attribute]) -> bool:
        for tensor, version, value in self._reads:
            # `item` waits for the device, but only if the tensor was written since.
            if version_of(tensor) != version and tensor.item() != value:
                return False
        if attributes is self._checked:
            return True
        if any(True for _ in self.changes(attributes)):
            return False
        for path, tensor in self._numbers.items():
            if path in attributes:
                tensor.fill_(attributes[path].value)  # the graph reads the number from this tensor
        for path, i in self._places.items():
            # The attribute may be another tensor now, such as a reloaded buffer.
            if i >= 0 and path not in self._unread:
                self._held[i] = attributes[path].value
        self._checked = attributes
        return True

    def changes(self, attributes: dict[str, Attribute]) -> Iterator[str]:
        for path in {**self._attributes, **attributes}:
            if path in self._unread or self._attributes.get(path) is attributes.get(path):
                continue
            if path in self._numbers and path in attributes and attributes[path].is_number():
                continue
            pair = self._attributes.get(path), attributes.get(path)
            old, new = (MISSING if attribute is None else attribute.value for attribute in pair)
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                # The graph accepts another tensor of the same layout.
                i = self._places.get(path)
                fits = i is None or (i >= 0 and _layout(old) == _layout(new))
                if not fits and old is not new:
                    yield path
            elif not same(old, new):
                yield path

    def ignore(self, paths: set[str]) -> None:
        self._unread |= paths


def compile_graph(
    traced: GraphModule,
    held_tensors: list[Tensor],
    inputs: Sequence[Tensor],
    moving: slice = slice(0),
) -> Graph:
    """Compile a traced function that takes tensors and returns a list of tensors.

    The graph reads `held_tensors` (see `lift_tensors`) at each call, after its inputs.
    Nothing checks that inputs have the same `layout` and order. On a GPU small graphs are replayed
    as CUDA graphs; `moving` are read-only inputs whose address changes.
    """
    # `torch.compile` checks every input before each call, 30 to 50 µs for a graph of 100 µs.
    # Inductor's asserts take a sixth of a small graph's time. The key of each graph has the
    # `layout` already.
    options: dict[str, Any] = {"size_asserts": False}
    if all(tensor.device.type == "cpu" for tensor in (*inputs, *held_tensors)):
        options |= {key: value for key, value in CPU_OPTIONS.items() if key in list_options()}
    # mypy sometimes takes the module of the same name.
    compiled: Graph = cast(Any, standalone_compile)(
        traced,
        [*inputs, *held_tensors],
        dynamic_shapes="from_example_inputs",  # sizes are constants
        options={"config_patches": options},
    )

    graph = compiled
    if is_worth_capturing((*inputs, *held_tensors)):
        # Pass held tensors as inputs: a replaced tensor then leads to a new capture.
        graph = CapturedGraph(compiled, slice(*moving.indices(len(inputs))))
    return lambda *tensors: graph(*tensors, *held_tensors)


def layout(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return the part of a graph's inputs that the graph depends on."""
    return tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def computed_once(tensor: Tensor) -> Tensor:
    """Return a small tensor; a graph computes it once, not once per use."""
    # Otherwise Inductor recomputes it for every 16 elements of the tensor that it multiplies.
    return tensor.as_strided(tensor.shape, tensor.stride())


def lift_tensors(traced: GraphModule) -> list[Tensor]:
    """Turn the tensors that a traced function has captured into inputs; return them."""
    held_tensors = []
    first = next(node for node in traced.graph.nodes if node.op != "placeholder")
    for node in traced.graph.find_nodes(op="get_attr"):
        held_tensors.append(getattr(traced, node.target))
        with traced.graph.inserting_before(first):
            lifted = traced.graph.placeholder(f"held_{len(held_tensors)}")
        lifted.meta = node.meta
        node.replace_all_uses_with(lifted)
        # Inputs must precede all other nodes.
        if node is first:
            first = node.next
        traced.graph.erase_node(node)
    traced.recompile()
    return held_tensors
