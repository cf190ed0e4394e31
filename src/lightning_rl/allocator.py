"""Have the process keep memory that is freed, for the next tensors."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's `mallopt`."""

LARGEST_KEPT = 2**30
"""Bytes of a block; a larger one is given back when it is freed."""


def keep_freed_memory() -> bool:
    """Tell the C library to give memory back late; return whether it does.

    glibc hands the large blocks of an update's activations back to the system at once, and asks for
    them anew at the next minibatch: a page fault for each 4 KiB of them. For a network that looks
    at pictures on a CPU these took 40 % of the update. What a process once needed it keeps.

    Nothing is done where there is no glibc, nor where the environment sets `MALLOC_*` itself.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT), mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return all(done)
