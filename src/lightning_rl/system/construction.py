"""Remember how an object was constructed, in the words of a config, so that a file can say it."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, Self

import gymnasium
import numpy as np
import torch

LARGEST = 1_000
"""A list or an array with more entries is no setting: it is left out, and named as missing."""

GIVEN_BY_THE_ENV = ("observation_space", "action_space")
"""Arguments of policies that no config holds: they flow in from the env."""


class Construction(NamedTuple):
    """How an object was constructed.

    Attributes:
        config: `{class_path: ..., init_args: {...}}`, plain values all the way down.
        lacks: what no config can hold, in words, by its path within `config`.
    """

    config: dict[str, Any]
    lacks: dict[str, str]


class Constructed:
    """An object that remembers the arguments of its constructor, whoever calls it.

    It takes them in `__new__`, which sees those of the outermost class, before any constructor can
    change them; what it keeps are plain values and words, never the objects themselves. As a base
    class it comes last: Python takes the signature of a class from `__new__` where it finds that
    before an `__init__`.
    """

    _construction: Construction

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Take the arguments; a copy gets none, and its state holds those of the original."""
        self = super().__new__(cls)
        self.__dict__["_construction"] = _construction_of(cls, args, kwargs)
        return self


def construction(constructed: Constructed) -> Construction:
    """Return how an object was constructed."""
    return constructed._construction


def described(value: Any, path: str, lacks: dict[str, str]) -> Any:
    """Return a value as a config would hold it; None, and an entry in `lacks`, where none can.

    Args:
        value: plain, a dataclass, an object that remembers its construction, a class or function of
            a module, a `partial` of a class with named arguments, or lists and dicts of these.
        path: of the value.
        lacks: is added to.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, np.generic | np.ndarray) and value.size <= LARGEST:
        return value.tolist()
    if isinstance(value, list | tuple) and len(value) <= LARGEST:
        return _list_of(value, path, lacks)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return _dict_of(value, path, lacks)
    if is_dataclass(value) and not isinstance(value, type):
        return _dict_of({one.name: getattr(value, one.name) for one in fields(value)}, path, lacks)
    if isinstance(value, Constructed) and "class_path" not in construction(value).lacks:
        made = construction(value)
        lacks.update({f"{path}.{inner}": what for inner, what in made.lacks.items()})
        return made.config
    if isinstance(value, type) and (name := _path_of(value)):
        return {"class_path": name}
    if isinstance(value, FunctionType) and (name := _path_of(value)):
        return name
    if isinstance(value, partial) and _is_plain(value) and (name := _path_of(value.func)):
        settings = _dict_of(value.keywords, f"{path}.init_args", lacks)
        return {"class_path": name, "init_args": settings}
    lacks[path] = _words_for(value)
    return None


def _construction_of(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Construction:
    lacks: dict[str, str] = {}
    path = _path_of(cls)
    if path is None:
        lacks["class_path"] = _words_for(cls)
    config: dict[str, Any] = {"class_path": path, "init_args": {}}
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # of the class that is made
    try:
        bound = signature.bind_partial(None, *args, **kwargs)
    except TypeError:
        return Construction(config, lacks)  # which its constructor is about to say
    given: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            lacks[f"init_args.{name}"] = "arguments without a name"
        else:
            given[name] = value
    for name in GIVEN_BY_THE_ENV:
        if isinstance(given.get(name), gymnasium.Space):
            del given[name]
    config["init_args"] = _dict_of(given, "init_args", lacks)
    return Construction(config, lacks)


def _dict_of(values: dict[str, Any], path: str, lacks: dict[str, str]) -> dict[str, Any]:
    """Describe values by name, without those that no config can hold."""
    found = {name: described(value, f"{path}.{name}", lacks) for name, value in values.items()}
    return {name: value for name, value in found.items() if f"{path}.{name}" not in lacks}


def _list_of(values: Sequence[Any], path: str, lacks: dict[str, str]) -> list[Any] | None:
    """Describe all of a list, or none of it."""
    missing: dict[str, str] = {}
    found = [described(value, path, missing) for value in values]
    if not missing:
        return found
    lacks[path] = ", ".join(missing.values())
    return None


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
