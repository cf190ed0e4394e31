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
from lightning_rl.system.torch_private import list_options, standalone_compile, trace, version_of

T = TypeVar("T")

Graph = Callable[..., Sequence[Tensor]]

Function = Callable[..., list[Tensor]]
"""The function that a graph computes."""

Make = Callable[[], tuple[Function, dict[str, None]]]
"""Returns the function of a graph, and a dict of names that the function fills when traced."""

MOST_GRAPHS = 8
"""Most graphs per input layout; more graphs mean that an attribute changes at each call."""

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
    ) -> None:
        self.available = True
        self._choice = choice or CompileDecision(True, None)
        self._left_out = {*left_out, *((id(root), name) for name in hidden)}
        self._hidden = hidden
        self._cure_of_draws = cure_of_draws
        self.captured = False
        self.have_served = False
        self._root = root
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
            if self.have_served:
                raise
            why = f"{(str(error).strip() or 'failed').splitlines()[0]} ({type(error).__name__})"
            if place_of is not None:
                why = f"{place_of(error)}: {why}"
            self._choice.give_up(
                why,
                f"compile: true has no effect, {self._choice.subject} uncompiled: {why}. Compiling "
                "needs a C++ compiler on a CPU (g++, or the variable CXX), Triton on a GPU, and "
                f"{self._choice.traced} in which no Python decision depends on the values of "
                "tensors.",
            )
        self.available = False
        return None

    def give_up(self, why: str) -> None:
        if self.available:
            self._choice.give_up(
                why, f"From now on {self._choice.subject} uncompiled, because {why}."
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
        found = self._current_attributes()
        known = self._compiled.setdefault(key, [])
        for compiled in known:
            if compiled.holds(found):
                return compiled
        changed = set(known[0].changes(found)) if known else set()
        loose, trace = self._trace_without_constants(make, inputs, changed - self._constant)
        if changed and changed <= loose and not trace.uses_numbers(loose):
            known[0].ignore(loose)  # the graph does not read the changed attributes
            return self.prepare(key, make, inputs, moving)
        if len(known) >= MOST_GRAPHS:
            names = sorted({one.label for path, one in found.items() if path in changed})
            raise NoGraphError(
                f"the value of {', '.join(names) or 'a tensor, read as a number,'} changes at each "
                f"call, and the graph depends on it ({MOST_GRAPHS} graphs were made). Make it a "
                "tensor, or a plain number that the loss uses in calculations only"
            )
        self._varying |= loose & trace.numbers.keys()
        graph = compile_graph(trace.traced, trace.held, inputs, moving)
        self.captured |= is_worth_capturing(inputs)
        # Move this graph to the front: the next call will probably need it.
        known.insert(0, _Compiled(graph, trace, found, loose))
        return known[0]

    def recheck(self) -> None:
        self._is_fresh = False

    def _current_attributes(self) -> dict[str, Attribute]:
        last = self._snapshot
        is_current = self._is_fresh and last is not None and last.root_is_current()
        if last is None or not (is_current or last.refresh()):
            last = self._snapshot = Snapshot(self._root, self._left_out)
        self._is_fresh = True
        return last.found

    def _trace_without_constants(
        self, make: Make, inputs: list[Tensor], loose: set[str]
    ) -> tuple[set[str], "_Trace"]:
        """Trace without constants for changed attributes; return these attributes, and the trace.

        A changed number becomes a tensor; other changed attributes are removed while tracing. If
        tracing then fails, the attribute stays a constant, and each of its values has its own
        graph.
        """
        try:
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
        found = self._current_attributes()
        here = {path: found[path] for path in (*self._varying, *loose) if path in found}
        numbers = {
            # float32, so that the number does not promote a tensor's dtype.
            path: torch.tensor(float(one.value), dtype=torch.float32, device=self._device)
            for path, one in here.items()
            if one.is_number()
        }
        absent = dict.fromkeys(loose & here.keys() - numbers.keys(), MISSING)
        for path in absent:
            if not isinstance(found[path].holder, MutableMapping):
                raise RuntimeError(f"{found[path].label} belongs to a class")
        own = vars(self._root)
        values = [(found[p].holder, found[p].name, v) for p, v in (numbers | absent).items()]
        values += [(own, name, _Hidden(name)) for name in self._hidden if name in own]
        function, noted = make()
        # Restore buffers, which tracing may change.
        kept = [(buffer, buffer.clone()) for buffer in self._root.buffers()]
        copies = [tensor.detach().clone() for tensor in inputs]
        try:
            with replaced(values), TensorReadRecorder() as reads:
                traced = trace(function, *copies)
        finally:
            for buffer, value in kept:
                buffer.copy_(value)
        for tensor, _, _ in reads.found:
            if any(tensor is number for number in numbers.values()):
                raise RuntimeError("a Python decision depends on the number")
        for node in traced.graph.nodes if self._cure_of_draws else ():
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise NoGraphError(
                    f"random numbers are drawn by {node.target}: {self._cure_of_draws}"
                )
        return _Trace(traced, lift_tensors(traced), numbers, reads.found, noted)


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
        held = {id(tensor) for tensor in self.held}
        return any(id(self.numbers[path]) in held for path in paths & self.numbers.keys())


class _Compiled:
    """A graph, the attributes `found` at compile time, and those that it does not read."""

    def __init__(
        self, graph: Graph, trace: _Trace, found: dict[str, Attribute], unread: set[str]
    ) -> None:
        self._held, self._numbers, self._reads = trace.held, trace.numbers, trace.reads
        self.noted = trace.noted
        self.graph = graph
        self._found = self._checked = found
        self._unread = set(unread)
        index = {id(tensor): i for i, tensor in enumerate(self._held)}
        index |= {id(tensor): -1 for tensor, _, _ in self._reads}
        self._places = {p: index[id(a.value)] for p, a in found.items() if id(a.value) in index}

    def holds(self, found: dict[str, Attribute]) -> bool:
        for tensor, version, value in self._reads:
            if version_of(tensor) != version and tensor.item() != value:
                return False
        if found is self._checked:
            return True
        if any(True for _ in self.changes(found)):
            return False
        for path, tensor in self._numbers.items():
            if path in found:
                tensor.fill_(found[path].value)
        for path, i in self._places.items():
            if i >= 0 and path not in self._unread:
                self._held[i] = found[path].value
        self._checked = found
        return True

    def changes(self, found: dict[str, Attribute]) -> Iterator[str]:
        for path in {**self._found, **found}:
            if path in self._unread or self._found.get(path) is found.get(path):
                continue
            if path in self._numbers and path in found and found[path].is_number():
                continue
            both = self._found.get(path), found.get(path)
            old, new = (MISSING if one is None else one.value for one in both)
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
    held: list[Tensor],
    inputs: Sequence[Tensor],
    moving: slice = slice(0),
) -> Graph:
    """Compile a traced function that takes tensors and returns a list of tensors.

    The graph reads the tensors in `held` (see `lift_tensors`) at each call, after its inputs.
    Nothing checks that inputs have the same `layout` and order. On a GPU small graphs are replayed
    as CUDA graphs; `moving` are read-only inputs whose address changes.
    """
    # `torch.compile` checks every input before each call, 30 to 50 µs for a graph of 100 µs.
    # Inductor's asserts take a sixth of a small graph's time. The key of each graph has the
    # `layout` already.
    options: dict[str, Any] = {"size_asserts": False}
    if all(tensor.device.type == "cpu" for tensor in (*inputs, *held)):
        options |= {key: value for key, value in CPU_OPTIONS.items() if key in list_options()}
    # mypy sometimes takes the module of the same name.
    compiled: Graph = cast(Any, standalone_compile)(
        traced,
        [*inputs, *held],
        dynamic_shapes="from_example_inputs",  # sizes are constants
        options={"config_patches": options},
    )

    graph = compiled
    if is_worth_capturing((*inputs, *held)):
        # Pass held tensors as inputs: a replaced tensor then leads to a new capture.
        graph = CapturedGraph(compiled, slice(*moving.indices(len(inputs))))
    return lambda *tensors: graph(*tensors, *held)


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
