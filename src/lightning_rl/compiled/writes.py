"""Find what a function writes into the objects that it reads, and undo it.

A graph repeats writes into tensors. All other writes happen once, when the function is traced.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.compiled.attributes import CONTAINERS, MISSING, Attribute, same
from lightning_rl.system.torch_private import version_of


class Contents:
    """What objects hold at one moment.

    Args:
        current: returns the attributes of the objects.
    """

    def __init__(self, current: Callable[[], Mapping[str, Attribute]]) -> None:
        self._current = current
        self._attributes = current()
        self._values = {path: a.holder[a.name] for path, a in self._attributes.items()}
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._generators: dict[int, tuple[np.random.Generator, Any]] = {}
        for value in self._values.values():
            self._copy(value)

    def _copy(self, value: Any) -> None:
        if isinstance(value, Tensor):
            # Parameters may be large, and a traced function gets others in their place.
            if not isinstance(value, nn.Parameter):
                self._tensors[id(value)] = value, version_of(value), value.detach().clone()
        elif isinstance(value, np.random.Generator):
            self._generators[id(value)] = value, value.bit_generator.state
        elif isinstance(value, CONTAINERS) and id(value) not in self._containers:
            self._containers[id(value)] = value, copy.copy(value)
            if not isinstance(value, np.ndarray):
                for child in value.values() if isinstance(value, dict) else value:
                    self._copy(child)

    def changes(self) -> dict[str, str]:
        """Return the labels of attributes that were set, removed, filled or drawn from, by path."""
        old, new = self._attributes, self._current()
        pairs = {path: (old.get(path), new.get(path)) for path in sorted({**old, **new})}
        drawn = {
            key
            for key, (generator, state) in self._generators.items()
            if not same(generator.bit_generator.state, state)
        }
        return {
            path: next(attribute.label for attribute in pair if attribute is not None)
            for path, pair in pairs.items()
            if not same(*(MISSING if attribute is None else attribute.value for attribute in pair))
            or id(self._values.get(path)) in drawn
        }

    def written_tensors(self) -> dict[str, str]:
        """Return the labels of attributes whose tensor was written in place since, by path."""
        written = {
            key for key, (x, version, _) in self._tensors.items() if version_of(x) != version
        }
        return {
            path: attribute.label
            for path, attribute in sorted(self._attributes.items())
            if id(self._values[path]) in written
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all changes, in place."""
        current = self._current()
        for path in self.changes():
            attribute = self._attributes.get(path) or current[path]
            if not isinstance(attribute.holder, MutableMapping):
                continue  # of a class
            if path in self._values:
                attribute.holder[attribute.name] = self._values[path]
            else:
                del attribute.holder[attribute.name]
        for container, contents in self._containers.values():
            if not same(contents, container):
                _refill(container, contents)
        for generator, state in self._generators.values():
            generator.bit_generator.state = state
        for tensor, version, original in self._tensors.values():
            # The statistics of batches are written without a new version. To write an unchanged
            # tensor would change its version.
            if version_of(tensor) != version or not torch.equal(tensor, original):
                tensor.copy_(original)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = contents
    elif isinstance(container, list):
        container[:] = contents
    elif isinstance(container, dict | set):
        container.clear()
        container.update(contents)
    elif isinstance(container, deque):
        container.clear()
        container.extend(contents)


def draws_of_python(function: Callable[[], Any]) -> bool:
    """Return whether a function draws random numbers of Python or NumPy, from their global streams.

    A function that draws leaves the streams as they were.
    """
    start = _streams()
    function()
    end = _streams()
    if same(start, end):
        return False
    # Another thread may have drawn, but then the same function does not end at the same place.
    _set_streams(start)
    function()
    draws = same(end, _streams())
    if draws:
        _set_streams(start)
    return draws


def _streams() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_streams(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
