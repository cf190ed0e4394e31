"""Read what constructors declare: their parameters, and which classes a declared type takes."""

import collections.abc as abc
import dataclasses
import inspect
import types
import typing
from enum import Enum
from typing import Any, NamedTuple, get_args, get_origin

UNIONS = (typing.Union, types.UnionType)
LISTS = (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

OF_VALUES = ("builtins", "pathlib", "datetime", "numpy", "torch", "typing", "collections.abc", "os")
"""Modules whose types are those of plain values, or are converted from texts."""


class Family(NamedTuple):
    """The class that a declared type asks for: an instance of it, or a factory of instances.

    Attributes:
        cls: the class that a named class must derive from.
        leading: number of leading arguments that the caller of the factory gives.
        named: keyword arguments that the caller of the factory gives.
        is_factory: whether a function may stand there, too.
    """

    cls: type
    leading: int = 0
    named: tuple[str, ...] = ()
    is_factory: bool = False


def parameters_of(made: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor or a function, and of those behind its `**kwargs`.

    A `**kwargs` that leads to no constructor stays among them.
    """
    if not isinstance(made, type):
        return _signature(made)
    found: dict[str, inspect.Parameter] = {}
    for base in made.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = _signature(vars(base)["__init__"])
        parameters.pop("self", None)
        found = {name: one for name, one in found.items() if one.kind not in VARIABLE}
        found |= {name: one for name, one in parameters.items() if name not in found}
        if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            break
    return found


def _signature(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function, eval_str=True).parameters)
    except NameError:  # an annotation names what only a type checker imports
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C
        open_ended = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        return {"kwargs": open_ended}


def family_of(kind: Any) -> Family | None:
    """Return the class that a declared type asks for, itself or in a list or a mapping."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in UNIONS:
        return next(filter(None, map(family_of, args)), None)
    if origin in LISTS and args:
        return family_of(args[0])
    if origin in MAPPINGS and args:
        return family_of(args[1])
    if origin is abc.Callable and len(args) == 2:
        made = family_of(args[1])
        leading = len(args[0]) if isinstance(args[0], list) else 0
        return made and Family(made.cls, leading, is_factory=True)
    if not isinstance(kind, type) or origin is not None or dataclasses.is_dataclass(kind):
        return None
    if getattr(kind, "_is_protocol", False):
        call = _signature(kind.__call__)
        made = family_of(typing.get_type_hints(kind.__call__).get("return"))
        given = [one for one in call.values() if one.kind is one.POSITIONAL_ONLY]
        named = tuple(name for name, one in call.items() if one.kind is one.KEYWORD_ONLY)
        return made and Family(made.cls, len(given) - 1, named, is_factory=True)
    plain = kind.__module__ in OF_VALUES or issubclass(kind, Enum)
    return None if plain else Family(kind)


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union; a type that is none is its own."""
    return get_args(kind) if get_origin(kind) in UNIONS else (kind,)


def member_of(kind: Any, origins: tuple[Any, ...]) -> Any:
    """Return the type of the entries of a list or a mapping in a declared type, or Any."""
    for one in members_of(kind):
        args = [arg for arg in get_args(one) if arg is not ...]
        if get_origin(one) in origins and args:
            return args[-1]
    return Any


def dataclass_in(kind: Any) -> type | None:
    """Return the dataclass in a declared type."""
    return next((one for one in members_of(kind) if dataclasses.is_dataclass(one)), None)  # type: ignore[return-value]  # a class
