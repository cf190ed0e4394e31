"""Run `rl-cli` in processes of their own, without the five seconds that each would take to import.

One process imports the command and nothing else, and forks for each that is asked for: what runs then is what
`python -m lightning_rl` runs, from its first line to the interpreter's end, with its own signals, exit code and
children. Where the start itself is the point, a test starts a new process.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Command:
    """A running `rl-cli`; what it prints goes to files.

    Args:
        arguments: of the command.
        env: variables beside those of this process.
        largest_file: bytes that a file may have, as under `ulimit -f`; None for any.

    Attributes:
        pid: of the process, which leads a session of its own.
        returncode: None while it runs.
        stdout, stderr: what it has printed, once it has ended.
    """

    def __init__(self, *arguments, env=None, largest_file=None):
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        for file in self._files:
            file.touch()
        self.returncode = None
        self.stdout = self.stderr = ""
        self.pid = ask(
            "start",
            arguments=arguments,
            directory=os.getcwd(),
            env=dict(os.environ) | (env or {}),
            streams=list(map(str, self._files)),
            largest_file=largest_file,
        )

    def poll(self):
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = ask("look", pid=self.pid)
            if self.returncode is not None:
                self.stdout, self.stderr = (file.read_text() for file in self._files)
                self._folder.cleanup()
        return self.returncode

    def wait(self, timeout=120):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError("".join(file.read_text() for file in self._files))
            time.sleep(0.01)
        return self

    def wait_for(self, text, timeout=60):
        """Wait until it has printed a text."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and text not in self._files[0].read_text():
            assert time.monotonic() < deadline, self._files[0].read_text()
            time.sleep(0.01)
        assert self.poll() is None, self.stderr

    def children(self):
        """Return the processes that it has started, and that are still there."""
        return Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()


def rl_cli(*arguments, **kwargs):
    """Run the command to its end."""
    return Command(*arguments, **kwargs).wait()


@cache
def server():
    """The process that forks; its own end comes with this one's, which closes the pipe."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    begun = subprocess.Popen([sys.executable, "-m", "tests.commands"], cwd=ROOT, **pipes)
    atexit.register(begun.stdin.close)
    return begun


def serving():
    """Return the number of that process, which no test is to blame for; nothing before there is one."""
    return {server().pid} if server.cache_info().currsize else set()


def ask(what, **about):
    process = server()
    print(json.dumps({"what": what, **about}), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def serve():
    """Answer until somebody asks for a command; return in the fork that is to be it."""
    alive = set()
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["what"] == "start":
            answer = os.fork()
            if answer == 0:
                return asked
            alive.add(answer)
        else:
            pid, status = os.waitpid(asked["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            alive.discard(pid)
        print(json.dumps(answer), flush=True)
    for pid in alive:  # of tests that have failed
        os.kill(pid, signal.SIGKILL)
    sys.exit()


def become(asked):
    """Be a new process, in a session of its own, as far as the command can tell."""
    os.setsid()
    for number, path in enumerate([os.devnull, *asked["streams"]]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    if asked["largest_file"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["largest_file"],) * 2)
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[0] = asked["directory"]
    sys.path[1:1] = filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["rl-cli", *asked["arguments"]]


if __name__ == "__main__":
    import lightning_rl.__main__ as command
    import lightning_rl.cli.app  # noqa: F401  # what takes seconds

    become(serve())
    command.main()
