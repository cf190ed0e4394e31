"""Wait for another thread without blocking signal handlers."""

import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.5
"""Maximum of a single wait, in seconds: Python runs no signal handler during a wait."""


def wait_for(
    changed: threading.Condition, possible: Callable[[], bool], timeout_s: float
) -> tuple[bool, float]:
    """Wait until `possible()`, at most `timeout_s` seconds (`inf`: no limit); return whether it is.

    The lock is held at the call; `changed` is notified of changes. Also return the seconds waited,
    without the time that the process was suspended.
    """
    came, passed, last = False, 0.0, time.perf_counter()
    while not came and passed <= timeout_s:
        came = changed.wait_for(possible, min(timeout_s - passed, LOOK_SECONDS))
        now = time.perf_counter()
        # A longer wait means that the process was stopped or the machine slept.
        passed += min(now - last, 2 * LOOK_SECONDS)
        last = now
    return came, passed
