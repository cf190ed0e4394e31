"""Run the trials of a sweep as processes of this machine, none of which outlives it."""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lightning_rl.system.errors import require

PR_SET_PDEATHSIG = 1
"""Name of Linux's `prctl`: the signal that a process gets when the one that began it has ended."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables by which libraries, and the processes that a trial begins, count their threads."""

POLL_SECONDS = 0.05
"""Between two looks at trials that run."""

Begin = Callable[[Sequence[str]], None]
"""Runs a command line of `rl-cli`."""


class TrialProcess:
    """A process that runs `rl-cli`, and ends when this one does, however that ends.

    It is a fork of this one, which has imported everything: that takes 5 s else. A sweep computes
    nothing, starts no thread and touches no GPU, which a fork could not go on with. It is not one
    of `multiprocessing`, in which the env of a trial would take itself for a worker's.

    Args:
        begin: runs the command line.
        arguments: of it.
        cores: that it may use, as many threads as that for its arithmetic; None for all.
        log: file that gets what it prints, at its end.

    Attributes:
        exit_code: minus the signal where one has ended it; None while it runs, as far as `ended`
            knows.

    Raises:
        ConfigurationError: on a system that does not fork.
    """

    def __init__(
        self, begin: Begin, arguments: Sequence[str], cores: Sequence[int] | None, log: Path
    ) -> None:
        require(hasattr(os, "fork"), "A sweep needs a system that forks, as Linux and macOS do.")
        self._log = log
        self.exit_code: int | None = None
        sweep = os.getpid()
        sys.stdout.flush()  # or the fork has it too
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _be_trial(begin, list(arguments), cores, log, sweep)

    def ended(self) -> bool:
        """Return whether it has ended."""
        if self.exit_code is None:
            ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._pid, ended) is not None:
                self._kill_group()  # processes of its own that it has left; its number is still its
                self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.exit_code is not None

    def terminate(self) -> None:
        """Have it save, and end."""
        if not self.ended():
            os.kill(self._pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with the processes that it has begun."""
        if not self.ended():
            self._kill_group()
            os.kill(self._pid, signal.SIGKILL)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it leads none yet, or none is left
            os.killpg(self._pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; return whether it has come."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.ended()

    def last_line(self) -> str:
        """Return the last line that it has printed: of a traceback, the error."""
        try:
            lines = self._log.read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "(said nothing)")


def _be_trial(
    begin: Begin, arguments: list[str], cores: Sequence[int] | None, log: Path, parent: int
) -> NoReturn:
    """Be a process of `rl-cli`, from its first line to its end, but for one that has imports.

    Args:
        begin: runs the command line.
        arguments: of it.
        cores: see `TrialProcess`.
        log: likewise.
        parent: number of the process that has begun this one, and with which it ends.
    """
    code = 1
    try:
        os.setsid()  # Ctrl-C in a terminal is the sweep's, which passes it on
        _end_with(parent)
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
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # whatever it is, it must not go on as the sweep
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


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
