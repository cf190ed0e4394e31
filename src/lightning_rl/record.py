"""Record what a constructor took, for the settings that a run writes down."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jsonargparse import ArgumentParser

import lightning_rl

LEFT_OUT = ("self", "args", "kwargs", "observation_space", "action_space")
"""Arguments that are no settings of their own; the spaces follow from the env."""


class Recorded:
    """Remembers what its constructor was given, those of its subclasses included.

    It is kept in plain values, so that a copy or a pickled object takes nothing else along.
    """

    _recorded: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the object; nothing is asked of a subclass's constructor."""
        made = super().__new__(cls)
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        settings = {name: plain(value) for name, value in given.items() if name not in LEFT_OUT}
        # Not by `setattr`, which an nn.Module has to itself until its constructor has run.
        object.__setattr__(made, "_recorded", settings)
        return made


def settings_of(made: Recorded) -> dict[str, Any]:
    """Return what a constructor took, defaults included, as a tree of plain values."""
    parser = ArgumentParser(exit_on_error=False)
    # It finds the defaults behind `**kwargs` too, as they are where a base class is called.
    parser.add_class_arguments(type(made), fail_untyped=False)
    defaults = {name: plain(value) for name, value in parser.get_defaults().as_dict().items()}
    taken = defaults | made._recorded
    return {name: value for name, value in taken.items() if name not in LEFT_OUT}


def plain(value: Any) -> Any:
    """Return a tree of numbers, flags, texts and None that says what a value is.

    A recorded object, and a `functools.partial`, become `{class_path: ..., init_args: ...}`, as in
    a configuration; any other class, function or object becomes its import path.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    if isinstance(value, Recorded):
        return {"class_path": _path(type(value)), "init_args": settings_of(value)}
    if isinstance(value, partial):
        given = {str(i): child for i, child in enumerate(value.args)} | value.keywords
        return {"class_path": _path(value.func), "init_args": plain(given)}
    return _path(value if hasattr(value, "__qualname__") else type(value))


def _path(of: Callable[..., Any]) -> str:
    """Return an import path, as short as a configuration has it."""
    name, home = of.__qualname__, of.__module__
    exported = name in lightning_rl.__all__ and getattr(lightning_rl, name) is of
    return f"{'lightning_rl' if exported else home}.{name}"
