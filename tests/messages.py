"""Assert messages by what they name: the setting, the value, the allowed set, the cure; not by their sentence."""

import re
from contextlib import contextmanager

import pytest

from lightning_rl.system.errors import ConfigurationError


@contextmanager
def refused(error=ConfigurationError, *, names):
    """Assert that the block raises an error, or issues a warning, whose message has all names.

    Args:
        error: class of the error or warning, or a tuple of classes.
        names: what the message names, in any order: a tuple, or one object. Their `str` counts.

    Yields:
        `pytest.ExceptionInfo`, or for warnings `pytest.WarningsRecorder`.
    """
    classes = error if isinstance(error, tuple) else (error,)
    names = names if isinstance(names, tuple) else (names,)
    if not issubclass(classes[0], Warning):
        with pytest.raises(error) as caught:
            yield caught
        assert_names(
            "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])]), *names
        )
        return
    try:
        every = "(?s)" + "".join(f"(?=.*{pattern(name)})" for name in names)
        with pytest.warns(error, match=every) as caught:
            yield caught
    except pytest.fail.Exception:
        for warning in caught.list:
            if issubclass(warning.category, error):
                assert_names(str(warning.message), *names)
        raise


def assert_names(text, *names):
    """Assert that a text has all names, as whole words: 4 is not in 14, 0.4 or 4,000."""
    if "rl-cli: error:" in names:
        assert "Traceback" not in str(text)
    missing = [str(name) for name in names if not re.search(pattern(name), str(text))]
    if missing:
        pytest.fail(f"{missing} not named by:\n{text}")


def pattern(name):
    """Return the regular expression for a name; its blanks may be line breaks."""
    text = r"\s+".join(map(re.escape, str(name).split()))
    left = r"(?<![\w])(?<!\d[.,])" if re.match(r"\w", str(name)) else ""
    return left + text + (r"(?![\w])(?![.,]\d)" if re.search(r"\w$", str(name)) else "")
