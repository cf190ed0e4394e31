"""Run the trials of a sweep as child processes that end with this process."""

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

from lightning_rl.extend.errors import require

PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`: the signal at the end of the parent process."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables with the number of threads of libraries and of a trial's processes."""

POLL_SECONDS = 0.05
"""Seconds between checks of running trials."""

Begin = Callable[[Sequence[str]], None]
"""Runs a command line of `rl-cli`."""


class TrialProcess:
    """A forked process that runs `rl-cli`, and always ends with this process.

    Args:
        begin: runs the command line.
        arguments: arguments of the command line.
        threads: number of threads of libraries, in each process of the trial.
        log: file for its output, which is appended.

    Attributes:
        exit_code: negative for a signal; None until `ended` sees the end.
    """

    def __init__(self, begin: Begin, arguments: Sequence[str], threads: int, log: Path) -> None:
        # A fork has all imports, which saves 5 s, and is safe, because the sweep starts no thread
        # and uses no GPU. Do not use `multiprocessing`: the env of a trial would take its process
        # for a worker.
        require(hasattr(os, "fork"), "A sweep needs a system that forks, as Linux and macOS do.")
        self._log = log
        self.exit_code: int | None = None
        sweep = os.getpid()
        sys.stdout.flush()  # otherwise the fork prints the buffer again
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _be_trial(begin, list(arguments), threads, log, sweep)

    def ended(self) -> bool:
        if self.exit_code is None:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._pid, flags) is not None:
                # Kill remaining children before waitpid: its number cannot be reused yet.
                self._kill_group()
                self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.exit_code is not None

    def terminate(self) -> None:
        if not self.ended():
            os.kill(self._pid, signal.SIGTERM)

    def kill(self) -> None:
        if not self.ended():
            self._kill_group()
            os.kill(self._pid, signal.SIGKILL)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # no process group yet, or empty
            os.killpg(self._pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.ended()

    def last_line(self) -> str:
        """Return the last line of the output; for a traceback, the error."""
        try:
            lines = self._log.read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "(no output)")


def _be_trial(begin: Begin, arguments: list[str], threads: int, log: Path, parent: int) -> NoReturn:
    code = 1
    try:
        os.setsid()  # Ctrl-C reaches only the sweep, which passes it on
        _end_with(parent)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
        sys.stdout, sys.stderr = (os.fdopen(i, "w", buffering=1, closefd=False) for i in (1, 2))
        os.environ |= dict.fromkeys(THREADS, str(threads))
        sys.argv = ["rl-cli", *arguments]  # for run.json
        begin(arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # the fork must not continue as the sweep
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
