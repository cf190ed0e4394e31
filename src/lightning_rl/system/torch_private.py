"""The only file with internals of torch (tried with 2.13.0); a test checks the imports."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import _foreach_copy_ as copy_all
from torch._guards import TracingContext, tracing
from torch._inductor import list_options, standalone_compile
from torch._subclasses import FakeTensorMode
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.utils import _device as devices
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "MODULE_INTERNALS",
    "READ_NUMBER",
    "TorchDispatchMode",
    "call_with",
    "copy_all",
    "devices",
    "flatten",
    "has_forward_hooks",
    "has_gradient_hooks",
    "has_step_hooks",
    "list_options",
    "non_persistent_buffers_of",
    "standalone_compile",
    "trace",
    "unflatten",
    "version_of",
]

READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""Operation by which Python reads the value of a tensor."""

MODULE_INTERNALS = (frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}) - {"training"}
"""Attributes that `nn.Module` reads at each call."""


def trace(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """Return the operations of a function of tensors as a graph."""
    # This context halves the time: otherwise each operation makes a fake mode, which records the
    # stack.
    with tracing(TracingContext(FakeTensorMode())):
        return make_fx(function)(*inputs)


class _OwnedFunction(torch.nn.Module):
    def __init__(self, owner: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.owner, self.forward = owner, function


def call_with(
    owner: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    function: Callable[..., Any],
    *inputs: Any,
) -> Any:
    """Call a function of a module with other parameters and buffers, by their first names."""
    # By itself, `functional_call` swaps the tensors of a part that has two names twice, and leaves
    # the other tensors in it.
    first_names = chain(owner.named_parameters(), owner.named_buffers())
    replacements = {id(tensor): tensors[name] for name, tensor in first_names if name in tensors}
    places = {
        f"{path}.{name}": replacements[id(tensor)]
        for path, part in owner.named_modules(prefix="owner")
        for name, tensor in chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        )
        if id(tensor) in replacements
    }
    module = _OwnedFunction(owner, function)
    return functional_call(module, places, inputs, tie_weights=False)


def has_forward_hooks(module: Any) -> bool:
    """Return whether a module has hooks around its `forward`, as `weight_norm` adds."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a leaf tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has hooks around its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def version_of(tensor: torch.Tensor) -> int:
    """Return a counter that every write into a tensor's storage increases."""
    return tensor._version


def non_persistent_buffers_of(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's own non-persistent buffers, sorted."""
    return sorted(module._non_persistent_buffers_set)
