"""Compile functions of tensors to graphs, and call them with as little Python as that takes."""

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from lightning_rl.compiled.attributes import (
    MISSING,
    Attribute,
    NotesTensorReads,
    Place,
    Snapshot,
    replaced,
    same,
)
from lightning_rl.compiled.choice import Choice
from lightning_rl.compiled.cuda_graphs import CapturedGraph, is_worth_capturing
from lightning_rl.system.torch_private import list_options, make_fx, standalone_compile, version_of

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

    The attributes of the algorithm, and of all that it holds, may change: they are compared once an
    iteration, the algorithm's own before each call. What is no longer right is compiled again. A
    number that changes, such as an annealed coefficient, becomes an input of its graph, so that
    this happens once. An attribute without which a function can be traced is not looked at again.

    Args:
        root: the algorithm.
        device: where it computes.
        choice: of the run, which hears where graphs are not to be had.
        left_out: attributes that are not compared: constant, or set by the functions themselves.
        hidden: attributes of the algorithm that are not compared, and may not be read.
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
        left_out: Collection[Place] = (),
        hidden: Collection[str] = (),
        cure_of_draws: str = "",
    ) -> None:
        self.available = True
        self._choice = choice or Choice(True, None)
        self._left_out = {*left_out, *((id(root), name) for name in hidden)}
        self._hidden = hidden
        self._cure_of_draws = cure_of_draws
        self.captured = False
        self.have_served = False
        self._root = root
        self._device = device
        self._compiled: dict[tuple[Any, ...], list[_Compiled]] = {}
        self._snapshot: Snapshot | None = None
        self._is_fresh = False  # whether it is of this iteration
        self._varying: set[str] = set()  # numbers that are inputs
        self._constant: set[str] = set()  # attributes that no input can stand for

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
            NoGraphError: where it would compile without end, or draws random numbers.
        """
        compiled = self.prepare(key, make, inputs, moving)
        return compiled.graph(*inputs)[0], compiled.noted

    def prepare(
        self, key: tuple[Any, ...], make: Make, inputs: list[Tensor], moving: slice
    ) -> "_Compiled":
        """Return the graph that is right for what its function would read now; see `call`."""
        found = self._look()
        known = self._compiled.setdefault(key, [])
        for compiled in known:
            if compiled.holds(found):
                return compiled
        changed = set(known[0].changes(found)) if known else set()
        loose, trace = self._loosen(make, inputs, changed - self._constant)
        if changed and changed <= loose and not trace.uses_numbers(loose):
            known[0].ignore(loose)  # it reads none of what has changed
            return self.prepare(key, make, inputs, moving)
        if len(known) >= MOST_GRAPHS:
            names = sorted({one.label for path, one in found.items() if path in changed})
            raise NoGraphError(
                f"what it reads of {', '.join(names) or 'a tensor, as a number,'} is another value "
                f"at each call, and the graph depends on it ({MOST_GRAPHS} graphs were made). Make "
                "it a tensor or a plain number that the loss only calculates with"
            )
        self._varying |= loose & trace.numbers.keys()
        graph = compile_graph(trace.traced, trace.held, inputs, moving)
        self.captured |= is_worth_capturing(inputs)
        # First, as the next call most likely wants this one again.
        known.insert(0, _Compiled(graph, trace, found, loose))
        return known[0]

    def look_again(self) -> None:
        """Compare all attributes before the next call, since a new iteration begins."""
        self._is_fresh = False

    def _look(self) -> dict[str, Attribute]:
        """Return the attributes as they are; the same dict where nothing has changed."""
        last = self._snapshot
        if last is None or not (last.root_is_current() if self._is_fresh else last.is_current()):
            last = self._snapshot = Snapshot(self._root, self._left_out)
        self._is_fresh = True
        return last.found

    def _loosen(
        self, make: Make, inputs: list[Tensor], loose: set[str]
    ) -> tuple[set[str], "_Trace"]:
        """Trace without what has changed; return what the trace does without, and the trace.

        A number becomes a tensor, anything else is taken away. Where the trace then fails, an
        attribute is a constant: a loss decides by it, say, and each value has its own graph.
        """
        try:
            return loose, self._trace(make, inputs, loose)
        except Exception:
            if not loose:
                raise
        if len(loose) == 1:
            self._constant |= loose
            return self._loosen(make, inputs, set())
        for path in loose:
            self._loosen(make, inputs, {path})
        if not loose & self._constant:  # each can be missing, but not all of them together
            self._constant |= loose
        return self._loosen(make, inputs, loose - self._constant)

    def _trace(self, make: Make, inputs: list[Tensor], loose: set[str]) -> "_Trace":
        found = self._look()
        here = {path: found[path] for path in (*self._varying, *loose) if path in found}
        numbers = {
            # Of float32, since a plain number widens no tensor either.
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
        # Tracing runs the function, which may move running statistics: the graph is to move them.
        kept = [(buffer, buffer.clone()) for buffer in self._root.buffers()]
        copies = [tensor.detach().clone() for tensor in inputs]
        try:
            with replaced(values), NotesTensorReads() as reads:
                traced = make_fx(function)(*copies)
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
    """There can be no graph; the message says why."""


class _Hidden:
    """Stands for an attribute of which a graph could not tell that it changes."""

    name: str

    def __init__(self, name: str) -> None:
        vars(self)["name"] = name

    def _refuse(self, *args: Any) -> NoReturn:
        told = ".".join([self.name.lstrip("_"), *(arg for arg in args if isinstance(arg, str))])
        raise NoGraphError(
            f"it reads {told}, whose value would be compiled in: set an attribute from it in "
            "training_step, and read that"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse


class _Trace(NamedTuple):
    """What tracing a function gave: operations, and the tensors that they hold.

    Attributes:
        numbers: the tensors that stand for attributes, by path.
        reads: tensors whose value was read, with their version and value.
        noted: the names that the function has noted.
    """

    traced: GraphModule
    held: list[Tensor]
    numbers: dict[str, Tensor]
    reads: list[tuple[Tensor, int, Any]]
    noted: dict[str, None]

    def uses_numbers(self, paths: set[str]) -> bool:
        """Tell whether an operation takes one of these numbers."""
        held = {id(tensor) for tensor in self.held}
        return any(id(self.numbers[path]) in held for path in paths & self.numbers.keys())


class _Compiled:
    """A graph, and the attributes that it is right for.

    Args:
        graph: takes what it holds from `trace.held`.
        trace: what it was made of.
        found: the attributes that it was made with.
        unread: those of them that it does not read.
    """

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
        """Tell whether the graph is right for these attributes; take up tensors and numbers."""
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
        """Yield the paths of attributes that are another value than the graph was made with."""
        for path in {**self._found, **found}:
            if path in self._unread:
                continue
            if path in self._numbers and path in found and found[path].is_number():
                continue
            both = self._found.get(path), found.get(path)
            old, new = (MISSING if one is None else one.value for one in both)
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                # Where another tensor of the same layout lies, a graph that holds it takes that.
                i = self._places.get(path)
                fits = i is None or (i >= 0 and _layout(old) == _layout(new))
                if not fits and old is not new:
                    yield path
            elif not same(old, new):
                yield path

    def ignore(self, paths: set[str]) -> None:
        """Never look at these attributes again."""
        self._unread |= paths


def compile_graph(
    traced: GraphModule,
    held: list[Tensor],
    inputs: Sequence[Tensor],
    moving: slice = slice(0),
) -> Graph:
    """Compile what was traced of a function that takes tensors and returns a list of tensors.

    The graph takes inputs of the same layout (`layout`), in the same order; nothing checks that,
    since Inductor's asserts take a sixth of a small graph's time.

    `torch.compile` would do, but looks at every input before each call: 30 to 50 µs for a graph
    that itself takes 100. On a GPU small graphs are replayed as CUDA graphs.

    Args:
        traced: tensor operations.
        held: what the graph takes behind its inputs, see `lift_tensors`; it may be replaced.
        inputs: to compile it with.
        moving: which of them, only read, lie elsewhere at each call.

    Raises:
        Exception: of whatever kind, where compiling fails.
    """
    # `layout` is in the key of each graph: Inductor's asserts would ask the same again.
    options: dict[str, Any] = {"size_asserts": False}
    if all(tensor.device.type == "cpu" for tensor in (*inputs, *held)):
        options |= {key: value for key, value in CPU_OPTIONS.items() if key in list_options()}
    # mypy sometimes takes it for the module of that name.
    compiled: Graph = cast(Any, standalone_compile)(
        traced,
        [*inputs, *held],
        dynamic_shapes="from_example_inputs",  # their sizes are constants of the code
        options={"config_patches": options},
    )

    graph = compiled
    if is_worth_capturing((*inputs, *held)):
        # What is held is among its inputs: it begins again where another tensor takes its place.
        graph = CapturedGraph(compiled, slice(*moving.indices(len(inputs))))
    return lambda *tensors: graph(*tensors, *held)


def layout(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return what a graph depends on of its inputs."""
    return tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def computed_once(tensor: Tensor) -> Tensor:
    """Return a small tensor as it is; in a graph it is computed once and not once for each use.

    Inductor would compute it anew for every 16 elements of what it is combined with.
    """
    return tensor.as_strided(tensor.shape, tensor.stride())


def lift_tensors(traced: GraphModule) -> list[Tensor]:
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
