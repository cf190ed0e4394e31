"""Trace a policy's acting, with normalisation and clipping, into one graph of tensors."""

import copy
import logging
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rl import ConfigurationError, Policy, PolicyWrapper
from lightning_rl.extend.checkpoints import TrainedPolicy
from lightning_rl.extend.errors import require
from lightning_rl.extend.rollout import leaves_of_tree
from lightning_rl.extend.spaces import MASK, StructuredActions, space_spec
from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.extensions.vla.custom import CustomVLA
from lightning_rl.extensions.vla.flow import FlowHead
from lightning_rl.extensions.vla.lerobot.diffusion import DiffusionHead
from lightning_rl.extensions.vla.lerobot.policy import LeRobotPolicy
from lightning_rl.extensions.vla.lerobot.smolvla import PICTURES, SmolVLANetwork
from lightning_rl.extensions.vla.policy import ChunkPolicy
from lightning_rl.extensions.vla.transformers_backbone import TransformersBackbone

OBSERVATION, ACTION, STATE, NEXT_STATE = "observation", "action", "state", "next_state"
"""Names of inputs and outputs; entries of a Dict append their keys: `observation.rgb`."""

STEP, X, NEXT_X, STEP_NUMBER, STEP_NOISE = "step", "x", "next_x", "step_number", "step_noise"
"""Names of the graph of a step, and of its inputs and outputs besides features and `action`."""


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
        self.policy = acting_alone(policy)
        self.ports = ports
        # Keys that only the critic reads are no inputs.
        self._observed_space = policy.acting_space

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        td = observed(self._observed_space, inputs)
        rows = td.batch_size[0]
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


class PartGraph(ActingGraph):
    """A part of a policy's acting: `compute`, a function of tensors that calls its modules."""

    def __init__(self, policy: Policy, inputs: list[Port], compute: Callable[..., Any]) -> None:
        nn.Module.__init__(self)  # without a copy of the policy
        self.policy, self._compute, self.ports = policy, compute, Ports(inputs, [])
        with torch.no_grad():
            outputs = compute(self.examples())
        for name, output in outputs.items():
            self.ports.outputs.append(Port(name, tuple(output.shape[1:]), output.dtype, None))

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        return self._compute(inputs)


def unwrapped(policy: Policy) -> Policy:
    """Return the policy inside of wrappers."""
    while isinstance(policy, PolicyWrapper):
        policy = policy.inner
    return policy


def is_large(policy: Policy) -> bool:
    """Return whether a policy is a pretrained model, too large for one ONNX file."""
    inner = unwrapped(policy)
    body = inner.backbone if isinstance(inner, ChunkPolicy) else inner
    smolvla = isinstance(inner, LeRobotPolicy) and inner.directory.kind == "smolvla"
    return smolvla or isinstance(body, TransformersBackbone | CustomVLA)


def is_in_graphs(policy: Policy) -> bool:
    """Return whether the ONNX export of a policy is a directory of graphs instead of a file."""
    return is_large(policy) or chain_of(policy) is not None


def why_not_traced(policy: Policy) -> str | None:
    """Return the reason why a policy cannot be traced, or None."""
    real_time = getattr(unwrapped(policy), "real_time", None)
    if real_time is not None and (real_time.method == "guided" or is_large(policy)):
        return (
            f"real_time.method: {real_time.method} has no graph here: guided needs gradients, and "
            "graphs of large models keep no old chunk. Export it with --format safetensors."
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


def onnx_of(
    program: ExportedProgram, graph: ActingGraph, metadata: Mapping[str, str], dtype: str
) -> Any:
    """Convert a traced graph to an `ONNXProgram` with metadata, and weights stored as `dtype`.

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
    ir, model = import_module("onnx_ir"), onnx_program.model
    # The exporter notes the lines and paths of the sources at each node.
    import_module("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(model)
    model.metadata_props.update(metadata)
    if isinstance(graph, PartGraph):
        for value in [value for value in model.graph.inputs if not value.uses()]:
            model.graph.inputs.remove(value)
    if dtype == "float16":
        _store_in_float16(ir, model.graph)
    return onnx_program


def _store_in_float16(ir: Any, graph: Any) -> None:
    # Float16 is for size: few operators of a CPU compute in it, and rounded weights change actions
    # less than rounded activations. So the graph restores the weights, and computes in float32.
    for value in list(graph.initializers.values()):
        weight = value.const_value
        if value.dtype != ir.DataType.FLOAT or weight.size < 256:
            continue
        restored = ir.node("Cast", [None], {"to": ir.DataType.FLOAT})
        value.replace_all_uses_with(restored.outputs[0], replace_graph_outputs=True)
        restored.replace_input_with(0, value)
        graph.insert_before(graph[0], restored)
        value.dtype = ir.DataType.FLOAT16
        value.const_value = ir.tensor(weight.numpy().astype(np.float16), name=value.name)


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
    has_keys = isinstance(space.structure, gymnasium.spaces.Dict | gymnasium.spaces.Tuple)
    for part in space.parts:
        name = f"{ACTION}.{part.name}" if has_keys else ACTION
        shape, dtype = space_spec(part.space)
        yield Port(name, shape, torch.int64 if part.counts else dtype, part.space)


def observed(space: gymnasium.Space[Any], inputs: Mapping[str, Tensor]) -> TensorDict:
    """Return a batch [B] with the observation of `space` in the inputs of a graph."""
    rows = [next(iter(inputs.values())).shape[0]]

    def part(space: gymnasium.Space[Any], name: str) -> Tensor | TensorDict:
        if not isinstance(space, gymnasium.spaces.Dict):
            return inputs[name]
        children = {key: part(child, f"{name}.{key}") for key, child in space.items()}
        return TensorDict(children, rows)

    return TensorDict({OBSERVATION: part(space, OBSERVATION)}, rows)


def acting_alone(policy: Policy) -> Policy:
    """Return a copy on the CPU, in float32, without critics and gradients."""
    alone = copy.deepcopy(policy).cpu()
    # Convert to float32: few runtimes compute in bfloat16 on a CPU.
    alone.set_precision("32-true")
    for name in alone.critic_modules:
        owner, _, child = name.rpartition(".")
        # A name may be of a module that this policy does not have.
        module = alone.get_submodule(owner)
        if child in dict(module.named_children()):
            setattr(module, child, None)
    return alone.eval().requires_grad_(False)


# --- split a policy of chunks ---


def chain_of(policy: Policy) -> FlowHead | DiffusionHead | None:
    """Return the head whose step is a graph of its own, unless it acts in real time."""
    head = policy.head if isinstance(policy, ChunkPolicy) and policy.real_time is None else None
    return head if isinstance(head, FlowHead | DiffusionHead) else None


def graphs_of(policy: Policy, ports: Ports) -> dict[str, ActingGraph]:
    """Return graphs by name, in their order: of features and a step, or one of a whole policy.

    A graph may read what the observation and the graphs before it give; `onnx_of` drops the rest.
    """
    if chain_of(policy) is None:
        return {"policy": ActingGraph(policy, ports)}
    alone = cast(ChunkPolicy, acting_alone(policy))
    head, backbone = cast(Any, alone.head), cast(Any, alone.backbone)
    is_smolvla = isinstance(getattr(backbone, "network", None), SmolVLANetwork)

    def embed(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        prepared = backbone.inputs(observed(alone.acting_space, inputs)[OBSERVATION])
        return {PICTURES: backbone.network.embed_cameras(prepared)}

    def encode(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        td = observed(alone.acting_space, inputs)
        if is_smolvla:
            prepared = {**backbone.inputs(td[OBSERVATION]), PICTURES: inputs[PICTURES]}
            # The expert reads the prefix alone: without a summary, the last layer is not computed.
            return _named(backbone.of_inputs(prepared).prefix)
        features = alone.features(td)
        slots = {"slots": features.slots} if features.slots.shape[1] else {}
        return {"summary": features.summary, **slots, **_named(features.prefix)}

    def advance(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x, number, noise = (inputs.get(name) for name in (X, STEP_NUMBER, STEP_NOISE))
        slots, summary = (inputs.get(name, inputs[X][:, :0]) for name in ("slots", "summary"))
        prefix = tuple(value for name, value in inputs.items() if name.startswith("prefix"))
        x = head.advance(Features(slots, summary, prefix), x, number, noise)
        return {NEXT_X: x, ACTION: TrainedPolicy.executed(alone.action_space, head.to_chunk(x))}

    graphs: dict[str, ActingGraph] = {}
    inputs = list(ports.inputs)
    names = {PICTURES: embed, "prefix": encode} if is_smolvla else {"encoder": encode}
    for name, compute in names.items():
        graphs[name] = PartGraph(alone, inputs, compute)
        inputs = [*inputs, *graphs[name].ports.outputs]
    blocks, *shape = head.noise_shape
    inputs += [Port(name, tuple(shape), torch.float32, None) for name in (X, STEP_NOISE)[:blocks]]
    inputs.append(Port(STEP_NUMBER, (), torch.int64, None))
    return {**graphs, STEP: PartGraph(alone, inputs, advance)}


def _named(prefix: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"prefix_{number}": value for number, value in enumerate(prefix)}
