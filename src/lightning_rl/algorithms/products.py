"""Let oneDNN multiply the large matrices of a compiled graph, where it is faster than MKL.

On AMD's CPUs with AVX-512, MKL keeps to AVX2. Measured on such a one, one thread, float32 products
of 2,048 x 128 by 128 x 128: 110 GFLOP/s by MKL, 246 by oneDNN, with the same bits; small ones are
faster by MKL.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten

LEAST_WORK, LEAST_WORK_OVER_SAMPLES = 2**22, 2**24
"""Multiplications from which on it pays; where the sum goes over the samples, as for the gradient
of weights, there is a transpose to make."""

_library = torch.library.Library("lightning_rl", "FRAGMENT")
_library.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor")


@torch.library.impl(_library, "product", "CPU")
def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise.default
    return linear(a, b.t(), bias, "none", [], "")  # type: ignore[no-any-return]  # torch.ops


@torch.library.register_fake("lightning_rl::product")
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def onednn_is_faster() -> bool:
    """Tell whether this is a CPU on which it pays."""
    if not torch.backends.mkldnn.is_available():
        return False
    about = torch.cpu.get_capabilities()
    return "AMD" in str(about.get("cpu_name")) and bool(about.get("avx512_f"))


def route_products(traced: GraphModule) -> int:
    """Replace the large float32 products of a graph on the CPU; return how many."""
    count = 0
    for node in list(traced.graph.nodes):
        if node.target in (aten.addmm.default, aten.mm.default) and _is_large(node):
            bias = node.args[0] if node.target is aten.addmm.default else None
            with traced.graph.inserting_before(node):
                product = traced.graph.call_function(
                    torch.ops.lightning_rl.product.default, (*node.args[-2:], bias)
                )
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            traced.graph.erase_node(node)
            count += 1
    traced.recompile()
    return count


def _is_large(node: Node) -> bool:
    """Tell whether a product a @ b (+ bias) is one that oneDNN is faster at."""
    nodes = [arg for arg in (node.args[0], *node.args[-2:]) if isinstance(arg, Node)]
    known = [value for arg in nodes if isinstance(value := arg.meta.get("val"), Tensor)]
    if node.kwargs or len(known) < 3:
        return False
    bias, a, b = known
    if a.dtype != torch.float32 or a.device.type != "cpu":
        return False
    if node.target is aten.addmm.default and tuple(bias.shape) != (b.shape[1],):
        return False
    (rows, inner), columns = a.shape, b.shape[1]
    least = LEAST_WORK if rows >= inner else LEAST_WORK_OVER_SAMPLES
    return bool(rows * inner * columns >= least)
