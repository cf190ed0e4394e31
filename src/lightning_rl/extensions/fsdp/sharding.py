"""Shard a policy over processes, block by block (FSDP2), and act with it.

A forward pass gathers the blocks from all processes, so all processes must call a sharded policy
equally often.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from types import MethodType
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_rl import Policy
from lightning_rl.extend import ranks
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.errors import closest, require
from lightning_rl.extend.rollout import allocate_rollout
from lightning_rl.extensions.fsdp.update import ShardedUpdate

Acting = Literal["whole", "sharded"]
"""How a sharded policy acts; see `FSDP2Strategy`."""

READ = ("observation", "state")
"""The inputs of a policy's `forward`."""


class Sharding:
    """The shards of a policy; `FSDP2Strategy.shard` makes it.

    All ranks take the weights of rank 0; the policies of other ranks may be on the device `meta`.

    Args:
        policy: is sharded in place, by its `blocks`. Parameters outside of blocks are gathered for
            a whole forward pass. Gathered blocks compute in `autocast_dtype`, gradients are summed
            in float32, and parameters outside of blocks keep their dtype.
        mesh: the processes.
        acting: see `FSDP2Strategy`.

    Raises:
        ConfigurationError: for a policy without blocks, a pattern without a match, a memory, or
            parameters that cannot be sharded.
    """

    def __init__(self, policy: Policy, mesh: DeviceMesh, acting: Acting = "whole") -> None:
        _check_parameters(policy)
        blocks = _blocks(policy, policy.blocks)
        self.policy, self.acting = policy, acting
        # FSDP refuses copies: this copy has no memory for its tensors.
        self._empty = copy.deepcopy(policy, {id(t): _empty_like(t) for _, t in _tensors(policy)})
        # Only the first rank's weights count: read them before sharding replaces the tensors.
        values = dict(_tensors(policy)) if mesh.get_rank() == 0 else {}
        values = {name: tensor.detach() for name, tensor in values.items()}
        precision = MixedPrecisionPolicy(policy.autocast_dtype, reduce_dtype=torch.float32)
        memo: dict[int, tuple[Tensor, Tensor]] = {}
        for block in blocks:
            _allocate(block, mesh.device_type, memo)
            fully_shard(block, mesh=mesh, mp_policy=precision)
        _allocate(policy, mesh.device_type, memo)
        # By default FSDP keeps the other parameters gathered after a pass without gradients.
        fully_shard(policy, mesh=mesh, reshard_after_forward=True)
        for name in _methods_with_parameters(policy):
            _register(policy, name)
        self._modules = [m for m in policy.modules() if isinstance(m, FSDPModule)]
        _fill(policy, values, mesh)

    def synchronize_gradients(self, synchronize: bool) -> None:
        """Set whether the next backward pass sums gradients over ranks."""
        cast(FSDPModule, self.policy).set_requires_gradient_sync(synchronize)

    def check(self, algorithm: nn.Module, objectives: Sequence[Objective]) -> None:
        """Refuse an algorithm with trained parameters outside of the sharded policy.

        Raises:
            ConfigurationError: for such parameters, or several objectives.
        """
        kind = type(algorithm).__name__
        trained = {name: p for name, p in algorithm.named_parameters() if p.requires_grad}
        names = [name for name, p in trained.items() if not isinstance(p, DTensor)]
        cure = "Use --trainer.strategy ddp."
        require(
            len(objectives) == 1,
            f"trainer.strategy fsdp trains one objective, but {kind} has "
            f"{[objective.name for objective in objectives]}. {cure}",
        )
        require(
            not names,
            f"trainer.strategy fsdp shards the policy, but {kind} also trains "
            f"{', '.join(names[:6])}. {cure}",
        )
        (objective,) = objectives
        require(
            len(objective.parameters) == len(trained),
            "trainer.strategy fsdp trains all parameters of the policy together, but the objective "
            f"of {kind} has {len(objective.parameters)} of {len(trained)}. Freeze the other "
            f"parameters. {cure}",
        )

    def update(self, *settings: Any) -> ShardedUpdate:
        """Return the update of an objective with all parameters; arguments as in `Update`."""
        return ShardedUpdate(self.synchronize_gradients, *settings)

    def acting_context(self) -> AbstractContextManager[None]:
        """Return a context in which ranks may act unequally often; all ranks enter it."""
        return self._whole() if self.acting == "whole" else self._in_step()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        for module in self._modules:
            # Keep the blocks gathered, so that ranks may act without waiting for each other.
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()
                module.set_reshard_after_forward(True, recurse=False)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        last_inputs = [self._zeros()]

        def announce(policy: nn.Module, args: tuple[Any, ...]) -> None:
            last_inputs[0] = args[0].select(*READ, strict=False)  # acting writes into the rollout
            ranks.sum_over_ranks(torch.ones(()))

        hook = self.policy.register_forward_pre_hook(announce, prepend=True)
        try:
            yield
        finally:
            hook.remove()
        # A forward pass gathers from all ranks: a rank that is done repeats its last input for
        # others.
        while ranks.sum_over_ranks(torch.zeros(())):
            with torch.no_grad():
                self.policy(last_inputs[0].copy(), deterministic=True)

    def _zeros(self) -> TensorDict:
        policy = cast(Any, self.policy)
        spaces = policy.observation_space, policy.action_space
        fields = {"extra_fields": policy.extra_fields, "device": policy.version.device}
        return allocate_rollout(*spaces, 1, 1, **fields)[:, 0].select(*READ, strict=False)

    def copy(self, device: torch.device) -> nn.Module:
        """Return a copy of the policy that is not sharded; all ranks call this."""
        empty = dict(_tensors(self._empty))
        memo: dict[int, Any] = {}
        for name, tensor in _tensors(self.policy):
            # A tensor that is not sharded comes back as itself: copy, or both policies share
            # memory.
            gathered = tensor.detach()
            if isinstance(gathered, DTensor):
                gathered = gathered.full_tensor()
            gathered = gathered.to(device, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            replacement = nn.Parameter(gathered, tensor.requires_grad) if is_parameter else gathered
            memo[id(empty[name])] = replacement
        return copy.deepcopy(self._empty, memo)


def _methods_with_parameters(policy: Policy) -> list[str]:
    """Return the methods besides `forward` that use parameters; they return a TensorDict."""
    methods = ["get_value", "evaluate_actions"]
    if type(policy).clone_loss is not Policy.clone_loss:  # that calls `evaluate_actions`
        methods.append("clone_loss")
    return methods


def _blocks(policy: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    kind = type(policy).__name__
    require(
        bool(patterns),
        f"trainer.strategy fsdp shards a policy by its blocks, but {kind} has none: name them in "
        "its attribute blocks, patterns such as 'model.layers.*', or use --trainer.strategy ddp. "
        "(A VLA's blocks are the modules in its nn.ModuleLists.)",
    )
    names = [name for name, module in policy.named_modules() if name]
    block_names: list[str] = []
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        require(
            bool(matching),
            f"The block '{pattern}' of {kind} matches no module{closest(pattern, names)}.",
        )
        block_names += matching
    # A matching module within another matching module is sharded together with it.
    parents = tuple(f"{name}." for name in block_names)
    outer = [name for name in block_names if not name.startswith(parents)]
    modules = [policy.get_submodule(name) for name in dict.fromkeys(outer)]
    for name, module in zip(outer, modules, strict=False):
        require(
            type(module).forward is not nn.Module.forward,
            f"The block '{name}' of {kind} is a {type(module).__name__}, which has no forward: "
            f"use the pattern '{name}.*' for the modules in it.",
        )
    return modules


def _check_parameters(policy: Any) -> None:
    kind = type(policy).__name__
    require(
        not policy.is_recurrent,
        f"trainer.strategy fsdp does not support a memory, which {kind} has: use "
        "--trainer.strategy ddp, or remove the memory.",
    )
    single = [name for name, p in policy.named_parameters() if p.dim() == 0]
    require(
        not single,
        f"{kind} has the parameter {single[0] if single else ''}, a single number, which cannot be "
        "sharded: give it the shape [1].",
    )
    dtypes = {str(p.dtype).removeprefix("torch.") for p in policy.parameters() if p.requires_grad}
    require(
        len(dtypes) <= 1,
        f"trainer.strategy fsdp trains parameters of one dtype, but {kind} has "
        f"{' and '.join(sorted(dtypes))}: load the weights as float32, and compute in bfloat16 by "
        "--trainer.precision bf16-mixed.",
    )


def _register(policy: nn.Module, name: str) -> None:
    method, wrapped_name = getattr(policy, name), f"_{name}_and_tensors"

    def with_tensors(self: nn.Module, td: TensorDict) -> tuple[TensorDict, list[Tensor]]:
        output = method(td)
        # FSDP finds the tensors that begin a backward pass in lists, not in a TensorDict. Copy,
        # because FSDP warns of views.
        trained = {k: v.clone() for k, v in output.items() if getattr(v, "requires_grad", False)}
        return output.update(trained), list(trained.values())

    setattr(policy, wrapped_name, MethodType(with_tensors, policy))
    register_fsdp_forward_method(policy, wrapped_name)
    setattr(policy, name, lambda td: getattr(policy, wrapped_name)(td)[0])


def _allocate(module: nn.Module, device: str, memo: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Allocate the tensors on `meta`; `memo` keeps shared tensors shared, unlike `to_empty`."""
    for part in module.modules():
        tensors = (part.named_parameters("", False, False), part.named_buffers("", False, False))
        for name, tensor in list(chain(*tensors)):
            if tensor.is_meta:
                allocated = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    allocated = nn.Parameter(allocated, tensor.requires_grad)
                setattr(part, name, memo.setdefault(id(tensor), (tensor, allocated))[1])


def _fill(policy: nn.Module, values: dict[str, Tensor], mesh: DeviceMesh) -> None:
    on_meta = [name for name, value in values.items() if value.is_meta]
    require(
        not on_meta,
        f"{', '.join(on_meta[:3])} of the policy are on the device meta in the first process, "
        "whose weights all others copy: create the policy on meta in the other processes only.",
    )
    with torch.no_grad():
        for name, target in _tensors(policy):
            value = values.pop(name, None)
            if isinstance(target, DTensor):
                source = torch.empty(target.shape, dtype=target.dtype) if value is None else value
                source = source.to(target.device)
                target.copy_(distribute_tensor(source, mesh, target.placements))
            else:
                first = ranks.gather_over_ranks(None if value is None else value.cpu())[0]
                assert first is not None
                target.copy_(first)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
