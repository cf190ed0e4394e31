"""Wait for another thread, and let signal handlers run meanwhile."""

import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.5
"""The longest single wait: Python runs no signal handler in one that began just after the signal.

It is notified at once of what it waits for all the same.
"""


def wait_for(
    changed: threading.Condition, possible: Callable[[], bool], timeout_s: float
) -> tuple[bool, float]:
    """Wait, with the lock held, until something is possible.

    Args:
        changed: is notified when it may have become possible.
        possible: tells whether it is.
        timeout_s: for how long, in seconds; `inf` for ever.

    Returns:
        whether it is possible, and the seconds waited, less those in which the process stood still.
    """
    came, passed, last = False, 0.0, time.perf_counter()
    while not came and passed <= timeout_s:
        came = changed.wait_for(possible, min(timeout_s - passed, LOOK_SECONDS))
        now = time.perf_counter()
        # A longer wait was none: the process was stopped, or the machine slept.
        passed += min(now - last, 2 * LOOK_SECONDS)
        last = now
    return came, passed
