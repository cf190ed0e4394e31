"""Act by the ONNX file of a policy that others trained."""

import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.errors import import_extra, require
from lightning_rl.extend.files import open_file, tell
from lightning_rl.extend.policies import RNG
from lightning_rl.extend.spaces import names_of
from lightning_rl.extensions.transfer.layout import PolicyLayout, columns_of_terms, read_layout

LARGEST_FILE = 2**30
"""Most bytes of an ONNX file."""

MISSING = "OnnxPolicy needs ONNX Runtime: pip install -e '.[export]'."
"""Message without ONNX Runtime."""

TRIED_ROWS = 64
"""Rows of the batch whose speed is printed."""


class OnnxPolicy(Policy):
    """A policy from an ONNX file, which acts by the mode of its distribution and is not trained.

    The observation of the env is a Box, or one key of a Dict, whose numbers have names; manager
    terms name theirs `term/0`, `term/1`, ... The layout says in which order and scale the
    policy reads them. Joints go by the names of the env's actions.

    Args:
        observation_space, action_space: spaces of one env.
        path: the ONNX file: one input [1, D] or [B, D], and one output of actions.
        layout: YAML file of its layout, see `PolicyLayout`; the metadata of the ONNX file complete
            it.
        key: key of a Dict observation that has the terms.

    Raises:
        ConfigurationError: a file cannot be read, they contradict each other, or the env has other
            terms or joints; names what differs.
    """

    has_critic = False
    has_entropy = False
    columns: Tensor
    scales: Tensor
    order: Tensor
    signs: Tensor
    file_digest: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        path: str,
        layout: str,
        key: str | None = None,
    ) -> None:
        super().__init__(observation_space, action_space)
        self.key, self.graph = key, OnnxGraph(path)
        self.layout = read_layout(layout, self.graph.metadata)
        columns, scales = input_columns(self.layout, self._observed_space(), action_space)
        require(
            len(columns) == self.graph.size,
            f"{path} reads {self.graph.size} numbers, but the terms of {layout} have "
            f"{len(columns)}: " + ", ".join(f"{name}" for name in self.layout.observation) + ".",
        )
        num_actions = self.graph(np.zeros((1, self.graph.size), np.float32)).shape[-1]
        require(
            num_actions == len(self.layout.joints),
            f"{path} returns {num_actions} numbers, but {layout} has {len(self.layout.joints)} "
            "joints in default_position.",
        )
        env_joints = names_of(action_space) or self.layout.joints
        order = [self.layout.joints.index(name) for name in env_joints]
        signs = [self.layout.sign(name) for name in env_joints]
        digest = np.frombuffer(hashlib.sha256(self.graph.content).digest(), np.uint8)
        self.register_buffer("columns", torch.tensor(columns), persistent=False)
        self.register_buffer("scales", torch.tensor(scales), persistent=False)
        self.register_buffer("order", torch.tensor(order), persistent=False)
        self.register_buffer("signs", torch.tensor(signs), persistent=False)
        # In checkpoints, so that another file under the same path is noticed.
        self.register_buffer("file_digest", torch.tensor(digest))
        self.register_load_state_dict_pre_hook(_check_digest)
        tell(self.graph.described())

    def _observed_space(self) -> gymnasium.Space[Any]:
        space = self.observation_space
        keys = list(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else []
        require(
            (self.key in keys) if keys else self.key is None,
            f"OnnxPolicy: key is {self.key}; the observation has "
            f"{'the keys ' + ', '.join(keys) if keys else 'no keys'}.",
        )
        return space[self.key] if keys else space  # type: ignore[index]  # a Dict

    @property
    def acting_space(self) -> gymnasium.Space[Any]:
        if self.key is None:
            return self.observation_space
        return gymnasium.spaces.Dict({self.key: self._observed_space()})

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        # A traced graph would call this process's session.
        require(
            not torch.compiler.is_exporting(),
            f"The base is the ONNX file {self.graph.path}, which no traced graph can contain: "
            "export the policy with --format safetensors, for load_policy.",
        )
        observation = td["observation"] if self.key is None else td["observation", self.key]
        vector = observation[:, self.columns] * self.scales
        action = _run_graph(vector.float(), self.graph.number, len(self.layout.joints))
        td.set("action", action[:, self.order] * self.signs)
        td.set("sample_log_prob", vector.new_zeros(len(vector)))
        return td

    def get_value(self, td: TensorDict) -> TensorDict:
        raise ConfigurationError("OnnxPolicy has no critic: use it as the base of another policy.")

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        raise ConfigurationError(
            "OnnxPolicy is not trained: correct it by ResidualActorCritic (SAC) or "
            "GaussianResidualActorCritic (PPO), or clone it by BehaviorCloning."
        )


_GRAPHS: "WeakValueDictionary[int, OnnxGraph]" = WeakValueDictionary()
_NUMBERS = itertools.count()


# An operator of torch: a compiled update calls it. A plain call would be recorded as a constant.
@torch.library.custom_op("lightning_rl::run_onnx_graph", mutates_args=())
def _run_graph(rows: Tensor, graph: int, num_actions: int) -> Tensor:
    return torch.from_numpy(_GRAPHS[graph](rows.detach().cpu().numpy())).to(rows.device)


@_run_graph.register_fake
def _(rows: Tensor, graph: int, num_actions: int) -> Tensor:
    return rows.new_empty(len(rows), num_actions)


class OnnxGraph:
    """The graph of an ONNX file with one input [B, D] and one output [B, A], in ONNX Runtime.

    Args:
        path: file of the graph.

    Raises:
        ConfigurationError: the file cannot be read, or has other inputs or outputs.

    Attributes:
        content: the bytes of the file.
        metadata: its properties, as plain values.
        size: D.
        number: of the graph in this process.
        takes_batches: whether B is free; otherwise the graph runs once per row.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.number = Path(path), next(_NUMBERS)
        _GRAPHS[self.number] = self
        try:
            with open_file(self.path, None, LARGEST_FILE) as file:
                self.content = file.read()
        except FileNotFoundError:
            raise ConfigurationError(f"path: there is no file {path}.") from None
        onnx = import_extra("onnx", MISSING)
        runtime = import_extra("onnxruntime", MISSING)
        try:
            model = onnx.load_model_from_string(self.content)
        except Exception as error:  # protobuf's own types
            raise ConfigurationError(f"{path} is no ONNX file: {error}") from error
        # External data are other files, by names that the sender chose.
        external = [t.name for t in model.graph.initializer if t.data_location]
        require(
            not external, f"{path} keeps {external[:1]} in another file: export it as one file."
        )
        self.metadata = {p.key: _plain(p.value) for p in model.metadata_props}
        stored = {tensor.name for tensor in model.graph.initializer}
        inputs = [i for i in model.graph.input if i.name not in stored]
        shapes = [[d.dim_value for d in i.type.tensor_type.shape.dim] for i in inputs]
        require(
            len(shapes) == 1 and len(shapes[0]) == 2 and len(model.graph.output) == 1,
            f"{path} has the inputs {', '.join(i.name for i in inputs)} and the outputs "
            f"{', '.join(o.name for o in model.graph.output)}: OnnxPolicy runs graphs with one "
            "input [1, D] and one output. A clock or a reference motion is no input of it.",
        )
        self.name, self.size = inputs[0].name, shapes[0][1]
        self._options = runtime.SessionOptions()
        # More threads would compete with torch's threads.
        self._options.intra_op_num_threads = self._options.inter_op_num_threads = 1
        self._session = self._open(self.content)
        self.takes_batches = shapes[0][0] != 1
        if not self.takes_batches:
            self._free_batch_axis(model)

    def _open(self, content: bytes) -> Any:
        runtime = import_extra("onnxruntime", MISSING)
        try:
            return runtime.InferenceSession(
                content, self._options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's own types
            raise ConfigurationError(f"ONNX Runtime cannot run {self.path}: {error}") from error

    def _free_batch_axis(self, model: Any) -> None:
        """Give inputs and outputs any number of rows, if each row's result stays the same."""
        for port in (*model.graph.input, *model.graph.output):
            port.type.tensor_type.shape.dim[0].dim_param = "batch"
        del model.graph.value_info[:]
        rows = np.random.default_rng(0).normal(size=(4, self.size)).astype(np.float32)
        in_turn = self(rows)
        fixed_session = self._session
        try:
            self._session = self._open(model.SerializeToString())
            self.takes_batches = True
            equal = np.allclose(self(rows), in_turn, rtol=1e-4, atol=1e-5)
        except Exception:  # a graph that has the number of rows inside
            equal = False
        if not equal:
            self._session, self.takes_batches = fixed_session, False

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return the actions [N, A] for inputs [N, D], float32."""
        if self.takes_batches:
            result: np.ndarray = self._session.run(None, {self.name: rows})[0]
            return result
        return np.concatenate([self._session.run(None, {self.name: row[None]})[0] for row in rows])

    def described(self) -> str:
        """Return a line with the speed of a batch."""
        rows = np.zeros((TRIED_ROWS, self.size), np.float32)
        self(rows)
        begin = time.perf_counter()
        self(rows)
        seconds = time.perf_counter() - begin
        way = "in one pass" if self.takes_batches else "one row at a time"
        return f"{self.path.name}: {TRIED_ROWS} rows in {1e3 * seconds:.2g} ms, {way}"

    def __reduce__(self) -> tuple[Any, ...]:
        return OnnxGraph, (self.path,)  # a session cannot be pickled


def input_columns(
    layout: PolicyLayout, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]
) -> tuple[list[int], list[float]]:
    """Return the index in the env's observation, and the scale, of each number that a policy reads.

    Args:
        layout: of the policy.
        observations: Box whose numbers have names `term/i`.
        actions: Box whose numbers have the names of the joints, or none.

    Raises:
        ConfigurationError: the env has no such term, or other joints.
    """
    by_term = columns_of_terms(observations)
    require(
        bool(by_term),
        f"OnnxPolicy reads numbers by their names, but {observations} has none: make the "
        "observation of manager terms.",
    )
    env_joints = names_of(actions) or layout.joints
    require(
        set(env_joints) == set(layout.joints),
        f"The joints of the layout are {', '.join(layout.joints)}, the actions of the env "
        f"{', '.join(env_joints)}.",
    )
    joints = [list(env_joints).index(joint) for joint in layout.joints]
    columns: list[int] = []
    scales: list[float] = []
    for name, term in layout.observation.items():
        require(
            name in by_term,
            f"The layout reads the term {name}; the env has {', '.join(by_term)}.",
        )
        indices = by_term[name]
        order, signs = list(range(len(indices) // term.history)), [1.0] * len(indices)
        if term.joints:
            require(
                len(indices) == len(joints) * term.history,
                f"The term {name} of the env has {len(indices)} numbers; its joints with the "
                f"layout's history of {term.history} are {len(joints) * term.history}.",
            )
            order = joints
            signs = [layout.sign(joint) for joint in layout.joints] * term.history
        # Values of a history follow each other, in the env oldest first.
        frames = range(0, len(indices), len(order))[:: -1 if term.newest_first else 1]
        columns += [indices[frame + number] for frame in frames for number in order]
        scales += [term.scale * sign for sign in signs]
    return columns, scales


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_digest(policy: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    saved = state.get(f"{prefix}file_digest")
    require(
        saved is None or torch.equal(saved.cpu(), policy.file_digest.cpu()),
        f"{policy.graph.path} is another file than the one of the checkpoint.",
    )
