"""Set how the process computes, in memory and in the smallest numbers, and end it by force."""

import ctypes
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

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


def flush_denormals(wanted: bool) -> bool:
    """Have this thread, and those that it starts, take denormal numbers for zero, or not.

    Below 1.2e-38 a float32 has fewer digits the smaller it is. Intel's CPUs take a hundred cycles
    or more for each operation on one, and the backward pass of a sharp softmax is full of them.

    Returns:
        whether they are taken for zero now; not every CPU can.
    """
    return torch.set_flush_denormal(wanted) and wanted


def flushes_denormals() -> bool:
    """Tell whether this thread takes denormal numbers for zero."""
    smallest = torch.full((), sys.float_info.min, dtype=torch.float64)
    return float(smallest / 2) == 0.0


LAST_ACT_SECONDS = 2.0
"""How long what is to be done before the process is ended may take."""

_last_acts: list[Callable[[Exception], object]] = []


@contextmanager
def last_act(act: Callable[[Exception], object]) -> Iterator[None]:
    """Have `end_process` call a function with the error, while the context is open.

    It is called from another thread than the one that has opened the context, which hangs.
    """
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def end_process(error: Exception) -> None:
    """End the process from any thread, where its main thread cannot: print why, and leave with 1.

    Processes that it has started are killed; what else has to be done, see `last_act`.
    """
    sys.stderr.write(
        f"\nrl-cli: error: {error}\nNothing could interrupt it, and the process was ended.\n"
    )
    sys.stderr.flush()
    for process in multiprocessing.active_children():
        process.kill()
    helper = threading.Thread(target=_act, args=(error,), daemon=True)
    helper.start()
    helper.join(LAST_ACT_SECONDS)
    os._exit(1)


def _act(error: Exception) -> None:
    for act in reversed(_last_acts):
        with suppress(Exception):
            act(error)
