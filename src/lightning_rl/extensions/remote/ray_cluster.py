"""Join a Ray cluster or start one on this machine, with a token and readable errors."""

import importlib.util
import math
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import require
from lightning_rl.extend.files import expanded

CONNECT_SECONDS = 5.0
"""Timeout of a connection to the head of a cluster, in seconds."""

HEAD_SECONDS = 15.0
"""Seconds without an answer of the head after which the run ends; Ray's own limit is a minute."""

ENDED = (
    "rl-cli: error: The learner's process was killed, by a signal or by Ray, because its node on "
    "this machine has ended (by ray stop, with the head of the cluster, or for lack of memory). "
    "Restart the node, and resume from the last checkpoint: rl-cli fit --ckpt_path last.\n"
)
"""Message that a `KillReporter` prints."""

CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's environment variable: 0 for one machine only, with all ports on loopback."""

ALIKE = ("lightning-rl", "torch", "tensordict", "gymnasium", "numpy")
"""Packages that need equal versions on all nodes, because messages contain their classes."""


class Connection:
    """Connects this process to a Ray cluster.

    Args:
        address: address of a running cluster, `host:port`; None starts one on this machine.

    Attributes:
        ray: the Ray package, once connected.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self.ray: Any = None
        self._is_ours = False

    def join(self, room: Mapping[str, Any]) -> None:
        """Start a cluster with the resources `room`, or join one, unless already connected.

        Raises:
            ConfigurationError: if the cluster cannot be started or joined.
        """
        # Ray reads these variables when it is imported.
        prepare_environment(self._address is None)
        with _signals_kept():
            import ray
            import ray.exceptions

            self.ray = ray
            if not ray.is_initialized():
                self._join(room)
                self._is_ours = True
                hide_token()
        self._head = ray.get_runtime_context().gcs_address
        self._checked_at, self._silent_since = 0.0, math.inf
        self._witness = KillReporter()

    def _join(self, room: Mapping[str, Any]) -> None:
        if self._address is not None:
            check_answers(self._address)
            require(
                os.environ.get(CLUSTERS) != "0",
                f"This process cannot join the Ray cluster at {self._address}: {CLUSTERS} is 0, by "
                "the environment, or because this process has started Ray for one machine only. "
                f"Start a new process, with {CLUSTERS} unset or 1.",
            )
            room = {}
        else:
            room = {**room, "include_dashboard": False}
            make_token()
        with _stderr_kept() as printed:
            try:
                self.ray.init(
                    self._address or "local",
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level="ERROR",
                    **room,
                )
            except Exception as error:
                reason = why_not_joined(self._address, error, printed())
                raise ConfigurationError(reason) from error

    def check_head(self) -> None:
        """Ask once a second whether the head of the cluster answers.

        Without a head, Ray ends this process after a minute, and nothing is closed.

        Raises:
            ConfigurationError: if the head has not answered for `HEAD_SECONDS`.
        """
        now = time.monotonic()
        if now - self._checked_at < 1.0:
            return
        self._checked_at = now
        try:
            _connect(self._head)
        except OSError:
            self._silent_since = min(now, self._silent_since)
        else:
            self._silent_since = math.inf
        require(
            now - self._silent_since < HEAD_SECONDS,
            f"The head of the Ray cluster at {self._head} has not answered for {HEAD_SECONDS:g} s: "
            "it has ended, or the connection is lost. Restart the head, and resume from the last "
            "checkpoint: rl-cli fit --ckpt_path last.",
        )

    def leave(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        if self._is_ours:
            with _signals_kept():
                self.ray.shutdown()
        self._witness.close()


class KillReporter:
    """A process that prints a message if this process is killed, because Ray prints none."""

    def __init__(self) -> None:
        # The pipe ends without a byte if this process is killed; `close` sends one.
        code = "import sys; sys.stdin.read() or sys.stderr.write(sys.argv[1])"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, ENDED],
            stdin=subprocess.PIPE,
            start_new_session=True,  # only this process gets Ctrl-C, and closes the reporter
        )

    def close(self) -> None:
        """End the reporter's process before a normal exit."""
        self._process.communicate(b"closed")


def refuse_without_ray(feature: str) -> None:
    """Raise if Ray is not installed.

    Raises:
        ConfigurationError: if Ray is not installed, with the command that installs it.
    """
    require(
        importlib.util.find_spec("ray") is not None,
        f"{feature} needs a package that is not installed: pip install -e '.[ray]'",
    )


def prepare_environment(alone: bool) -> None:
    """Set Ray's unset environment variables before its import; `alone`: for this user alone."""
    # Token authentication on, usage statistics off. Unreferenced objects are freed immediately:
    # otherwise every publication of weights would take new memory for a second. The last variable
    # hides state dumps, and lines about dead processes, which our own warnings report.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if alone:
        os.environ.setdefault(CLUSTERS, "0")
        # Ray opens its own directory, with sockets, to all users: it lies in one of this user.
        if "RAY_TMPDIR" not in os.environ:
            os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "0")
    os.environ.setdefault(
        "RAY_DEDUP_LOGS_SKIP_REGEX", r"^A worker died or was killed|\[state-dump\]"
    )


def make_token() -> None:
    """Write a token file that only its owner can read, unless a token exists."""
    path = _token_path()
    if "RAY_AUTH_TOKEN" in os.environ or os.environ.get("RAY_AUTH_MODE") != "token":
        return
    with suppress(OSError):  # the file exists, or Ray reports why it is not writable
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_EXCL: an existing token may belong to a running cluster.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))


def hide_token() -> None:
    """Restrict the token file, which Ray may have written, to its owner."""
    with suppress(OSError):  # there is no file, or it belongs to another user
        _token_path().chmod(0o600)


def _token_path() -> Path:
    setting = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(setting) if setting else expanded("~/.ray/auth_token")


def check_answers(address: str) -> None:
    """Check that a server answers at an address, because Ray itself would try for minutes.

    Raises:
        ConfigurationError: if no server answers, or the address is invalid.
    """
    host, _, port = address.rpartition(":")
    require(
        bool(host) and port.isdecimal(),
        f"The address of a Ray cluster is host:port, as in node0:6379, got '{address}'.",
    )
    try:
        _connect(address)
    except OSError as error:
        raise ConfigurationError(why_not_joined(address, error)) from error


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def why_not_joined(address: str | None, error: Exception, printed: str = "") -> str:
    """Return the reason why a cluster cannot be joined, and the cure; `printed` is Ray's stderr."""
    reason = _brief(error)
    if address is None:
        return f"Ray cannot be started on this machine: {reason}"
    mismatch = re.search(r"version mismatch.*", f"{error}\n{printed}", re.IGNORECASE | re.DOTALL)
    if mismatch:
        reason = _brief(RuntimeError(mismatch[0]))
        cure = "Install the same versions on all machines."
    elif isinstance(error, OSError) and type(error) is not ConnectionError:  # not by Ray
        cure = (
            "There is no answer. Start its head, 'ray start --head --port 6379', open that port to "
            "this machine, and check the name of its machine, as in node0:6379."
        )
    else:  # with a wrong token, Ray may only report that it cannot connect
        cure = (
            "This machine has no token of the cluster, or the tokens differ: copy "
            "~/.ray/auth_token from the machine of the cluster's head to this machine, or set "
            "RAY_AUTH_TOKEN to the content of that file."
        )
    return f"The Ray cluster at {address} cannot be joined: {reason.rstrip('.')}. {cure}"


def _brief(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split("\n\n")[0].split())[:500]


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python} | {name: version_of(name) for name in ALIKE}


def check_versions(learner_versions: Mapping[str, str]) -> None:
    """Raise if this node's package versions differ from the learner's.

    Raises:
        ConfigurationError: naming this node and the differences.
    """
    node_versions = versions()
    different = [
        f"{name} {node_versions[name]} instead of {version}"
        for name, version in learner_versions.items()
        if node_versions[name] != version
    ]
    require(
        not different,
        f"The node {platform.node()} has {', '.join(different)}: install the learner's versions "
        "there.",
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM, and start processes that ignore SIGHUP.

    A closed terminal would end Ray's processes, and Ray then ends this one, unsaved.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGHUP), handlers, strict=True):
            signal.signal(number, handler)


@contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """Capture stderr, also of native code: Ray prints a line per second about a wrong token."""
    sys.stderr.flush()
    # Replace the descriptor, because native code does not write to `sys.stderr`.
    saved_fd = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), 100_000, 0).decode(errors="replace")
        finally:
            sys.stderr.flush()
            os.dup2(saved_fd, 2)
            os.close(saved_fd)
