"""Set how the process treats memory, threads and denormal numbers, and end it by force."""

import ctypes
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from lightning_rl.system.errors import EnvFaultError
from lightning_rl.system.machine import MachineSettings, settings
from lightning_rl.system.output import tell
from lightning_rl.system.torch_private import devices

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""

LARGEST_KEPT = 2**30
"""Bytes; glibc returns larger blocks to the system when they are freed."""


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory; return whether it does.

    Otherwise glibc returns the activations of an update to the system, and requests them again,
    with a page fault for each 4 KiB: 40 % of the update of an image network on a CPU. Nothing
    changes without glibc, or if the environment sets `MALLOC_*`.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either threshold also ends glibc's own adaptation.
    done = mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT), mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return all(done)


def flush_denormals(enabled: bool) -> bool:
    """Treat denormals as zero in this thread and its new threads; return whether the CPU can."""
    return torch.set_flush_denormal(enabled) and enabled


def flushes_denormals() -> bool:
    """Return whether this thread treats denormals as zero."""
    smallest = torch.full((), sys.float_info.min, dtype=torch.float64)
    return float(smallest / 2) == 0.0


class Computing(NamedTuple):
    """How a thread computes: its number of threads, denormals and optimisations of the process.

    Matrix products of a new thread take all cores until torch has set the number there, and sum in
    another order on some CPUs.
    """

    threads: int
    flushes_denormals: bool
    machine: MachineSettings

    @classmethod
    def here(cls) -> "Computing":
        """Return how the calling thread computes."""
        return cls(torch.get_num_threads(), flushes_denormals(), settings())

    def apply(self) -> None:
        """Make the calling thread, of this or another process, compute in this way."""
        torch.set_num_threads(self.threads)
        flush_denormals(self.flushes_denormals)
        self.machine.apply()


LAST_ACT_SECONDS = 2.0
"""Seconds for the functions of `before_forced_exit`."""

_last_acts: list[Callable[[Exception], object]] = []


@contextmanager
def before_forced_exit(act: Callable[[Exception], object]) -> Iterator[None]:
    """Make `end_process` call a function, in another thread, while the context is open."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def end_process(error: Exception) -> None:
    """Print the error, and end the process and its children from any thread, with status 1."""
    consequence = "The call could not be interrupted, so the process ends."
    tell(f"\nrl-cli: error: {error}\n{consequence}", sys.stderr)
    for process in multiprocessing.active_children():
        process.kill()
    # With a time limit, because the functions may wait for what hangs.
    helper = threading.Thread(target=_act, args=(error,), daemon=True)
    helper.start()
    helper.join(LAST_ACT_SECONDS)
    # `sys.exit` would wait for threads that hang.
    os._exit(1)


def _act(error: Exception) -> None:
    # The innermost context first.
    for act in reversed(_last_acts):
        with suppress(Exception):
            act(error)


@contextmanager
def package_defaults() -> Iterator[None]:
    """Make tensors float32 on the CPU, also if a script has set other defaults in torch."""
    dtype = torch.get_default_dtype()
    # `torch.get_default_device()` takes 4 µs.
    if dtype is torch.float32 and devices.CURRENT_DEVICE is None:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def restore_defaults(owner: str) -> None:
    """Undo changes that would give policy and rollouts another dtype or device."""
    changes: list[tuple[str, object, str]] = []
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        torch.set_default_dtype(torch.float32)
        changes.append(("dtype", dtype, "torch.float32"))
    if (device := torch.get_default_device()).type != "cpu":
        torch.set_default_device(None)
        changes.append(("device", device, "the CPU"))
    for name, value, default in changes:
        warnings.warn(
            f"The env of {owner}, or a module that it imports, set torch's default {name} to "
            f"{value}, which all tensors of the run would get: it is {default} again. Remove "
            f"torch.set_default_{name}, and make the env's tensors with {name}={value}.",
            stacklevel=2,
        )


def exit_of_env(name: str, error: SystemExit) -> EnvFaultError:
    """Return the error for an env that called `sys.exit`, which would end the run as a success."""
    return EnvFaultError(
        f"{name} called sys.exit({'' if error.code is None else error.code}), which would end the "
        "run without an error. To end an episode return terminated or truncated, and to report a "
        "fault raise an exception."
    )
