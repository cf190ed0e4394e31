"""Errors that users can cure: the message names the problem, the allowed values and the cure."""

import difflib
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any


class ConfigurationError(ValueError):
    """A setting, a file or an environment is not usable; `rl-cli` prints no traceback."""

    def __str__(self) -> str:
        return BOUNDS.sub("Box(..., ", super().__str__())


BOUNDS = re.compile(r"Box\(\[[^()]{100,}\], (?=\()")
"""Long bounds of a Box: for a humanoid, Gymnasium prints 84 lines."""


class EnvFaultError(ConfigurationError):
    """An env broke its contract: it returned unexpected values, or it hung."""


class WriteError(ConfigurationError, OSError):
    """A file cannot be written: the disk is full, or the directory is not writable."""


def closest(name: str, allowed: Iterable[str], *, limit: int = 4) -> str:
    """Return `"; close matches: a, b"` for a misspelt name, or an empty string."""
    matches = difflib.get_close_matches(name, list(allowed), n=limit, cutoff=0.6)
    return f"; close matches: {', '.join(matches)}" if matches else ""


def reason_of(error: BaseException) -> str:
    """Return the text of a library's error in one line, for a message; without a text its type."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def require(condition: bool, message: str) -> None:
    """Raise an error unless a condition holds.

    Raises:
        ConfigurationError: with the message.
    """
    if not condition:
        raise ConfigurationError(message)


def check_range(
    name: str,
    value: float | None,
    *,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a number outside an interval with closed (`minimum`, `maximum`) or open ends.

    None, a setting that is switched off, always passes.

    Raises:
        ConfigurationError: naming the setting, the value and the allowed interval.
    """
    low = minimum if above is None else above
    high = maximum if below is None else below
    if value is None or (
        (low is None or (value >= low if above is None else value > low))
        and (high is None or (value <= high if below is None else value < high))
    ):
        return
    if high is not None:
        allowed = (
            f"lie in {'[' if above is None else '('}{low}, {high}{']' if below is None else ')'}"
        )
    elif above == 0:
        allowed = "be positive"
    else:
        allowed = f"be at least {minimum}" if above is None else f"be greater than {above}"
    raise ConfigurationError(f"{name} must {allowed}, got {value}.")


def import_extra(module: str, missing: str) -> Any:
    """Import a module that an extra of this package installs.

    Raises:
        ConfigurationError: `missing` and the reason, if the import fails.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{missing} ({error})") from error
