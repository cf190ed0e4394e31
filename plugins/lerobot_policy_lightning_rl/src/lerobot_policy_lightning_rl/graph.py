"""Act with an ONNX file of `rl-cli export`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor


class GraphPolicy:
    """A graph with the methods of `load_policy`'s result that LeRobot needs.

    Attributes:
        observation_space, action_space: as the file describes them.
    """

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        texts = self.session.get_modelmeta().custom_metadata_map
        told = {name: json.loads(text) for name, text in texts.items()}
        if "observations" not in told:
            raise ValueError(f"{path} is no file of `rl-cli export`: it describes no observations.")
        self.state = told["state"]
        spaces = {port["name"]: _space_of(port) for port in told["observations"]}
        self.observation_space = spaces.get("observation") or _tree(spaces)
        self.action_space = _space_of(told["actions"][0])
        self.reset()

    def reset(self) -> None:
        self.memory: np.ndarray | None = None

    def act(self, observation: Tensor | Mapping[str, Any]) -> np.ndarray:
        """Return actions [N, *A], or chunks [N, K, *A]."""
        inputs = dict(_flat("observation", observation))
        if self.state is not None:
            shape = len(next(iter(inputs.values()))), *self.state["shape"]
            fresh = np.zeros(shape, np.float32)
            inputs[self.state["input"]] = fresh if self.memory is None else self.memory
        names = [port.name for port in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(None, inputs), strict=True))
        if self.state is not None:
            self.memory = outputs[self.state["output"]]
        action: np.ndarray = outputs["action"]
        return action


def _space_of(port: Mapping[str, Any]) -> Box:
    # The graph bounds its actions, so only shape and dtype matter here.
    dtype = np.dtype(port["dtype"])
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    return Box(limits.min, limits.max, tuple(port["shape"]), dtype.type)


def _tree(spaces: Mapping[str, Box]) -> Dict:
    """Return the Dict of spaces by dotted names, such as `observation.pixels.top`."""
    parts: dict[str, Any] = {}
    for name, space in spaces.items():
        _, key, *inner = name.split(".", 2)
        if inner:
            parts.setdefault(key, {})[f"{key}.{inner[0]}"] = space
        else:
            parts[key] = space
    return Dict({key: _tree(p) if isinstance(p, dict) else p for key, p in parts.items()})


def _flat(name: str, tree: Any) -> list[tuple[str, np.ndarray]]:
    if not isinstance(tree, Mapping):
        return [(name, torch.as_tensor(tree).cpu().numpy())]
    return [pair for key, part in tree.items() for pair in _flat(f"{name}.{key}", part)]
