"""Name the errors that a user can cure.

The message says what was wrong, what is allowed, and what to do.
"""

import difflib
import re
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """A setting, a file or an environment is not usable as given.

    `rl-cli` prints the message without a traceback. A Box of many bounds is written by its shape:
    Gymnasium writes that of a humanoid in 84 lines.
    """

    def __str__(self) -> str:
        return BOUNDS.sub("Box(..., ", super().__str__())


BOUNDS = re.compile(r"Box\(\[[^()]{100,}\], (?=\()")
"""The bounds of a Box, as Gymnasium writes them where they differ, and are many."""


class EnvFaultError(ConfigurationError):
    """An env did what it must not: returned something else than announced, or hung."""


class WriteError(ConfigurationError, OSError):
    """A file cannot be written: the disk is full, or the directory takes no files."""


def closest(name: str, allowed: Iterable[str], *, most: int = 4) -> str:
    """Return `"; close matches: a, b"` for a misspelt name, or an empty string."""
    matches = difflib.get_close_matches(name, list(allowed), n=most, cutoff=0.6)
    return f"; close matches: {', '.join(matches)}" if matches else ""


def require(condition: bool, message: str) -> None:
    """Refuse what does not fulfil a condition.

    Raises:
        ConfigurationError: with the message, unless the condition holds.
    """
    if not condition:
        raise ConfigurationError(message)


def check_range(
    name: str,
    value: float | None,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a number outside an interval, whose ends are in it (`least`, `most`) or not.

    None stands for a setting that is switched off, and is in every interval.

    Raises:
        ConfigurationError: naming the setting, the value and what is allowed.
    """
    low = least if above is None else above
    high = most if below is None else below
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
        allowed = f"be at least {least}" if above is None else f"be greater than {above}"
    raise ConfigurationError(f"{name} must {allowed}, got {value}.")
