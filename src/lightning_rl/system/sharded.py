"""Weights that a strategy shards over processes: its contract, and how to gather the weights."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


@runtime_checkable
class ShardingStrategy(Protocol):
    """A strategy of Lightning that shards the policy, such as `FSDP2Strategy`."""

    def shard(self, policy: Any, compile: bool | str) -> None:
        """Shard a policy over all processes, in place, and set its `sharding`.

        Raises:
            ConfigurationError: if the setting `compile` of the update is true.
        """


class PolicySharding(Protocol):
    """The shards of a policy."""

    def check(self, algorithm: nn.Module, objectives: Sequence[Any]) -> None:
        """Refuse an algorithm that trains parameters outside of the policy."""

    def acting_context(self) -> AbstractContextManager[None]:
        """Return a context in which ranks may act unequally often; all ranks enter it."""

    def copy(self, device: torch.device) -> nn.Module:
        """Return a copy of the policy that is not sharded; all ranks call this."""

    def update(self, *settings: Any) -> Any:
        """Return the update of an objective on the shards; arguments as in `Update`."""


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor [...] whole, gathered from all ranks; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard [...] of a tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of a module with whole tensors, on every rank."""
    state = module.state_dict()
    return {name: whole(x) if isinstance(x, Tensor) else x for name, x in state.items()}


def load_whole(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a state dict of whole tensors; a sharded module takes this rank's shards."""
    targets = module.state_dict()
    shards = {name: shard_like(targets.get(name), value) for name, value in state.items()}
    module.load_state_dict(shards, strict)


def shard_like(like: Any, value: Any) -> Any:
    """Return this rank's shard of a whole tensor, if `like` is a shard of its shape."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != like.shape:
        return value  # the caller reports the two shapes
    # No communication, because each rank has the whole tensor.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without FSDP's subclass."""
    classes = (cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    return cast(type[nn.Module], next(classes))
