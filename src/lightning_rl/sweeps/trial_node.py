"""Run a trial of a sweep on a node of a Ray cluster, as a process that ends with the sweep."""

import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning_rl.collectors.ray_cluster import check_versions
from lightning_rl.sweeps.trials import THREADS, last_line_of
from lightning_rl.system.errors import require
from lightning_rl.system.files import check_writable

PROGRAM = ("-m", "lightning_rl.sweeps.trial_program")
"""What Python is started with to be a trial."""

OF_A_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE")
"""Variables by which Ray tells its workers what they are; a trial is none, and may use Ray."""

READ = ("logs/metrics.csv", "checkpoints/last.ckpt", "run.json")
"""What a sweep reads of a run once it has ended."""


class Order(NamedTuple):
    """What a node is told of a trial.

    Attributes:
        arguments: of `rl-cli`.
        runs: how the names of its run directories begin, with that of the sweep.
        log: file for what it prints.
        mark: a file in the directory of the sweep, made for the node to find there.
        cwd: where the sweep was begun; the other paths are relative to it.
        threads: of its arithmetic; 0 to leave them to libraries.
        versions: of packages, that the sweep has.
    """

    arguments: Sequence[str]
    runs: str
    log: str
    mark: str
    cwd: str
    threads: int
    versions: dict[str, str]


class Outcome(NamedTuple):
    """What a node says of a trial that has ended.

    Attributes:
        code: its exit code, minus the signal where one has ended it.
        last_line: that it has printed.
        sizes: of the files that the sweep will read, in bytes, by their paths.
    """

    code: int
    last_line: str
    sizes: dict[str, int]


class TrialActor:
    """The process of Ray's that has begun a trial.

    It imports little: the trial is a process of its own, which can do all that one of `rl-cli` can,
    signals included, and which the system kills when this one ends.
    """

    def __init__(self) -> None:
        # The system kills a process when the *thread* that began it ends: this one waits for it.
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._pid: int | None = None  # of the trial, while it runs
        self._signal: int | None = None

    def begin(self, order: Order) -> str:
        """Begin a trial; return the name of this node.

        Raises:
            ConfigurationError: where other versions are installed here, or the directory of the
                sweep is not to be seen or written.
        """
        check_versions(order.versions, "sweep")
        _check_directory(order)
        self._outcome = self._thread.submit(self._run, order)
        return platform.node()

    def end(self) -> Outcome:
        """Wait for its end."""
        return self._outcome.result()

    def send(self, number: int) -> None:
        """Send it a signal; SIGKILL goes to the processes that it has begun, too."""
        with self._lock:
            self._signal = number
            self._send()

    def _send(self) -> None:
        if self._pid is None or self._signal is None:
            return
        if self._signal == signal.SIGKILL:
            self._kill_group()
        with suppress(ProcessLookupError):
            os.kill(self._pid, self._signal)

    def _kill_group(self) -> None:
        assert self._pid is not None
        with suppress(ProcessLookupError, PermissionError):  # it leads none yet, or none is left
            os.killpg(self._pid, signal.SIGKILL)

    def _run(self, order: Order) -> Outcome:
        env = {name: text for name, text in os.environ.items() if name not in OF_A_WORKER}
        if order.threads:
            env |= dict.fromkeys(THREADS, str(order.threads))
        command = [sys.executable, *PROGRAM, str(os.getpid()), order.log, *order.arguments]
        process = subprocess.Popen(command, cwd=order.cwd, env=env, stdin=subprocess.DEVNULL)
        with self._lock:
            self._pid = process.pid
            self._send()  # which came before there was one
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._kill_group()  # what it has left; its number is still its own
            self._pid = None
        code = process.wait()
        return Outcome(code, last_line_of(Path(order.cwd, order.log)), sizes_of(order))


def sizes_of(order: Order) -> dict[str, int]:
    """Return how large the files are that the sweep will read, by their paths."""
    runs = Path(order.cwd, order.runs)
    found = (path for name in READ for path in runs.parent.glob(f"{runs.name}*/{name}"))
    return {os.path.relpath(path, order.cwd): path.stat().st_size for path in found}


def _check_directory(order: Order) -> None:
    """Refuse a node that does not see, or cannot write, what the sweep does.

    Raises:
        ConfigurationError: naming it.
    """
    require(
        os.path.isdir(order.cwd),
        f"The node {platform.node()} has no directory {order.cwd}, in which the sweep was begun "
        "and its trials would run: begin it in one that all nodes see at the same path.",
    )
    directory = Path(order.cwd, order.mark).parent
    require(
        Path(order.cwd, order.mark).is_file(),
        f"The node {platform.node()} does not see {directory}, where trials write: set "
        "--output_dir to a directory that all nodes see at the same path.",
    )
    check_writable(directory)
