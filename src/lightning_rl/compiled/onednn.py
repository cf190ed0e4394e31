"""Let oneDNN multiply the matrices of a compiled graph; `products.py` says where it does.

On AMD's CPUs with AVX-512, MKL keeps to AVX2. On such a one (Zen 5, one thread, float32) 512 x 64
by 64 x 64 takes 40 µs by MKL, 27 by oneDNN as torch enters it, of which 11 are the entry, and 18 as
`onednn.cpp` enters it.
"""

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_rl.system.torch_private import load_cpp

log = logging.getLogger(__name__)

aten = torch.ops.aten

SOURCE = Path(__file__).with_suffix(".cpp")
"""Of the operator `lightning_rl::product(Tensor a, Tensor b) -> Tensor`."""


@functools.cache
def load_operator() -> bool:
    """Compile and load the operator; tell whether that was possible.

    Inductor keeps what it has compiled, for the next process too.
    """
    try:
        load_cpp(SOURCE.read_text())
        torch.library.register_fake("lightning_rl::product", _product_of_fakes)
    except Exception as error:  # of whatever kind: everything works without it
        log.warning("Matrix products stay with MKL, which may be slower: %s", error)
        return False
    return True


def _product_of_fakes(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


PRODUCTS = (aten.addmm.default, aten.mm.default, aten.baddbmm.default, aten.bmm.default)

WIDE = 256
"""`kWide` of the operator."""


def route_products(traced: GraphModule) -> int:
    """Replace the float32 products of a graph on the CPU; return how many."""
    count = 0
    for node in list(traced.graph.nodes):
        if node.target in PRODUCTS and _is_worth_it(node):
            with traced.graph.inserting_before(node):
                product = traced.graph.call_function(
                    torch.ops.lightning_rl.product.default, node.args[-2:]
                )
                if len(node.args) == 3:  # a bias apart, so that it fuses with what follows
                    product = traced.graph.call_function(aten.add.Tensor, (product, node.args[0]))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            traced.graph.erase_node(node)
            count += 1
    traced.recompile()
    return count


def _is_worth_it(node: Node) -> bool:
    """Tell whether it is a @ b (+ bias) for float32 matrices on the CPU, and no vectors.

    Batches of matrices that want a library's blocking stay where they are.
    """
    nodes = [arg for arg in (node.args[0], *node.args[-2:]) if isinstance(arg, Node)]
    known = [value for arg in nodes if isinstance(value := arg.meta.get("val"), Tensor)]
    if node.kwargs or len(known) < 3:
        return False
    _, a, b = known
    on_cpu = a.dtype == torch.float32 and a.device.type == "cpu"
    sizes = [a.shape[-2], a.shape[-1], b.shape[-1]]
    return on_cpu and min(sizes) > 1 and (a.dim() == 2 or sorted(sizes)[1] <= WIDE)
