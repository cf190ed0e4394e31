"""Convert spaces to plain values and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from lightning_rl.rollout.names import named, names_of
from lightning_rl.rollout.structured_actions import StructuredActions

SpaceData = dict[str, Any]
"""`kind`, the name of the class, and its constructor's arguments."""

KINDS = (
    StructuredActions,
    spaces.Box,
    spaces.Discrete,
    spaces.MultiDiscrete,
    spaces.MultiBinary,
    spaces.Dict,
    spaces.Tuple,
)
"""Spaces that can be data; the name of the class is the kind."""


def space_data(space: spaces.Space[Any]) -> SpaceData | None:
    """Return a space as plain values for a checkpoint; None for an unsupported kind."""
    kwargs: dict[str, Any]
    if isinstance(space, StructuredActions):
        kwargs = {"spaces": {"structure": space_data(space.structure)}}
    elif isinstance(space, spaces.Box):
        kwargs = {"low": _bound(space.low), "high": _bound(space.high), "shape": list(space.shape)}
        kwargs |= {"names": list(names)} if (names := names_of(space)) else {}
        kwargs |= {"cameras": list(names)} if (names := names_of(space, 0)) else {}
    elif isinstance(space, spaces.Discrete):
        kwargs = {"n": int(space.n), "start": int(space.start)}
    elif isinstance(space, spaces.MultiDiscrete):
        kwargs = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
    elif isinstance(space, spaces.MultiBinary):
        kwargs = {"n": list(space.n) if isinstance(space.n, Sequence) else int(space.n)}
    elif isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        kwargs = {"spaces": {str(key): space_data(child) for key, child in dict(parts).items()}}
    else:
        return None
    if None in kwargs.get("spaces", {}).values():  # a part of an unsupported kind
        return None
    # In the order of KINDS: StructuredActions is a Box, too.
    kind = next(kind for kind in KINDS if isinstance(space, kind))
    return {"kind": kind.__name__, "dtype": str(space.dtype), **kwargs}


def space_from(data: SpaceData) -> spaces.Space[Any]:
    """Return the space for its data.

    Raises:
        ValueError: for a kind that `space_data` does not write.
    """
    kind = data["kind"]
    if kind == "Dict":
        # Pairs keep their order, which lays out flat actions; Gymnasium sorts the keys of a dict.
        return spaces.Dict([(str(key), space_from(child)) for key, child in data["spaces"].items()])
    if kind == "Tuple":
        return spaces.Tuple([space_from(child) for child in data["spaces"].values()])
    if kind == "StructuredActions":
        return StructuredActions(space_from(data["spaces"]["structure"]))
    if kind == "MultiBinary":
        n = data["n"]
        return spaces.MultiBinary(tuple(n) if isinstance(n, list) else int(n))
    dtype: Any = np.dtype(str(data["dtype"]))
    if kind == "Box":
        shape = tuple(int(size) for size in data["shape"])
        # One number stands for equal bounds, see `_bound`.
        low, high = (np.broadcast_to(np.array(data[b], dtype), shape) for b in ("low", "high"))
        box = spaces.Box(low, high, shape, dtype.type)
        axis, names = (0, data["cameras"]) if "cameras" in data else (-1, data.get("names", ()))
        return named(box, map(str, names), axis)
    if kind == "Discrete":
        return spaces.Discrete(int(data["n"]), start=int(data["start"]), dtype=dtype.type)
    if kind == "MultiDiscrete":
        nvec, start = np.array(data["nvec"], dtype), np.array(data["start"], dtype)
        return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
    raise ValueError(f"'{kind}' is not a kind of space")


def space_of(observation: Any) -> spaces.Space[Any]:
    """Return the space of observations [M, ...] or a tree of them; floats are unbounded."""
    if not isinstance(observation, Tensor):
        return spaces.Dict({key: space_of(child) for key, child in observation.items()})
    dtype: Any = np.dtype(str(observation.dtype).removeprefix("torch."))
    shape = tuple(observation.shape[1:])
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if dtype.kind == "b":
        return spaces.MultiBinary(shape)
    limits = np.iinfo(dtype)  # the data alone do not show the range that the env announced
    return spaces.Box(limits.min, limits.max, shape, dtype.type)


def _bound(bound: np.ndarray) -> Any:
    uniform = bound.size > 0 and bool((bound == bound.flat[0]).all())
    # Images have a hundred thousand equal bounds: one number represents them.
    return bound.flat[0].item() if uniform else bound.tolist()
