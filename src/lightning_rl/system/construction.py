"""Remember how an object was constructed, in the words of a config, so that a file can say it."""

import inspect
import sys
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Self

import gymnasium
import numpy as np
import torch

LARGEST = 1_000
"""A list or an array with more entries is not written to a config."""

NOT_WRITTEN = "not written: "
"""Prefix of the text that a config has in the place of a setting that cannot be written."""

GIVEN_BY_THE_ENV = ("observation_space", "action_space")
"""Arguments of policies that no config holds: they flow in from the env."""


class Constructed:
    """An object that remembers the arguments of its constructor, whoever calls it.

    It takes them in `__new__`, which sees those of the outermost class, before any constructor can
    change them; what it keeps are plain values and words, never the objects themselves. As a base
    class it comes last: Python takes the signature of a class from `__new__` where it finds that
    before an `__init__`.
    """

    _construction: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Take the arguments; a copy gets none, and its state holds those of the original."""
        self = super().__new__(cls)
        self.__dict__["_construction"] = _construction_of(cls, args, kwargs)
        return self


def construction(constructed: Constructed) -> dict[str, Any]:
    """Return how an object was constructed: `{class_path: ..., init_args: {...}}`.

    The settings are plain values; see `described` for those that cannot be written.
    """
    return constructed._construction


def described(value: Any) -> Any:
    """Return a value as plain data for a config, or a text with the prefix `NOT_WRITTEN`.

    Args:
        value: plain, a dataclass, an object that remembers its construction, a class or function of
            a module, a `partial` of a class with named arguments, or lists and dicts of these.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, np.generic | np.ndarray) and value.size <= LARGEST:
        return value.tolist()
    if isinstance(value, list | tuple) and len(value) <= LARGEST:
        return [described(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {name: described(one) for name, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: described(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Constructed) and _path_of(type(value)):
        return construction(value)
    if isinstance(value, type) and (name := _path_of(value)):
        return {"class_path": name}
    if isinstance(value, FunctionType) and (name := _path_of(value)):
        return name
    if isinstance(value, partial) and _is_plain(value) and (name := _path_of(value.func)):
        return {"class_path": name, "init_args": described(value.keywords)}
    return f"{NOT_WRITTEN}{_words_for(value)}"


def is_unwritten(value: Any) -> bool:
    """Tell whether a value of a config marks a setting that could not be written."""
    return isinstance(value, str) and value.startswith(NOT_WRITTEN)


def _construction_of(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    path = _path_of(cls) or f"{NOT_WRITTEN}{_words_for(cls)}"
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # of the class that is made
    try:
        bound = signature.bind_partial(None, *args, **kwargs)
    except TypeError:
        return {"class_path": path, "init_args": {}}  # which its constructor is about to say
    given: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            given[name] = f"{NOT_WRITTEN}arguments without a name"
        else:
            given[name] = value
    for name in GIVEN_BY_THE_ENV:
        if isinstance(given.get(name), gymnasium.Space):
            del given[name]
    return {"class_path": path, "init_args": described(given)}


def _is_plain(value: partial[Any]) -> bool:
    return isinstance(value.func, type) and not value.args


def _path_of(named: Any) -> str | None:
    """Return the shortest import path by which a class or a function is found again, or None."""
    parts, name = named.__module__.split("."), named.__qualname__
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        if getattr(sys.modules.get(module), name, None) is named:
            return f"{module}.{name}"
    return None


def _words_for(value: Any) -> str:
    """Say what a value is that no config can hold."""
    if isinstance(value, partial):
        inner = value.func if isinstance(value.func, type) else type(value.func)
        return f"a partial of {inner.__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}, which is not at the top of a module"
    if isinstance(value, FunctionType):
        if value.__name__ == "<lambda>":
            return "a lambda"
        return f"the function {value.__name__}, which is not at the top of a module"
    return f"an object of {type(value).__name__}"
