"""Record the attributes that a graph was compiled with, and detect changes.

A trace stores every number, string and flag as a constant, and every tensor by identity. The
attributes of an object and of all objects in it are compared with the trace's before each
iteration.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.system.torch_private import (
    MODULE_INTERNALS,
    READ_NUMBER,
    TorchDispatchMode,
    version_of,
)

Place = tuple[int, str]
"""The identity of an object, and the name of one of its attributes."""

PLAIN = (int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype, torch.device)
"""Types that are compared by value."""

CONTAINERS = (list, tuple, dict, set, frozenset, deque, np.ndarray)
"""Types that are copied, and compared with their contents."""

LIBRARIES = {"builtins", "collections", "functools", "gymnasium", "lightning", "numpy"} | {
    "tensordict",
    "threading",
    "_thread",
    "torch",
}
"""Packages whose objects are compared by identity, except modules."""

STEPPING = ("lightning_rl.compiled", "lightning_rl.optim")
"""Packages of the update, which no loss reads."""

MISSING = object()
"""Placeholder of a missing attribute."""


class Attribute(NamedTuple):
    """An attribute: its name in messages, the mapping that stores it, its key there, its value."""

    label: str
    holder: Mapping[str, Any]
    name: str
    value: Any

    def is_number(self) -> bool:
        """Return whether a tensor can replace the value."""
        number = isinstance(self.value, int | float | np.number) and type(self.value) is not bool
        return number and isinstance(self.holder, MutableMapping)


class Snapshot:
    """The current attributes of an object, and of the objects that it holds.

    A function holds the variables of the functions around it, and the arguments of a `partial`.
    Objects of `LIBRARIES` are compared by identity. Global variables are not compared.

    Args:
        root: the object.
        left_out: attributes that no traced function reads.
        functions: traced functions that the root may not hold.

    Attributes:
        attributes: the attributes, by their path from the root.
    """

    def __init__(
        self, root: Any, left_out: Collection[Place] = (), functions: Iterable[Any] = ()
    ) -> None:
        self.attributes: dict[str, Attribute] = {}
        self._left_out = left_out
        self._visited: set[int] = set()
        self._sizes: list[tuple[Mapping[str, Any], int]] = []
        self._visit(root, "")
        for i, function in enumerate(functions):
            self._descend(function, f"({i})")
        self._root_attributes = vars(root)
        self._store_root_values()

    def _store_root_values(self) -> None:
        attributes = [a for a in self.attributes.values() if a.holder is self._root_attributes]
        attributes = [a for a in attributes if isinstance(a.value, PLAIN)]
        self._names = [attribute.name for attribute in attributes]
        self._values = tuple(attribute.value for attribute in attributes)

    def refresh(self) -> bool:
        """Store new plain values; return False if other attributes have changed.

        Counters change in each iteration, and an iteration of one env step takes few milliseconds:
        finding all objects again would be a fifth of it. `attributes` is a new dict if one is new.
        """
        # A new or deleted attribute changes the size of its dict.
        if any(len(holder) != size for holder, size in self._sizes):
            return False
        new = {}
        for path, attribute in self.attributes.items():
            value = attribute.holder.get(attribute.name, MISSING)
            # Identity first: it is quick, and true for nearly all attributes.
            if value is not attribute.value and not same(attribute.value, value):
                if not (isinstance(attribute.value, PLAIN) and isinstance(value, PLAIN)):
                    return False
                new[path] = attribute._replace(value=value)
        if new:
            self.attributes = self.attributes | new
            self._store_root_values()
        return True

    def root_is_current(self) -> bool:
        """Return whether the root's own plain attributes are unchanged; takes 1 µs."""
        try:
            # This runs before each call of a graph, hence one comparison of tuples.
            return tuple(map(self._root_attributes.get, self._names)) == self._values
        except (RuntimeError, ValueError):  # an attribute has become a tensor or an array
            return False

    def _visit(self, owner: Any, path: str) -> None:
        # Objects refer to each other in circles, such as an algorithm and its objectives.
        if id(owner) in self._visited:
            return
        self._visited.add(id(owner))
        # `_holders` yields the content of `_parameters`, `_buffers` and `_modules` itself.
        internal = MODULE_INTERNALS if isinstance(owner, nn.Module) else ()
        for holder, names in _holders(owner):
            if isinstance(holder, dict):
                self._sizes.append((holder, len(holder)))
            for name in names:
                attribute_path = f"{path}.{name}"
                left_out = name in internal or (id(owner), name) in self._left_out
                if not left_out and attribute_path not in self.attributes:
                    label, value = f"{_class_of(owner).__name__}.{name}", holder[name]
                    self.attributes[attribute_path] = Attribute(label, holder, name, frozen(value))
                    self._descend(value, attribute_path)

    def _descend(self, value: Any, path: str) -> None:
        if isinstance(value, list | tuple | set | frozenset | deque):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            for key, child in value.items():
                if not isinstance(child, (*PLAIN, Tensor)):
                    self._descend(child, f"{path}[{key}]")
        elif isinstance(value, MethodType):  # a bound method reads the attributes of its object
            self._descend(value.__self__, f"{path}.__self__")
        elif isinstance(value, partial):
            self._descend((value.func, value.args, value.keywords), path)
        elif not isinstance(value, (*PLAIN, Tensor, type)) and (
            isinstance(value, nn.Module) or not _is_of_a_library(_class_of(value))
        ):
            self._visit(value, path)


@contextmanager
def replaced(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes (holder, name, value) within a context; `MISSING` removes them."""
    originals = []
    try:
        for holder, name, value in values:
            originals.append((holder, name, holder[name]))
            # If the function needs a removed attribute, tracing fails: it has to stay a constant.
            if value is MISSING:
                del holder[name]
            else:
                holder[name] = value
        yield
    finally:
        for holder, name, value in originals:
            holder[name] = value


class TensorReadRecorder(TorchDispatchMode):
    """Record the tensors, held by a traced function, whose value Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[Tensor, int, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # `item()`, `float()` and `if` on a tensor all end in this operation.
        if function is READ_NUMBER:
            self.reads.append((args[0], version_of(args[0]), result))
        return result


class _Slots(MutableMapping[str, Any]):
    def __init__(self, owner: Any, names: list[str]) -> None:
        self._owner, self._names = owner, names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)  # works for a frozen dataclass too

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return len(self._names)


class _Enclosed(MutableMapping[str, Any]):
    """The variables of the functions around a function, which it reads."""

    def __init__(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        self._cells = dict(zip(names, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # not set yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __len__(self) -> int:
        return len(self._cells)


def _holders(owner: Any) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
    attributes = getattr(owner, "__dict__", {})
    yield attributes, list(attributes)
    if isinstance(owner, FunctionType):
        enclosed = _Enclosed(owner)
        yield enclosed, list(enclosed)
    if isinstance(owner, nn.Module):
        for name in ("_parameters", "_buffers", "_modules"):
            yield attributes[name], list(attributes[name])
    for cls in type(owner).__mro__:
        if not _is_of_a_library(cls):
            # The value of a slot is not in `__dict__`.
            slots = _Slots(owner, _listed(vars(cls).get("__slots__")))
            yield slots, list(slots)
            # Methods and properties are code, which does not change during a run.
            data = [k for k, v in vars(cls).items() if isinstance(v, (*PLAIN, *CONTAINERS))]
            yield vars(cls), [name for name in data if not name.startswith("__")]


def _listed(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots or ())


def _class_of(owner: Any) -> Any:
    return owner if isinstance(owner, FunctionType) else type(owner)


def _is_of_a_library(cls: Any) -> bool:
    name = str(cls.__module__)
    return name.partition(".")[0] in LIBRARIES or name.startswith(STEPPING)


def frozen(value: Any, state_of: Callable[[Any], Any] = lambda part: part) -> Any:
    """Copy a container with its contents; return `state_of` any other value."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: frozen(child, state_of) for key, child in value.items()}
    if isinstance(value, list | deque):
        return [frozen(child, state_of) for child in value]
    if isinstance(value, tuple):  # a named tuple has another constructor
        children = [frozen(child, state_of) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    return set(value) if isinstance(value, set) else state_of(value)


def same(a: Any, b: Any) -> bool:
    """Return whether a graph made with one value is valid for another."""
    if a is b:
        return True
    if isinstance(a, PLAIN):
        # 1 == 1.0 == True, but each has its own graph; NaN counts as equal to itself.
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        # `frozen` has copied a deque to a list, so the types may differ.
        alike = isinstance(b, list | tuple | deque) and len(a) == len(b)
        return alike and all(map(same, a, b))
    return isinstance(a, set | frozenset) and a == b
