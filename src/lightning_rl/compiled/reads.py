"""Notice that what a traced function has read of Python objects is no longer what it was.

A trace keeps every number, string and flag that it meets as a constant, and every tensor as the one
that it was. So the reads are recorded while a function is traced, as far as they go through one
object, such as the algorithm whose loss it is; before each call of the graph they are compared.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from lightning_rl.system.torch_private import (
    MODULE_INTERNALS,
    READ_NUMBER,
    TorchDispatchMode,
    buffers_and_modules_of,
    version_of,
)

Place = tuple[int, str]
"""The identity of an object, and the name of one of its attributes."""

PLAIN = (int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, frozenset, np.ndarray)
NO_OBJECTS = (Tensor, TensorDictBase, type, ModuleType, FunctionType, BuiltinFunctionType)
"""What is compared as a whole: nobody looks at what is read of it."""

_MISSING = object()


class Read(NamedTuple):
    """One attribute that was read.

    Attributes:
        place: of the attribute.
        label: how a message calls it.
        mapping, name: where it is looked up again.
        value: what it was.
    """

    place: Place
    label: str
    mapping: Mapping[str, Any]
    name: str
    value: Any

    def now(self) -> Any:
        """Return what it is now."""
        return self.mapping.get(self.name, _MISSING)

    def is_number(self) -> bool:
        """Tell whether it may vary as a tensor."""
        return _is_number(self.value) and _is_number(self.now())

    def has_changed(self) -> bool:
        """Tell whether it is another value now."""
        return not same(self.now(), self.value)


class Reads:
    """What a function has read of an object while it was recorded, and of all that hangs on it.

    Recorded is each attribute that holds data, of an instance or of its class, also by way of
    properties and methods, and each buffer. Not recorded is what is reached without the object,
    such as the global variables of a module.

    Args:
        root: the object.
        varying: earlier reads of numbers, in whose stead tensors [] are handed out: what is traced
            with them goes on where they change.
        device: of these tensors.
        driven: what the function sets itself before it reads it, so that it is nothing to compare.

    Attributes:
        tensors: those that stand for varying numbers, by place.
    """

    def __init__(
        self,
        root: Any,
        varying: Iterable[Read],
        device: torch.device,
        driven: Collection[Place] = (),
    ) -> None:
        self.root = root
        self._driven = driven
        # Made before anything is traced, and of float32: a plain number widens no tensor either.
        self.tensors = {
            read.place: torch.tensor(float(read.now()), dtype=torch.float32, device=device)
            for read in varying
            if _is_number(read.now())
        }
        self._reads: dict[Place, Read] = {}
        self._reached: dict[int, Any] = {}  # kept alive: the id of what is gone is given again
        self._expected: dict[Place, Any] = {}
        self._plain: list[tuple[Callable[[Any], Any], Mapping[str, Any], Any]] = []
        self._objects: list[tuple[Mapping[str, Any], str, Any]] = []
        self._snapshots: list[tuple[Mapping[str, Any], str, Any]] = []
        self._tensor_reads: list[tuple[Tensor, int, Any]] = []
        self._takers: dict[Place, list[Callable[[Tensor], None]]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what this thread reads."""
        patches = _Patches(self)
        patches.reach(self.root)
        try:
            with _NotesTensorReads(self):
                yield
        finally:
            patches.undo()
        self._expected = {place: read.value for place, read in self._reads.items()}
        for read in self._reads.values():
            if _is_mutable(read.value):
                self._snapshots.append((read.mapping, read.name, frozen(read.value)))
        self._prepare()

    def note(self, owner: Any, name: str, mapping: Mapping[str, Any], value: Any) -> Any:
        """Record a read; return what the reader is to get."""
        place = (id(owner), name)
        if place in self._driven:
            return value
        if place not in self._reads:
            label = f"{type(owner).__name__}.{name}"
            self._reached[id(owner)] = owner
            self._reads[place] = Read(place, label, mapping, name, value)
        return self.tensors.get(place, value)

    def note_tensor_read(self, tensor: Tensor, value: Any) -> None:
        """Record that Python got a tensor's value."""
        self._tensor_reads.append((tensor, version_of(tensor), value))

    def rebind(self, tensor: Tensor, take: Callable[[Tensor], None]) -> None:
        """Have `take` called where another tensor of the same layout stands in a tensor's place."""
        for place, read in self._reads.items():
            if read.value is tensor:
                self._takers.setdefault(place, []).append(take)

    def still_hold(self) -> bool:
        """Tell whether all is as it was; varying numbers and tensors are taken up as they are."""
        if not self._is_unchanged() and not self._adopt_new_values():
            return False
        for mapping, name, snapshot in self._snapshots:
            if not same(mapping.get(name), snapshot):
                return False
        for tensor, version, value in self._tensor_reads:
            if version_of(tensor) != version and tensor.item() != value:
                return False
        return True

    def changed(self) -> list[Read]:
        """Return what has another value now."""
        return [
            read
            for read in self._reads.values()
            if read.place not in self.tensors and read.has_changed()
        ]

    def _prepare(self) -> None:
        """Sort what is expected so that comparing it takes 2 µs: a minibatch may take 100."""
        plain: dict[int, list[Read]] = {}
        self._objects = []
        for place, read in self._reads.items():
            if isinstance(self._expected[place], PLAIN) and isinstance(read.mapping, dict):
                plain.setdefault(id(read.mapping), []).append(read)
            else:
                self._objects.append((read.mapping, read.name, self._expected[place]))
        self._plain = []
        for group in plain.values():
            values = tuple(self._expected[read.place] for read in group)
            getter = itemgetter(*(read.name for read in group))
            self._plain.append((getter, group[0].mapping, values if len(group) > 1 else values[0]))

    def _is_unchanged(self) -> bool:
        """Tell whether plain values are equal, and all others the same objects."""
        try:
            for getter, mapping, values in self._plain:
                if getter(mapping) != values:
                    return False
        except (KeyError, RuntimeError, ValueError):  # gone, or a tensor or an array by now
            return False
        for mapping, name, value in self._objects:  # noqa: SIM110  # a generator takes twice as long
            if mapping.get(name, _MISSING) is not value:
                return False
        return True

    def _adopt_new_values(self) -> bool:
        """Take up whatever is not the same object, where the graph allows for it."""
        for place, read in self._reads.items():
            old, now = self._expected[place], read.now()
            if now is old:
                continue
            if place in self.tensors:
                if not _is_number(now):
                    return False
                self.tensors[place].fill_(now)
            elif place in self._takers:
                if not isinstance(now, Tensor) or _layout(now) != _layout(old):
                    return False
                for take in self._takers[place]:
                    take(now)
            elif not same(now, old):
                return False
            self._expected[place] = now
        self._prepare()
        return True


class _Patches:
    """Have classes report what is read of their instances."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._thread = threading.get_ident()
        self._own: dict[type, Any] = {}  # what a class had itself, if anything
        self._objects: dict[int, Any] = {}

    def reach(self, value: Any) -> None:
        """Watch an object from here on, and what lies in a container."""
        if isinstance(value, (list, tuple, set, frozenset)):
            for child in value:
                self.reach(child)
        elif isinstance(value, dict):
            for child in value.values():
                self.reach(child)
        elif isinstance(value, MethodType):
            self.reach(value.__self__)
        elif not isinstance(value, (*PLAIN, *NO_OBJECTS)) and id(value) not in self._objects:
            self._objects[id(value)] = value
            self._watch(nn.Module if isinstance(value, nn.Module) else type(value))

    def undo(self) -> None:
        """Give the classes back as they were."""
        for cls, own in self._own.items():
            if own is _MISSING:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = own  # type: ignore[method-assign]  # as it was

    def _watch(self, cls: type) -> None:
        if any(parent in self._own for parent in cls.__mro__):
            return
        original: Any = cls.__getattribute__

        def report(owner: Any, name: str) -> Any:
            if threading.get_ident() != self._thread or id(owner) not in self._objects:
                return original(owner, name)
            try:
                value = original(owner, name)
            except AttributeError:
                self._note_buffer(owner, name)
                raise
            return self._note(owner, name, value)

        try:
            own = vars(cls).get("__getattribute__", _MISSING)
            cls.__getattribute__ = report  # type: ignore[method-assign, assignment]  # until `undo`
        except TypeError:
            return  # a type that is not written in Python: what it holds is compared as a whole
        self._own[cls] = own

    def _note(self, owner: Any, name: str, value: Any) -> Any:
        if name.startswith("__") or (name in MODULE_INTERNALS and isinstance(owner, nn.Module)):
            return value
        mapping: Mapping[str, Any] = _instance_dict(owner)
        if name not in mapping:
            static = _class_attribute(type(owner), name)
            is_slot = type(static).__name__ == "member_descriptor"
            if not is_slot and (static is not value or isinstance(value, NO_OBJECTS)):
                return value  # of a property or a method, which read what they need themselves
            mapping = _Attributes(owner)
        self.reach(value)
        return self._reads.note(owner, name, mapping, value)

    def _note_buffer(self, owner: Any, name: str) -> None:
        """Note what `nn.Module.__getattr__` is about to find: a buffer, or a module inside."""
        if not isinstance(owner, nn.Module):
            return
        for mapping in buffers_and_modules_of(owner):
            if mapping.get(name) is not None:
                self.reach(mapping[name])
                self._reads.note(owner, name, mapping, mapping[name])


class _NotesTensorReads(TorchDispatchMode):
    """Notice where Python gets the value of a tensor that the function holds.

    That of an input, or of what is computed in the trace, is refused by the trace itself.
    """

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is READ_NUMBER:
            self._reads.note_tensor_read(args[0], result)
        return result


class _Attributes(Mapping[str, Any]):
    """The attributes of an object that its class holds, or its slots."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(dir(self._owner))

    def __len__(self) -> int:
        return len(dir(self._owner))


def _instance_dict(owner: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]  # a dict
    except AttributeError:
        return {}


def _class_attribute(cls: type, name: str) -> Any:
    """Return what a class holds under a name, as it is."""
    return next((vars(parent)[name] for parent in cls.__mro__ if name in vars(parent)), _MISSING)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_mutable(value: Any) -> bool:
    """Tell whether a value can change and stay the same object."""
    if isinstance(value, tuple | frozenset):
        return any(_is_mutable(child) for child in value)
    return isinstance(value, CONTAINERS)


def frozen(value: Any) -> Any:
    """Copy containers, with what they hold; anything else is returned as it is."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: frozen(child) for key, child in value.items()}
    if isinstance(value, list):
        return [frozen(child) for child in value]
    if isinstance(value, tuple):  # a named one has a constructor of its own
        children = [frozen(child) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    return set(value) if isinstance(value, set) else value


def same(a: Any, b: Any) -> bool:
    """Tell whether a graph made with one value is right for another."""
    if a is b:
        return True
    if isinstance(a, PLAIN):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, set | frozenset) and a == b


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device
