"""Trace what a policy does into one graph of tensors, with all that belongs to acting inside."""

import copy
import logging
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rl.deploy.acting import executed_tensors, leaves_of
from lightning_rl.policies import CustomVLA, Policy, PolicyWrapper, VLAPolicy
from lightning_rl.policies.base import first_state
from lightning_rl.rollout.contract import space_spec
from lightning_rl.rollout.structured_actions import StructuredActions
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.torch_private import EXPORTERS

OBSERVATION, ACTION, STATE, NEXT_STATE = "observation", "action", "state", "next_state"
"""Names of inputs and outputs; those of a Dict have the keys behind them: `observation.rgb`."""


class Port(NamedTuple):
    """An input or an output of a graph: [B, *shape].

    Attributes:
        name: of it.
        shape: of one row.
        dtype: of its numbers.
        space: whose element a row is; None of a state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    space: gymnasium.Space[Any] | None


class Ports(NamedTuple):
    """What goes into a graph, and what comes out.

    Attributes:
        inputs: of the observation, and `state` of a policy with a memory: zeros where an episode
            begins.
        outputs: `action`, or a part of it each where it has parts, and `next_state`.
    """

    inputs: list[Port]
    outputs: list[Port]


def ports_of(policy: Policy) -> Ports:
    """Return what a policy needs to act by the mode, and what it gives.

    Without what critics alone read, and of its state without the noise that only drawn actions
    have.
    """
    leaves = leaves_of(policy.acting_space, OBSERVATION)
    inputs = [Port(name, *space_spec(space), space) for name, space in leaves.items()]
    outputs = list(_action_ports(policy.action_space))
    if policy.remembers:
        (size, *more), dtype = policy.extra_fields["state"]
        noise = getattr(getattr(unwrapped(policy), "distribution", None), "state_size", 0)
        inputs.append(Port(STATE, (size - noise, *more), dtype, None))
        outputs.append(Port(NEXT_STATE, (size - noise, *more), dtype, None))
    return Ports(inputs, outputs)


class ActingGraph(nn.Module):
    """The mode of a policy's actions as a function of tensors: what an env gives, what it takes.

    Normalisation, unscaling and clipping are inside.

    Args:
        policy: is copied, without its critics.
        ports: of it.
    """

    def __init__(self, policy: Policy, ports: Ports) -> None:
        super().__init__()
        self.policy = _acting_alone(policy).cpu()
        self.ports = ports
        self._observed_space = policy.acting_space

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs [B, ...] by name, of the inputs [B, ...] by name."""
        rows = inputs[self.ports.inputs[0].name].shape[0]
        observation = _observed(self._observed_space, inputs, OBSERVATION, rows)
        td = TensorDict({OBSERVATION: observation}, [rows])
        for key, zeros in first_state(self.policy, 1).items():
            whole = zeros.expand(rows, *zeros.shape[1:])
            if STATE in inputs:
                before = inputs[STATE]
                noise = whole[:, before.shape[1] :]
                whole = torch.cat((before, noise), 1) if noise.shape[1] else before
            td.set(key, whole)
        result = self.policy(td, deterministic=True)
        outputs = dict(_parts(executed_tensors(self.policy.action_space, result[ACTION]), ACTION))
        if STATE in inputs:
            outputs[NEXT_STATE] = result[NEXT_STATE][:, : inputs[STATE].shape[1]]
        return outputs

    def examples(self, rows: int = 2) -> dict[str, Tensor]:
        """Return inputs [B, ...] of zeros; of a mask, of ones."""
        make = {True: torch.ones, False: torch.zeros}
        return {
            port.name: make[port.name.endswith("action_mask")](
                (rows, *port.shape), dtype=port.dtype
            )
            for port in self.ports.inputs
        }


def unwrapped(policy: Policy) -> Policy:
    """Return the policy inside of wrappers."""
    while isinstance(policy, PolicyWrapper):
        policy = policy.inner
    return policy


def why_not_traced(policy: Policy) -> str | None:
    """Say why there is no graph of a policy, or return None."""
    kind = type(unwrapped(policy))
    if issubclass(kind, VLAPolicy | CustomVLA):
        return (
            f"A {kind.__name__} is not traced into one graph: its model has code of its "
            "own, and is larger than an ONNX file may be. Export it with --format safetensors, "
            "which load_policy reads, and which writes an adapter as peft does."
        )
    return None


def traced(graph: ActingGraph) -> ExportedProgram:
    """Trace a graph, for any number of rows.

    Raises:
        ConfigurationError: where the policy has no graph, or is written so that it cannot be
            traced.
    """
    why = why_not_traced(graph.policy)
    require(why is None, str(why))
    rows = {port.name: {0: Dim("batch")} for port in graph.ports.inputs}
    try:
        with torch.no_grad(), _quietly():
            return torch.export.export(graph, (graph.examples(),), dynamic_shapes=(rows,))
    except ConfigurationError:
        raise
    except Exception as error:  # of whatever kind a policy of one's own raises
        raise ConfigurationError(
            f"{type(unwrapped(graph.policy)).__name__} cannot be traced into a graph by "
            f"torch.export: {_reason(error)} Write its forward by tensor operations alone, "
            "without .item(), len(tensor), NumPy or an if on a tensor's numbers; or export it with "
            "--format safetensors, which load_policy reads."
        ) from error


def onnx_of(program: ExportedProgram, graph: ActingGraph, metadata: Mapping[str, str]) -> bytes:
    """Return a traced graph as an ONNX file.

    Args:
        program: of the graph.
        graph: says how inputs and outputs are called.
        metadata: goes into `metadata_props`.

    Raises:
        ConfigurationError: where the extra is not installed, or ONNX lacks an operation.
    """
    inputs, outputs = ([port.name for port in ports] for ports in graph.ports)
    rows = {name: {0: "batch"} for name in inputs}
    try:
        with torch.no_grad(), _quietly():
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                dynamic_shapes=(rows,),
                input_names=inputs,
                output_names=outputs,
            )
    except ImportError as error:
        raise ConfigurationError(
            f"torch writes ONNX by packages that are not installed: pip install "
            f"'lightning-rl[export]'. ({error})"
        ) from error
    except Exception as error:  # of the exporter, which has many kinds
        raise ConfigurationError(
            f"{type(unwrapped(graph.policy)).__name__} has an operation that torch cannot write "
            f"as ONNX: {_reason(error)} Export it with --format torch."
        ) from error
    assert made is not None
    made.model.metadata_props.update(metadata)
    content: bytes = made.model_proto.SerializeToString()
    return content


def _reason(error: Exception) -> str:
    """Return what an exporter says, as much of it as fits a message."""
    words = " ".join(str(error).replace("For more information, run with TORCH_LOGS=", "").split())
    return textwrap.shorten(words or type(error).__name__, 300, placeholder=" ...") + "."


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave out what exporters say of themselves."""
    loggers = [logging.getLogger(name) for name in EXPORTERS]
    for logger in loggers:
        logger.addFilter(_nothing)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _action_ports(space: gymnasium.Space[Any]) -> Iterator[Port]:
    if not isinstance(space, StructuredActions):
        yield Port(ACTION, *space_spec(space), space)
        return
    for part in space.parts:
        name = ACTION if part.name == ACTION else f"{ACTION}.{part.name}"
        shape, dtype = space_spec(part.space)
        yield Port(name, shape, torch.int64 if part.counts else dtype, part.space)


def _parts(executed: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of an action by the names of their ports."""
    if isinstance(executed, dict | tuple):
        pairs = executed.items() if isinstance(executed, dict) else enumerate(executed)
        for key, child in pairs:
            yield from _parts(child, f"{name}.{key}")
    else:
        yield name, executed


def _observed(
    space: gymnasium.Space[Any], inputs: Mapping[str, Tensor], name: str, rows: int
) -> Tensor | TensorDict:
    """Return the observation [B, ...] that inputs are the leaves of."""
    if not isinstance(space, gymnasium.spaces.Dict):
        return inputs[name]
    children = {key: _observed(one, inputs, f"{name}.{key}", rows) for key, one in space.items()}
    return TensorDict(children, [rows])


def _acting_alone(policy: Policy) -> Policy:
    """Return a copy without what only critics need, which computes in the dtype of its weights.

    Few runtimes compute in bfloat16 on a CPU, and none of these to the same bits.
    """
    alone = copy.deepcopy(policy)
    alone.compute_in("32-true")
    for name in alone.critic_modules:
        owner, _, child = name.rpartition(".")
        module = alone.get_submodule(owner)
        if child in dict(module.named_children()):
            setattr(module, child, None)
    return alone.eval().requires_grad_(False)
