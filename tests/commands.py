"""Run `rl-cli` and scripts in processes of their own, without the five seconds that each would take to import.

One process imports the package and nothing else, and forks for each that is asked for: what runs then is what
`python -m lightning_rl` runs, from its first line to the interpreter's end, with its own signals, exit code and
children. Where the start itself is the point, a test starts a new process.
"""

import faulthandler
import gc
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Command:
    """A program that runs, and leads a session of its own.

    Args:
        arguments: of the program.
        program: what `python -m` takes, or the path of a script; `rl-cli` where not given.
        env: variables beside those of this process.
        largest_file: bytes that a file may have, as under `ulimit -f`; None for any.

    Attributes:
        pid: of the process.
        returncode: None while it runs, as far as `poll` knows.
    """

    def __init__(self, *arguments, program="lightning_rl", env=None, largest_file=None):
        self.returncode = None
        self._printed = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # closed with it
        self.pid = ask(
            {
                "program": str(program),
                "arguments": list(map(str, arguments)),
                "directory": os.getcwd(),
                "env": dict(os.environ) | (env or {}),
                "largest_file": largest_file,
            },
            [file.fileno() for file in self._printed],
        )

    @property
    def stdout(self):
        """What it has printed so far."""
        return self._read(0)

    @property
    def stderr(self):
        return self._read(1)

    def poll(self):
        """Return the exit code, as `subprocess.Popen` has it; None while it runs."""
        if self.returncode is None:
            self.returncode = ask({"look at": self.pid})
        return self.returncode

    def wait(self, timeout=120):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, f"{self.stdout}{self.stderr}"
            time.sleep(0.01)
        return self

    def wait_for(self, text, timeout=60):
        """Wait until it has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout:
            assert self.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stdout
            time.sleep(0.01)

    def kill(self):
        """End it at once, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def children(self):
        """Return the processes that it has started, and that are still there."""
        return Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()

    def _read(self, i):
        file = self._printed[i].fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()


def rl_cli(*arguments, timeout=120, **kwargs):
    """Run the command to its end."""
    return Command(*arguments, **kwargs).wait(timeout)


class Server(NamedTuple):
    """The process that forks; it ends where the connection is closed, with this process at the latest."""

    process: subprocess.Popen
    connection: socket.socket


@cache
def server():
    ours, its = socket.socketpair()
    command = [sys.executable, "-m", "tests.commands", str(its.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()])
    its.close()
    return Server(process, ours)


def serving():
    """Return the number of that process, which no test is to blame for; nothing before there is one."""
    return {server().process.pid} if server.cache_info().currsize else set()


def end():
    """End that process, and what tests that have failed have left running."""
    if server.cache_info().currsize:
        server().connection.close()
        server().process.wait()
        server.cache_clear()


def ask(what, files=()):
    connection = server().connection
    message = json.dumps(what).encode() + b"\n"
    connection.sendall(message[socket.send_fds(connection, [message], files) :])
    return json.loads(receive(connection)[0])


def receive(connection):
    """Return a line, and the files that came with it; nothing at the end."""
    message, files = b"", []
    while not message.endswith(b"\n"):
        part, more, *_ = socket.recv_fds(connection, 2**16, 2)
        if not part:
            return b"", []
        message, files = message + part, files + more
    return message, files


def serve(connection):
    """Answer until somebody asks for a program; return in the fork that is to be it."""
    alive = set()
    while True:
        message, files = receive(connection)
        if not message:
            break
        asked = json.loads(message)
        if "program" in asked:
            answer = os.fork()
            if answer == 0:
                connection.close()
                return asked, files
            alive.add(answer)
        else:
            pid, status = os.waitpid(asked["look at"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            alive.discard(pid)
        for file in files:
            os.close(file)
        connection.sendall(json.dumps(answer).encode() + b"\n")
    for pid in alive:  # of tests that have failed
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    sys.exit()


def become(asked, files):
    """Be a new process, as far as the program can tell."""
    os.setsid()
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, number)
        os.close(file)
    if asked["largest_file"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["largest_file"],) * 2)
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["env"])
    if asked["env"].get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.path[0] = asked["directory"]
    sys.path[1:1] = filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [asked["program"], *asked["arguments"]]
    rank_zero_only.rank = int(os.environ.get("RANK", 0))  # which Lightning reads as it is imported
    if asked["program"].endswith(".py"):
        sys.path[0] = str(Path(asked["program"]).parent)
        runpy.run_path(asked["program"], run_name="__main__")
    else:
        runpy.run_module(asked["program"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from lightning.pytorch.utilities import rank_zero_only

    import lightning_rl.cli.app  # noqa: F401  # what takes seconds

    os.fsync = os.fstat  # see conftest.py
    gc.freeze()  # or each fork looks for garbage among it, and copies its pages
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
