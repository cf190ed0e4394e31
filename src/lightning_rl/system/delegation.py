"""Delegate methods of a wrapper to the object that it wraps."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def delegated(method: Method, to: str) -> Method:
    """Return a method that calls the method of the same name of the attribute `to`."""
    return cast(Method, property(lambda wrapper: getattr(getattr(wrapper, to), method.__name__)))
