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
        whether it is possible, and the seconds waited.
    """
    start = time.perf_counter()
    came, passed = False, 0.0
    while not came and passed <= timeout_s:
        came = changed.wait_for(possible, min(timeout_s - passed, LOOK_SECONDS))
        passed = time.perf_counter() - start
    return came, passed
