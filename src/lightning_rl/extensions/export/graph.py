"""Trace a policy's acting, with normalisation and clipping, into one graph of tensors."""

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

from lightning_rl import ConfigurationError, Policy, PolicyWrapper
from lightning_rl.extend.checkpoints import TrainedPolicy
from lightning_rl.extend.errors import require
from lightning_rl.extend.rollout import leaves_of_tree
from lightning_rl.extend.spaces import MASK, StructuredActions, space_spec
from lightning_rl.extensions.vla.custom import CustomVLA
from lightning_rl.extensions.vla.lerobot.policy import LeRobotPolicy
from lightning_rl.extensions.vla.policy import ChunkPolicy
from lightning_rl.extensions.vla.transformers_backbone import TransformersBackbone

OBSERVATION, ACTION, STATE, NEXT_STATE = "observation", "action", "state", "next_state"
"""Names of inputs and outputs; entries of a Dict append their keys: `observation.rgb`."""


class Port(NamedTuple):
    """An input or output [B, *shape] of a graph.

    Attributes:
        name: name of the port.
        shape: shape of one row.
        dtype: dtype of the tensor.
        space: space of one row; None for a state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    space: gymnasium.Space[Any] | None


class Ports(NamedTuple):
    """Inputs and outputs of a graph.

    Attributes:
        inputs: the observation, and `state` for a policy with a memory: zeros at first.
        outputs: `action` or its parts, and `next_state`.
    """

    inputs: list[Port]
    outputs: list[Port]


def ports_of(policy: Policy) -> Ports:
    """Return the inputs and outputs of a policy that acts by the mode, without a critic."""
    leaves = leaves_of_tree(OBSERVATION, policy.acting_space)
    inputs = [Port(name, *space_spec(space), space) for name, space in leaves]
    outputs = list(_action_ports(policy.action_space))
    if policy.is_recurrent:
        (size, *trailing), dtype = policy.extra_fields["state"]
        # The mode needs no noise: its part of the state stays zero, and is neither input nor
        # output.
        noise = getattr(getattr(unwrapped(policy), "distribution", None), "state_size", 0)
        inputs.append(Port(STATE, (size - noise, *trailing), dtype, None))
        outputs.append(Port(NEXT_STATE, (size - noise, *trailing), dtype, None))
    return Ports(inputs, outputs)


class ActingGraph(nn.Module):
    """The mode of a policy as a function of tensors, from the env's observation to its action.

    Args:
        policy: the policy; it is copied without its critics.
        ports: inputs and outputs of the policy.
    """

    def __init__(self, policy: Policy, ports: Ports) -> None:
        super().__init__()
        self.policy = _acting_alone(policy).cpu()
        self.ports = ports
        # Keys that only the critic reads are no inputs.
        self._observed_space = policy.acting_space

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = inputs[self.ports.inputs[0].name].shape[0]
        observation = _observed(self._observed_space, inputs, OBSERVATION, rows)
        td = TensorDict({OBSERVATION: observation}, [rows])
        for key, zeros in self.policy.first_state(1).items():
            state = zeros.expand(rows, *zeros.shape[1:])
            if STATE in inputs:
                previous_state = inputs[STATE]
                noise = state[:, previous_state.shape[1] :]
                state = torch.cat((previous_state, noise), 1) if noise.shape[1] else previous_state
            td.set(key, state)
        result = self.policy(td, deterministic=True)
        executed = TrainedPolicy.executed(self.policy.action_space, result[ACTION])
        outputs = dict(leaves_of_tree(ACTION, executed))
        if STATE in inputs:
            # Without the noise, as it came in.
            outputs[NEXT_STATE] = result[NEXT_STATE][:, : inputs[STATE].shape[1]]
        return outputs

    def examples(self, rows: int = 2) -> dict[str, Tensor]:
        """Return example inputs [B, ...]: ones for an action mask, else zeros."""
        # A mask of zeros would allow no action.
        make = {True: torch.ones, False: torch.zeros}
        return {
            port.name: make[port.name == f"{OBSERVATION}.{MASK}"](
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
    """Return the reason why a policy cannot be traced, or None."""
    inner = unwrapped(policy)
    body = inner.backbone if isinstance(inner, ChunkPolicy) else inner
    smolvla = isinstance(inner, LeRobotPolicy) and inner.directory.kind == "smolvla"
    if smolvla or isinstance(body, TransformersBackbone | CustomVLA):
        return (
            f"A {type(body).__name__} cannot be traced into one graph, because its model is too "
            "large for an ONNX file. Export it with --format safetensors, for load_policy; "
            "adapters are then written by peft."
        )
    real_time = getattr(inner, "real_time", None)
    if real_time is not None and real_time.method == "guided":
        return (
            "real_time.method: guided needs gradients, which a graph has not. Export it with "
            "--format safetensors, for load_policy, or with another real_time.method."
        )
    return None


def traced(graph: ActingGraph) -> ExportedProgram:
    """Trace a graph with a dynamic batch size.

    Raises:
        ConfigurationError: if the policy cannot be traced.
    """
    reason = why_not_traced(graph.policy)
    require(reason is None, str(reason))
    # Only the batch is dynamic: torch.export would freeze it at the example's 2 rows.
    rows = {port.name: {0: Dim("batch")} for port in graph.ports.inputs}
    try:
        with torch.no_grad(), _quietly():
            return torch.export.export(graph, (graph.examples(),), dynamic_shapes=(rows,))
    except ConfigurationError:
        raise
    except Exception as error:  # a user's policy may raise any type
        raise ConfigurationError(
            f"{type(unwrapped(graph.policy)).__name__} cannot be traced into a graph by "
            f"torch.export: {_reason(error)} Write its forward with tensor operations only, "
            "without .item(), len(tensor), NumPy or an if on a tensor's numbers; or export it with "
            "--format safetensors, for load_policy."
        ) from error


def onnx_of(program: ExportedProgram, graph: ActingGraph, metadata: Mapping[str, str]) -> bytes:
    """Convert a traced graph to the bytes of an ONNX file; `metadata` becomes `metadata_props`.

    Raises:
        ConfigurationError: if the `export` extra is not installed, or ONNX lacks an operation.
    """
    inputs, outputs = ([port.name for port in ports] for ports in graph.ports)
    rows = {name: {0: "batch"} for name in inputs}
    try:
        with torch.no_grad(), _quietly():
            onnx_program = torch.onnx.export(
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
            f"-e '.[export]'. ({error})"
        ) from error
    except Exception as error:  # the exporter raises many types
        raise ConfigurationError(
            f"{type(unwrapped(graph.policy)).__name__} has an operation that torch cannot write "
            f"as ONNX: {_reason(error)} Export it with --format torch."
        ) from error
    assert onnx_program is not None
    onnx_program.model.metadata_props.update(metadata)
    content: bytes = onnx_program.model_proto.SerializeToString()
    return content


def _reason(error: Exception) -> str:
    words = " ".join(str(error).replace("For more information, run with TORCH_LOGS=", "").split())
    return textwrap.shorten(words or type(error).__name__, 300, placeholder=" ...") + "."


EXPORTERS = (
    "torch.onnx._internal.exporter._registration",
    "onnxscript.optimizer._constant_folding",
)
"""Loggers of unimportant lines."""


@contextmanager
def _quietly() -> Iterator[None]:
    # torch's exporters log what no user of this command can act on.
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
        # The main part of a structured action keeps the plain name.
        name = ACTION if part.name == ACTION else f"{ACTION}.{part.name}"
        shape, dtype = space_spec(part.space)
        yield Port(name, shape, torch.int64 if part.counts else dtype, part.space)


def _observed(
    space: gymnasium.Space[Any], inputs: Mapping[str, Tensor], name: str, rows: int
) -> Tensor | TensorDict:
    if not isinstance(space, gymnasium.spaces.Dict):
        return inputs[name]
    children = {key: _observed(part, inputs, f"{name}.{key}", rows) for key, part in space.items()}
    return TensorDict(children, [rows])


def _acting_alone(policy: Policy) -> Policy:
    alone = copy.deepcopy(policy)
    # Convert to float32: few runtimes compute in bfloat16 on a CPU.
    alone.set_precision("32-true")
    for name in alone.critic_modules:
        owner, _, child = name.rpartition(".")
        # A name may be of a module that this policy does not have.
        module = alone.get_submodule(owner)
        if child in dict(module.named_children()):
            setattr(module, child, None)
    return alone.eval().requires_grad_(False)
