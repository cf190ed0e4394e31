"""Start the process that owns a robot, and talk to it."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_rl.extend.errors import EnvFaultError
from lightning_rl.extensions.robots import bus

BEATS_PER_TIMEOUT = 4
"""Heartbeats sent within `heartbeat_s`."""

START_SECONDS = 120.0
"""Time to import the robot's packages, and to connect its motors and cameras."""

EXIT_SECONDS = 5.0
"""Time for the process to stop the robot and to exit."""


class RobotProcess:
    """The process of a robot or of a leader arm, which stops it when the learner is gone.

    A thread sends the heartbeat. So a long update of the policy does not end the process: without
    commands the arm does not move.

    Args:
        settings: `robot`, the import path of a function that makes the object, `kwargs` for it,
            and `heartbeat_s`; for a robot also the settings of `bus.Arm`.
        timeout_s: seconds that an answer may take.
        python: the Python interpreter. Default: this one.

    Attributes:
        described: shapes of the object's features.

    Raises:
        EnvFaultError: the object cannot be made.
    """

    def __init__(
        self, settings: Mapping[str, Any], timeout_s: float, python: str | None = None
    ) -> None:
        self._timeout_s = timeout_s
        ours, theirs = socket.socketpair()
        reads, self._beats = os.pipe()
        # A full pipe must not block the heartbeat thread.
        os.set_blocking(self._beats, False)
        files = (theirs.fileno(), reads)
        # Another Python finds the user's modules in the working directory, but not our packages.
        paths = [os.getcwd(), *(sys.path if python is None else ())]
        self._process = subprocess.Popen(
            [python or sys.executable, "-P", str(Path(bus.__file__)), *map(str, files)],
            pass_fds=files,
            start_new_session=True,  # Ctrl+C, or a closed terminal, is the learner's affair
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        # Close our copies of the child's ends: otherwise its end would not end the pipe.
        theirs.close()
        os.close(reads)
        self._commands: Connection | None = Connection(ours.detach())
        self._closing = threading.Event()
        period = settings["heartbeat_s"] / BEATS_PER_TIMEOUT
        self._thread = threading.Thread(
            target=self._beat, args=(period,), name="robot heartbeat", daemon=True
        )
        self._thread.start()
        self.described: Any = self._ask(dict(settings), START_SECONDS)

    def ask(self, command: str, *arguments: Any) -> Any:
        """Return the answer to a command: a method of `bus.Arm` or `bus.Leader`.

        Raises:
            EnvFaultError: the robot failed, or does not answer; its process has stopped it.
        """
        patience = START_SECONDS if command == "connect" else self._timeout_s
        return self._ask((command, *arguments), patience)

    def close(self) -> None:
        """Stop the robot as set, and end the process. May be called more than once."""
        if self._commands is None:
            return
        with suppress(OSError):
            self._commands.send(("close",))
        self._end()

    def _ask(self, message: Any, patience: float) -> Any:
        if self._commands is None:
            raise EnvFaultError("The robot's process has ended: make a new env.")
        try:
            with suppress(OSError):  # it has ended; its answer says why
                self._commands.send(message)
            if not self._commands.poll(patience):
                self._process.kill()
                raise self._fault(
                    f"The robot did not answer within {patience:g} s: a call of it hangs. "
                    "Its process was killed; the motors keep their last command."
                )
            kind, answer = self._commands.recv()
        except (EOFError, OSError):
            # The exit code exists only after the process has ended.
            code = self._process.wait(EXIT_SECONDS)
            raise self._fault(f"The robot's process ended with exit code {code}.") from None
        if kind != "ok":
            raise self._fault(str(answer))
        return answer

    def _fault(self, text: str) -> EnvFaultError:
        self._end()
        return EnvFaultError(text)

    def _end(self) -> None:
        assert self._commands is not None
        with suppress(EOFError, OSError):
            while self._commands.poll(EXIT_SECONDS):
                self._commands.recv()  # or the process would wait with an answer to send
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._process.kill()
        self._process.wait()
        self._closing.set()
        self._thread.join()
        os.close(self._beats)
        self._commands.close()
        self._commands = None

    def _beat(self, period: float) -> None:
        while not self._closing.wait(period):
            with suppress(BlockingIOError):  # the process does not read while the robot is slow
                try:
                    os.write(self._beats, b".")
                except BrokenPipeError:
                    return
