"""Name the errors that a user can cure.

The message says what was wrong, what is allowed, and what to do.
"""

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """A setting, a file or an environment is not usable as given.

    `rl-cli` prints the message without a traceback.
    """


def closest(name: str, allowed: Iterable[str], *, most: int = 4) -> str:
    """Return `"; close matches: a, b"` for a misspelt name, or an empty string."""
    matches = difflib.get_close_matches(name, list(allowed), n=most, cutoff=0.6)
    return f"; close matches: {', '.join(matches)}" if matches else ""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigurationError(message)` unless the condition holds."""
    if not condition:
        raise ConfigurationError(message)
