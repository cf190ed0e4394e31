"""Read declared types: the classes and values that they accept, and their names in messages."""

import collections.abc as abc
import dataclasses
import inspect
import re
import types
import typing
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch

UNIONS = (typing.Union, types.UnionType)
LISTS = (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)

PLAIN = (bool, int, float, str, types.NoneType, Literal, ..., *LISTS, *MAPPINGS)
"""Types whose values a config writes without a conversion, with lists and mappings."""

WRITTEN_AS_TEXT = (timedelta, torch.device, set, frozenset)
"""Types whose values a config holds as texts or lists, besides enums and paths."""

OF_VALUES = ("builtins", "datetime", "numpy", "torch", "typing", "collections.abc", "os")
"""Modules of types with values that are plain or converted from texts."""

WORDS = {
    **dict.fromkeys(("int", "integer"), "a whole number"),
    **dict.fromkeys(("float", "floating"), "a number"),
    **dict.fromkeys(("Sequence", "Iterable", "list", "ndarray", "tuple"), "a list"),
    **dict.fromkeys(("dict", "Mapping"), "a mapping, such as {name: value}"),
    "Callable": "a function, by its import path: my_module.my_function",
    "bool": "true or false",
    "str": "a text",
    "NoneType": "null",
}
"""Names of types in messages."""


class Family(NamedTuple):
    """The class that a declared type asks for: an instance of it, or a factory of instances.

    `leading` and `named` are the arguments that the caller of the factory passes.
    """

    cls: type
    leading: int = 0
    named: tuple[str, ...] = ()
    is_factory: bool = False


@dataclasses.dataclass
class Parts:
    """The members of a declared type, which may be a union, by kind.

    Attributes:
        plain: types of plain values.
        families: classes, one of which a config names.
        group: a dataclass.
        entries: type of the entries of a list with classes.
        values: type of the values of a mapping with classes.
    """

    plain: list[Any] = dataclasses.field(default_factory=list)
    families: list[Family] = dataclasses.field(default_factory=list)
    group: type | None = None
    entries: Any = None
    values: Any = None

    @property
    def has_classes(self) -> bool:
        """Whether the type contains classes."""
        return any((self.families, self.group, self.entries, self.values))


def parts_of(kind: Any) -> Parts:
    """Split a declared type into its parts."""
    parts = Parts()
    for member in get_args(kind) if get_origin(kind) in UNIONS else (kind,):
        origin, args = get_origin(member), get_args(member)
        if dataclasses.is_dataclass(member):
            parts.group = typing.cast(type, member)
        # Lists of plain values belong to `plain`: jsonargparse converts them.
        elif origin in LISTS and args and parts_of(args[0]).has_classes:
            parts.entries = args[0]
        elif origin in MAPPINGS and args and parts_of(args[1]).has_classes:
            parts.values = args[1]
        elif family := _family(member):
            parts.families.append(family)
        else:
            parts.plain.append(member)
    return parts


def _family(kind: Any) -> Family | None:
    args = get_args(kind)
    if get_origin(kind) is abc.Callable and len(args) == 2:
        family = _family(args[1])
        leading = len(args[0]) if isinstance(args[0], list) else 0
        return family and Family(family.cls, leading, is_factory=True)
    if not isinstance(kind, type) or args:
        return None
    # A protocol with `__call__` declares a factory; its caller passes positional-only arguments.
    if getattr(kind, "_is_protocol", False) and "__call__" in vars(kind):
        signature = inspect.signature(vars(kind)["__call__"], eval_str=True)
        family, call = _family(signature.return_annotation), signature.parameters
        # Without `self`, which is positional-only, too.
        leading = sum(param.kind is param.POSITIONAL_ONLY for param in call.values()) - 1
        names = tuple(name for name, param in call.items() if param.kind is param.KEYWORD_ONLY)
        return family and Family(family.cls, leading, names, is_factory=True)
    # jsonargparse converts texts to enums and paths.
    is_plain = kind.__module__ in OF_VALUES or issubclass(kind, (Enum, PurePath))
    return None if is_plain else Family(kind)


def is_read_from_text(kind: Any) -> bool:
    """Return whether a declared type has values that a config writes as other plain values.

    Its other values are plain, too: to convert a value to it imports and calls no code of a config.
    """
    members = list(_members(kind))
    return any(map(_is_written_as_text, members)) and all(
        member in PLAIN or _is_written_as_text(member) for member in members
    )


def _is_written_as_text(kind: Any) -> bool:
    is_class = isinstance(kind, type)
    return kind in WRITTEN_AS_TEXT or (is_class and issubclass(kind, (Enum, PurePath)))


def _members(kind: Any) -> typing.Iterator[Any]:
    """Yield the types in a declared type, without unions."""
    origin = get_origin(kind)
    if origin not in UNIONS:
        yield origin or kind
    if origin is not Literal:
        for argument in get_args(kind):
            yield from _members(argument)


def describe_type(kind: Any) -> str:
    """Return the name of a declared type in messages."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(describe_type, args)))
    if origin is tuple and args and ... not in args:
        return f"a list of {len(args)}"
    if _family(kind) is not None and not dataclasses.is_dataclass(kind):
        return "the name of a class"
    name = getattr(origin or kind, "__name__", str(kind))
    return WORDS.get(name, f"a {name}")


def shorten_message(message: str) -> str:
    """Shorten a message of jsonargparse to the part for users."""
    # jsonargparse writes the setting, the allowed types and the value in fixed phrases.
    key = re.search(r'Parser key "([^"]+)"', message)
    of_class, of_choices = r"<class '(?:\w+\.)*(\w+)'>", r"typing\.Literal\[(.+?)\]"
    kinds = re.findall(f"Expected a (?:{of_class}|{of_choices})", message)
    value = re.search(r"(?:Given|Got) value: (.*)", message)
    if missing := re.search(r"arguments are required: (.+)", message):
        return f"Missing setting: {missing[1]}."
    if key is None or not kinds or value is None:
        return re.sub(r"\s+\n", "\n", message).strip()
    words = [WORDS.get(kind, f"a {kind}") if kind else f"one of {of}" for kind, of in kinds]
    allowed = " or ".join(dict.fromkeys(words)).replace("'", "")
    return f"{key[1]} must be {allowed}, got {value[1]}."
