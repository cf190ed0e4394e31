"""All that is used of torch beyond its documented interface; nothing else imports such names.

Tried with torch 2.13.0. A test goes through the imports below, and fails by the name of what
another version lacks. Without `torch._inductor` nothing is compiled; the rest is needed.
"""

import torch
from torch import _foreach_copy_ as copy_all
from torch._inductor import list_options, standalone_compile
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "EXPORTERS",
    "MODULE_INTERNALS",
    "READ_NUMBER",
    "TorchDispatchMode",
    "copy_all",
    "flatten",
    "list_options",
    "make_fx",
    "non_persistent_buffers_of",
    "standalone_compile",
    "step_is_listened_to",
    "unflatten",
    "version_of",
]

READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operation by which Python gets the value of a tensor."""

EXPORTERS = (
    "torch.onnx._internal.exporter._registration",
    "onnxscript.optimizer._constant_folding",
)
"""Log lines on operations of torchvision where that is not installed, and on constants that stay as
they are, which nobody has asked for."""

MODULE_INTERNALS = (frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}) - {"training"}
"""What `nn.Module` reads of itself at each call."""


def step_is_listened_to(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer has hooks around its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that every write into a tensor's storage raises."""
    return tensor._version


def non_persistent_buffers_of(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's own buffers that its `state_dict` leaves out, sorted."""
    return sorted(module._non_persistent_buffers_set)
