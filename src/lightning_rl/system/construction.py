"""Remember how an object was constructed, as plain values for a config."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Self

import gymnasium
import numpy as np
import torch

from lightning_rl.system.declared import parts_of
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.hooks import ChecksHooks

LARGEST = 1_000
"""Most entries of a list or an array in a config."""

NOT_WRITTEN = "not written: "
"""Prefix of the text in a config for a setting that cannot be written."""

IMPORT_PATH = "import_path"
"""Metadata of a dataclass field for functions and classes that are plain text in a config."""

GIVEN_BY_THE_ENV = ("observation_space", "action_space")
"""Arguments of policies that come from the env; no config holds them."""


_weights_follow = ContextVar("weights_follow", default=False)
_settings_are_read = ContextVar("settings_are_read", default=False)


@contextmanager
def weights_follow() -> Iterator[None]:
    """Construct policies whose weights are loaded next: they do not read files of statistics.

    Until the weights, which contain the statistics, are loaded, the statistics are NaN.
    """
    token = _weights_follow.set(True)
    try:
        yield
    finally:
        _weights_follow.reset(token)


def do_weights_follow() -> bool:
    """Return whether a policy is constructed within `weights_follow`."""
    return _weights_follow.get()


class UnknownSettingError(ConfigurationError, TypeError):
    """A constructor was called with an argument that it does not have."""


class _AllSettings:
    """`__signature__` of a class: its settings, with those behind `**kwargs` of its constructor."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        # An instance has the signature of its `__call__`. The parser looks at all attributes of a
        # class that uses its `**kwargs`: this one would ask the parser again.
        if instance is not None or _settings_are_read.get():
            raise AttributeError("__signature__")
        arguments = _arguments(owner)
        if settings := settings_of_class(owner):
            star = any(argument.kind is argument.VAR_POSITIONAL for argument in arguments)
            arguments = [
                inspect.Parameter(
                    name,
                    # What `**kwargs` passes on is given by name.
                    setting.kind
                    if star or _is_own(setting, owner)
                    else inspect.Parameter.KEYWORD_ONLY,
                    default=setting.default,
                    annotation=setting.annotation,
                )
                for name, setting in settings.items()
            ]
        return inspect.Signature(sorted(arguments, key=lambda argument: argument.kind))


def _arguments(cls: type) -> list[inspect.Parameter]:
    return list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]  # `cls` is a class to construct


def _is_own(setting: Any, cls: type) -> bool:
    """Return whether the constructor of a class names a setting, instead of passing it on."""
    return bool(setting.parent.__init__ is cls.__init__)  # type: ignore[misc]  # as above


def settings_of_class(cls: type) -> dict[str, Any] | None:
    """Return the settings of a class by name, each with the class that documents it, `parent`.

    None: the constructor of a user's class uses its `**kwargs` itself.
    """
    from lightning_rl.system.jsonargparse_private import parameters_of  # imports the parser

    token = _settings_are_read.set(True)
    try:
        settings = parameters_of(cls)
    finally:
        _settings_are_read.reset(token)
    has_kwargs = any(argument.kind is argument.VAR_KEYWORD for argument in _arguments(cls))
    uses_kwargs = has_kwargs and all(_is_own(setting, cls) for setting in settings.values())
    return None if uses_kwargs else settings


class NamedSettings(ChecksHooks):
    """An object whose constructor names the nearest setting of an unknown one.

    List this base class last: Python takes the signature of a class from the first `__new__` or
    `__init__`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse unknown arguments."""
        _bound(cls, args, kwargs)
        return super().__new__(cls)


class Configurable(ChecksHooks):
    """An object that remembers the arguments of its constructor, as plain values.

    `__new__` gets the arguments of the outermost class before any constructor can change them. Like
    `NamedSettings`, it refuses unknown ones and is listed last.
    """

    _construction: dict[str, Any]
    __signature__ = _AllSettings()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments; a copy gets the original's arguments with its state."""
        self = super().__new__(cls)
        self.__dict__["_construction"] = _construction_of(cls, args, kwargs)
        return self


def config_of(constructed: Configurable) -> dict[str, Any]:
    """Return `{class_path: ..., init_args: {...}}` in plain values; see `to_config`."""
    return constructed._construction


def to_config(value: Any, kind: Any = None) -> Any:
    """Return a value as plain data for a config, or a text with the prefix `NOT_WRITTEN`.

    `kind` is the declared type, if the value is a dataclass or holds one.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, np.generic | np.ndarray) and value.size <= LARGEST:
        return value.tolist()
    if isinstance(value, list | tuple) and len(value) <= LARGEST:
        return [to_config(entry, parts_of(kind).entries) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {name: to_config(entry, parts_of(kind).values) for name, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        group = parts_of(kind).group
        if group is not None and type(value) is not group:  # the config would name no class
            return f"{NOT_WRITTEN}{_words_for(value)}, where {group.__name__} is declared"
        return {field.name: _of_field(value, field) for field in fields(value)}
    if isinstance(value, Configurable) and _path_of(type(value)):
        return config_of(value)
    if isinstance(value, type) and (name := _path_of(value)):
        return {"class_path": name}
    if isinstance(value, FunctionType) and (name := _path_of(value)):
        return name
    if isinstance(value, partial) and _is_plain(value) and (name := _path_of(value.func)):
        return {"class_path": name, "init_args": _to_configs(value.func, value.keywords)}
    return f"{NOT_WRITTEN}{_words_for(value)}"


def _of_field(owner: Any, field: Field[Any]) -> Any:
    value = getattr(owner, field.name)
    if field.metadata.get(IMPORT_PATH) and isinstance(value, type) and (name := _path_of(value)):
        return name  # a class as a plain text, like functions
    return _to_configs(type(owner), {field.name: value})[field.name]


def _to_configs(cls: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a class as plain data."""

    def declared(name: str, value: Any) -> Any:
        if not _holds_dataclass(value):
            return None
        from lightning_rl.system.jsonargparse_private import kind_of  # imports the parser

        return kind_of(cls, name)

    return {name: to_config(value, declared(name, value)) for name, value in settings.items()}


def _holds_dataclass(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_dataclass, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_dataclass, value[:LARGEST]))
    return is_dataclass(value) and not isinstance(value, type)


def is_unwritten(value: Any) -> bool:
    """Return whether a value of a config marks a setting that could not be written."""
    return isinstance(value, str) and value.startswith(NOT_WRITTEN)


def _refuse_call(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments that a class does not have; Python reports other errors of the call.

    Raises:
        UnknownSettingError: naming the class, the nearest settings and their documentation.
    """
    settings, name = settings_of_class(cls), cls.__name__
    if settings is None:
        return
    lists = f"help({name}) lists the settings: {', '.join(settings)}."
    for unknown in kwargs.keys() - settings.keys():
        # The parser misreads `Base.__init__(self, ...)` of a user: Python judges such a call.
        if unknown in (settings_of_class(cls.__bases__[0]) or {}) and not _is_ours(cls):
            continue
        matches = get_close_matches(unknown, settings, n=2)
        matches += [long for long in settings if _initials(long) == unknown]
        nearest = ", ".join(f"{match} (see {settings[match].parent.__name__})" for match in matches)
        raise UnknownSettingError(
            f"{name} has no setting '{unknown}'{'; close matches: ' if matches else ''}{nearest}. "
            f"{lists}"
        )
    arguments = _arguments(cls)
    leading = [arg.name for arg in arguments if arg.kind is arg.POSITIONAL_OR_KEYWORD]
    takes_any = any(argument.kind is argument.VAR_POSITIONAL for argument in arguments)
    if len(args) > len(leading) and not takes_any:
        raise UnknownSettingError(
            f"{name} takes only {', '.join(leading) or 'nothing'} by position, but {len(args)} "
            f"values were given: write {name}({', '.join([*leading, 'name=value'])}). {lists}"
        )


def _is_ours(cls: type) -> bool:
    """Return whether a class belongs to this package."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _bound(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Bind the arguments of a call; none if the constructor reports an error."""
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]  # `cls` is the constructed class
    bound = signature.bind_partial(None)
    with suppress(TypeError):
        bound = signature.bind_partial(None, *args, **kwargs)
    # `**kwargs` takes unknown names; positions that were not bound are too many.
    if kwargs.keys() - signature.parameters.keys() or len(bound.args) <= len(args):
        _refuse_call(cls, args, kwargs)
    return bound


def _construction_of(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    path = _path_of(cls) or f"{NOT_WRITTEN}{_words_for(cls)}"
    bound = _bound(cls, args, kwargs)
    settings: dict[str, Any] = {}
    # Without `self`.
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            settings |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            names = _names_behind_star(cls)
            settings |= zip(names, value, strict=False)
            if len(value) > len(names):
                settings[name] = f"{NOT_WRITTEN}arguments without a name"
        else:
            settings[name] = value
    # No config holds spaces: the env has them.
    for name in GIVEN_BY_THE_ENV:
        if isinstance(settings.get(name), gymnasium.Space):
            del settings[name]
    return {"class_path": path, "init_args": _to_configs(cls, settings)}


def _names_behind_star(cls: type) -> list[str]:
    """Return the names of what `*args` passes on, if `**kwargs` takes it by name, too."""
    arguments = _arguments(cls)
    if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return []
    names = {argument.name for argument in arguments}
    settings = (settings_of_class(cls) or {}).items()
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [key for key, setting in settings if setting.kind is by_position and key not in names]


def _is_plain(value: partial[Any]) -> bool:
    return isinstance(value.func, type) and not value.args


def _path_of(obj: Any) -> str | None:
    parts, name = obj.__module__.split("."), obj.__qualname__
    # The shortest path, such as `lightning_rl.PPO`, stays valid when modules move.
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        if getattr(sys.modules.get(module), name, None) is obj:
            return f"{module}.{name}"
    return None


def _words_for(value: Any) -> str:
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
