"""Compile a function of tensors to one graph, and call it with as little Python as that takes."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch._inductor import list_options, standalone_compile
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_rl.algorithms.cuda_graphs import CapturedGraph, captures
from lightning_rl.algorithms.products import route_products, routes_products
from lightning_rl.algorithms.reads import Reads

Graph = Callable[..., Sequence[Tensor]]

CPU_OPTIONS: dict[str, Any] = {"cpp_wrapper": True, "cpp.use_decompose_tanh": True}
"""Inductor's, where everything lies on the CPU: kernels that take microseconds are called from C++,
and tanh is made of an exponential, which is three times as fast and exact to float32's last place
around 1."""


def compile_graph(
    function: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    moving: slice = slice(0),
    reads: Reads | None = None,
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
            `reads.hold()`.

    Raises:
        Exception: of whatever kind, where tracing or compiling fails.
    """
    # Of copies: tracing runs the function, and it may write.
    copies = [tensor.detach().clone() for tensor in inputs]
    with nullcontext() if reads is None else reads.recorded():
        traced = make_fx(function)(*copies)
    held = _lift_tensors(traced)
    if reads is not None:
        for i, tensor in enumerate(held):
            reads.rebind(tensor, partial(held.__setitem__, i))
    options: dict[str, Any] = {"size_asserts": False}
    if all(tensor.device.type == "cpu" for tensor in (*inputs, *held)):
        options |= {key: value for key, value in CPU_OPTIONS.items() if key in list_options()}
        if routes_products():
            route_products(traced)
    compiled = standalone_compile(
        traced,
        [*inputs, *held],
        dynamic_shapes="from_example_inputs",
        options={"config_patches": options},
    )

    graph: Graph = compiled
    if captures((*inputs, *held)):
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
