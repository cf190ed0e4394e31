"""Refuse what the parser takes for any setting: a null, and a whole number of any size."""

import inspect
import types
import typing
from typing import Any

from jsonargparse import Namespace

from lightning_rl.cli.messages import SECTIONS, article, imported, parameters_of
from lightning_rl.cli.parsing import UsageError


def check_values(config: Namespace) -> None:
    """Refuse a null where type and default say that a setting is never off, and numbers over 2^63.

    Args:
        config: as it was parsed.

    Raises:
        UsageError: naming the setting, what it may be, and its default.
    """
    for section, cls in SECTIONS.items():
        _check(cls, config.get(section), section)
    for section in ("model", *SECTIONS):
        _walk(config.get(section), section)


def _walk(value: Any, path: str) -> None:
    if isinstance(value, list):
        for i, one in enumerate(value):
            _walk(one, f"{path}.{i}")
    elif isinstance(value, Namespace):
        if isinstance(value.get("class_path"), str):
            value, cls = value.get("init_args"), imported(value.class_path)
            if isinstance(cls, type):
                _check(cls, value, path)
        for name, one in vars(value or Namespace()).items():
            _walk(one, f"{path}.{name}")


def _check(cls: type, settings: Any, path: str) -> None:
    """Check the settings of one class."""
    known = parameters_of(cls)
    for name, value in vars(settings or Namespace()).items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UsageError(f"{path}.{name} must lie below 2**63, got {value}.")
        if value is None and name in known and _is_never_null(known[name]):
            raise UsageError(
                f"{path}.{name} must be {_allowed(known[name].annotation)}, got null; leave it out "
                f"for {known[name].default}."
            )


def _allowed(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_allowed, args))
    return article(getattr(origin or kind, "__name__", str(kind)))


def _is_never_null(parameter: inspect.Parameter) -> bool:
    """Tell whether a parameter has a default, and neither that nor its type may be null.

    The parser asks for those without a default itself, or the command line sets them.
    """
    kind = parameter.annotation
    return (
        parameter.default not in (None, parameter.empty)
        and kind not in (Any, None, parameter.empty)
        and not isinstance(kind, str | typing.TypeVar)
        and type(None) not in typing.get_args(kind)
    )
