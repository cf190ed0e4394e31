"""Run `rl-cli` and scripts in processes of their own, without five seconds of imports for each.

A server process imports the package, and forks for each command. The fork runs what `python -m lightning_rl` runs,
from its first line to the interpreter's end, with its own signals, exit code and children. Tests of the start itself
start a new process.
"""

import faulthandler
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Command:
    """A running program, which leads its own session.

    Args:
        arguments: arguments of the program.
        program: name for `python -m`, or the path of a script. Default: `rl-cli`.
        env: variables in addition to those of this process.
        largest_file: size limit of files in bytes, as under `ulimit -f`. Default: none.

    Attributes:
        pid: process id.
        returncode: exit code; None until `poll` sees the end.
    """

    def __init__(self, *arguments, program="lightning_rl", env=None, largest_file=None):
        self.returncode = None
        self._printed = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # closed with the command
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
        """Output so far."""
        return self._read(0)

    @property
    def stderr(self):
        return self._read(1)

    def poll(self):
        """Return the exit code like `subprocess.Popen`; None while the program runs."""
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
        """Wait until the program has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout:
            assert self.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stdout
            time.sleep(0.01)

    def kill(self):
        """Kill the program, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def children(self):
        """Return the living child processes of the program."""
        return Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()

    def _read(self, i):
        file = self._printed[i].fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()


PARSERS = {}
"""What `RLCLI.setup_parser` has made, by the subcommand."""


def keep_parsers():
    """Build the parser of a subcommand once in this process: it takes a third of a command's time.

    A page of help changes its parser, which is then built anew.
    """
    from lightning_rl.cli.app import RLCLI
    from lightning_rl.cli.parsing import asks_for_help

    setup, parse = RLCLI.setup_parser, RLCLI.parse_arguments

    def setup_parser(self, *settings):
        if self._asked in PARSERS:
            vars(self).update(PARSERS[self._asked])
            return
        before = set(vars(self))
        setup(self, *settings)
        PARSERS[self._asked] = {key: vars(self)[key] for key in vars(self).keys() - before}

    def parse_arguments(self, parser, args):
        if asks_for_help(args):
            del PARSERS[self._asked]
        parse(self, parser, args)

    RLCLI.setup_parser, RLCLI.parse_arguments = setup_parser, parse_arguments


def rl_cli(*arguments, timeout=120, **kwargs):
    """Run the command to its end."""
    return Command(*arguments, **kwargs).wait(timeout)


SHARED = "TESTS_COMMANDS_SERVER"
"""Environment variable with the address of one server for all workers of a run of the tests."""


class Server(NamedTuple):
    """The process that forks, unless it is shared; it ends when the connection closes."""

    process: subprocess.Popen | None
    connection: socket.socket


@cache
def server():
    if SHARED in os.environ:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[SHARED])
        return Server(None, connection)
    ours, its = socket.socketpair()
    return Server(start(its), ours)


def start(*sockets):
    """Start a server that reads from its only socket, or from all that connect to its first one."""
    numbers = [one.fileno() for one in sockets]
    command = [sys.executable, "-m", "tests.commands", *map(str, numbers)]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=numbers)
    for one in sockets:
        one.close()
    return process


@contextmanager
def shared_server():
    """Start a server for the workers that this process starts, when the first of them connects."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        os.environ[SHARED] = f"{folder}/socket"
        listener.bind(os.environ[SHARED])
        listener.listen()
        ours, its = socket.socketpair()
        processes = []

        def start_for_the_first():
            if listener in select.select([listener, its], [], [])[0]:
                processes.append(start(listener, its))

        thread = threading.Thread(target=start_for_the_first, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ours.close()
            thread.join()
            for process in processes:
                process.wait()


PORTS = count()


def free_port():
    """Return a port of this machine that nobody is given between this call and its use.

    It is below the ports that the system gives to those who ask for any, and apart from those of other workers.
    """
    while True:
        port = 15_000 + (97 * os.getpid() + next(PORTS)) % 15_000
        with socket.socket() as free, suppress(OSError):
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            return port


def children_of(pid):
    """Return the ids of the processes that a process, in any of its threads, has started and not awaited."""
    children = set()
    for threads in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended since
            children |= set(map(int, threads.read_text().split()))
    return children


def is_running(pid):
    """Whether a process exists and has not ended; its parent may not have noticed the end."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def wait_until(condition, seconds=200, of=None):
    """Wait for a condition, which the running command `of` brings about; return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert of is None or of.poll() is None, of.stdout + of.stderr
        assert time.monotonic() < deadline, of and of.stdout + of.stderr
        time.sleep(0.02)
    return value


def killed_around_call(work, module, name, at):
    """Run `work(count_calls)` in a fork that kills itself before (even `at`) or after a function's call `at // 2`.

    Calls count once `work` has called `count_calls()`. Returns whether the fork was killed.
    """
    process = os.fork()
    if process == 0:
        original, numbers = getattr(module, name), count(1)

        def call(*arguments, **settings):
            number = next(numbers)
            if at == 2 * number:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return original(*arguments, **settings)
            finally:  # also if it raises
                if at == 2 * number + 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            work(lambda: setattr(module, name, call))
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def serving():
    """Return the id of the server, which is no leftover of a test; nothing if there is none of this process."""
    process = server().process if server.cache_info().currsize else None
    return {process.pid} if process else set()


def end():
    """End the server, and processes left over by failed tests."""
    if server.cache_info().currsize:
        process, connection = server()
        connection.close()
        if process:
            process.wait()
        server.cache_clear()


def ask(what, files=()):
    connection = server().connection
    message = json.dumps(what).encode() + b"\n"
    connection.sendall(message[socket.send_fds(connection, [message], files) :])
    return json.loads(receive(connection)[0])


def receive(connection):
    """Return a line and the files that came with it; nothing at the end."""
    message, files = b"", []
    while not message.endswith(b"\n"):
        part, more, *_ = socket.recv_fds(connection, 2**16, 2)
        if not part:
            return b"", []
        message, files = message + part, files + more
    return message, files


def connected(listener, controller):
    """Return a connection, in a fork of its own; end when the process that started this one does."""
    while controller not in select.select([listener, controller], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            controller.close()
            return connection
        connection.close()
    sys.exit()


def serve(connection):
    """Answer until a request for a program; return in the fork that becomes the program."""
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
    for pid in alive:  # left over by failed tests
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    sys.exit()


def become(asked, files):
    """Turn the fork into a new process, as far as the program can see."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under `nohup`
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
    rank_zero_only.rank = int(os.environ.get("RANK", 0))  # Lightning reads RANK at import
    if asked["program"].endswith(".py"):
        sys.path[0] = str(Path(asked["program"]).parent)
        runpy.run_path(asked["program"], run_name="__main__")
    else:
        runpy.run_module(asked["program"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_rl.cli.app import run  # takes seconds

    os.fsync = os.fstat  # see conftest.py
    keep_parsers()
    with redirect_stdout(None), suppress(SystemExit):
        run(["fit", "--config", "ppo.yaml", "--print_config"])
    gc.freeze()  # else each fork collects garbage in it, and copies its pages
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    become(*serve(connected(*sockets) if len(sockets) == 2 else sockets[0]))
