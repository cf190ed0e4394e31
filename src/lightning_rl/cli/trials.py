"""Run the trials of a sweep as processes of their own, pinned to cores, none of which outlives it."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Name of Linux's `prctl`: the signal that a process gets when the one that began it has ended."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables by which libraries, and the processes that a trial begins, count their threads."""

FORKS = sys.platform == "linux"
"""Whether a trial is a fork of the sweep, which has imported everything: that takes 5 s else.

The sweep itself computes nothing, has no threads and touches no GPU: nothing that a fork spoils.
"""

Begin = Callable[[Sequence[str]], None]
"""Runs a command line of `rl-cli`."""


class TrialProcess:
    """A process that runs `rl-cli`, and ends when this one does, however that ends.

    Args:
        begin: runs the command line.
        arguments: of it.
        cores: that it may use, as many threads as that for its arithmetic; None for all.
        log: file that gets what it prints, at its end.
    """

    def __init__(
        self, begin: Begin, arguments: Sequence[str], cores: Sequence[int] | None, log: Path
    ) -> None:
        self.log = log
        context = multiprocessing.get_context("fork" if FORKS else "spawn")
        self._process = context.Process(
            target=_run, args=(begin, list(arguments), cores, str(log), os.getpid())
        )
        sys.stdout.flush()  # or the fork has it too
        sys.stderr.flush()
        self._process.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code, minus the signal where one has ended it; None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Have it save, and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once, with the processes that it has begun."""
        pid = self._process.pid
        assert pid is not None
        with suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(pid, signal.SIGKILL)  # it leads a group of its own
        self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; return whether it has come."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def last_line(self) -> str:
        """Return the last line that it has printed: of a traceback, the error."""
        try:
            lines = self.log.read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "(said nothing)")


def _run(
    begin: Begin, arguments: list[str], cores: Sequence[int] | None, log: str, sweep: int
) -> None:
    """Be a process of `rl-cli`, from its first line on."""
    os.setsid()  # Ctrl-C in a terminal is the sweep's, which passes it on
    _end_with(sweep)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(i, "w", buffering=1, closefd=False) for i in (1, 2))
    if cores is not None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        os.environ |= dict.fromkeys(THREADS, str(len(cores)))
    sys.argv = ["rl-cli", *arguments]  # which run.json notes
    begin(arguments)


def _end_with(parent: int) -> None:
    """Have the system kill this process when its parent has ended, even by a SIGKILL."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before that was said
        os._exit(1)


def cores_of(jobs: int, each: int) -> list[list[int] | None]:
    """Return the cores of each of so many trials at a time; None where they are not pinned.

    Args:
        jobs: trials at a time.
        each: cores of a trial; 0 to leave them all to the system.
    """
    if each == 0 or not hasattr(os, "sched_getaffinity"):
        return [None] * jobs
    allowed = sorted(os.sched_getaffinity(0))
    return [allowed[i * each : (i + 1) * each] for i in range(jobs)]


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
