"""Join a Ray cluster or start one on this machine, with a token and readable errors."""

import importlib.util
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

from lightning_rl.system.errors import ConfigurationError, require

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
        joined: whether this process is connected.
        head: watches the head of the cluster, once connected.
        ray: the Ray package, once connected.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self.joined = False
        self.ray: Any = None
        self._is_ours = False

    def join(self, room: Mapping[str, Any]) -> None:
        """Start a cluster with the resources `room`, or join one, unless already connected.

        Raises:
            ConfigurationError: if the cluster cannot be started or joined.
        """
        self.ray = _import_ray(self._address is None)
        if not self.ray.is_initialized():
            with _signals_kept():
                self._join(room)
            self._is_ours = True
            hide_token()
        self.joined = True
        self.head = Head(self.ray.get_runtime_context().gcs_address)
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
                why = why_not_joined(self._address, error, printed())
                raise ConfigurationError(why) from error

    def leave(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        self.joined = False
        self.head.close()
        if self._is_ours:
            with _signals_kept():
                self.ray.shutdown()
        self._witness.close()


class Head:
    """Checks in a thread whether the head of a cluster at `host:port` answers.

    Without a head, Ray ends this process after a minute, and nothing is closed.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._answered_at = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._check_head, name="head of the cluster", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether the head has not answered for `HEAD_SECONDS`."""
        return time.monotonic() - self._answered_at > HEAD_SECONDS

    def refuse_lost(self) -> None:
        """Raise if the head is lost.

        Raises:
            ConfigurationError: if the head has not answered for `HEAD_SECONDS`.
        """
        require(
            not self.is_lost,
            f"The head of the Ray cluster at {self._address} has not answered for "
            f"{HEAD_SECONDS:g} s: it has ended, or the connection is lost. Restart the head, and "
            "resume from the last checkpoint: rl-cli fit --ckpt_path last.",
        )

    def close(self) -> None:
        """Stop the checks."""
        self._closed.set()

    def _check_head(self) -> None:
        host, _, port = self._address.rpartition(":")
        while not self._closed.wait(1.0):
            with suppress(OSError):
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
                self._answered_at = time.monotonic()


class KillReporter:
    """A process that prints a message if this process is killed, because Ray prints none."""

    def __init__(self) -> None:
        code = "import sys; sys.stdin.read() or sys.stderr.write(sys.argv[1])"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, ENDED],
            stdin=subprocess.PIPE,
            start_new_session=True,  # only this process gets Ctrl-C, and closes the reporter
        )

    def close(self) -> None:
        """End the reporter's process before a normal exit."""
        self._process.communicate(b"closed")


def refuse_without_ray(what: str) -> None:
    """Raise if Ray is not installed.

    Raises:
        ConfigurationError: if Ray is not installed, with the command that installs it.
    """
    require(
        importlib.util.find_spec("ray") is not None,
        f"{what} needs a package that is not installed: pip install -e '.[ray]'",
    )


def prepare_environment(alone: bool) -> None:
    """Set Ray's unset environment variables before its import; `alone`: listen on loopback only."""
    # Token authentication on, usage statistics off. Unreferenced objects are freed immediately:
    # otherwise every publication of weights would take new memory for a second. The last variable
    # hides state dumps, and lines about dead processes, which our own warnings report.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if alone:
        os.environ.setdefault(CLUSTERS, "0")
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
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))


def hide_token() -> None:
    """Restrict the token file, which Ray may have written, to its owner."""
    with suppress(OSError):  # there is no file, or it belongs to another user
        _token_path().chmod(0o600)


def _token_path() -> Path:
    place = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(place) if place else Path.home() / ".ray" / "auth_token"


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
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigurationError(why_not_joined(address, error)) from error


def why_not_joined(address: str | None, error: Exception, printed: str = "") -> str:
    """Return the reason why a cluster cannot be joined, and the cure; `printed` is Ray's stderr."""
    reason = _brief(error)
    if address is None:
        return f"Ray cannot be started on this machine: {reason}"
    where = f"The Ray cluster at {address} cannot be joined"
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return f"{where}: {reason}. Is the name of its machine right, as in node0:6379?"
    if isinstance(error, OSError) and type(error) is not ConnectionError:
        return (
            f"{where}: there is no answer. Start its head, 'ray start --head --port 6379', and "
            "open that port to this machine."
        )
    whole = f"{error}\n{printed}"
    if mismatch := re.search(r"version mismatch.*", whole, re.IGNORECASE | re.DOTALL):
        reason = _brief(RuntimeError(mismatch[0]))
        return f"{where}: {reason.rstrip('.')}. Install the same versions on all machines."
    cure = (
        "copy ~/.ray/auth_token from the machine of the cluster's head to this machine, or set "
        "RAY_AUTH_TOKEN to the content of that file."
    )
    if "no authentication token was found" in whole:
        return f"{where}: this machine has no token: {cure}"
    # With a wrong token, Ray only reports that it cannot connect.
    known = "InvalidAuthToken" in whole
    return (
        f"{where}: the cluster refuses this process, because the tokens differ: "
        f"{cure}{'' if known else f' Ray says: {reason}'}"
    )


def _brief(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split("\n\n")[0].split())[:500]


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python} | {name: version_of(name) for name in ALIKE}


def check_versions(wanted: Mapping[str, str]) -> None:
    """Raise if this node's package versions differ from the learner's.

    Raises:
        ConfigurationError: naming this node and the differences.
    """
    here = versions()
    different = [
        f"{name} {here[name]} instead of {version}"
        for name, version in wanted.items()
        if here[name] != version
    ]
    require(
        not different,
        f"The node {platform.node()} has {', '.join(different)}: install the learner's versions "
        "there.",
    )


def _import_ray(alone: bool) -> Any:
    prepare_environment(alone)
    with _signals_kept():
        import ray
        import ray.exceptions
    return ray


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM, and start processes that ignore SIGHUP.

    A closed terminal would end Ray's processes, and Ray then ends this one, unsaved.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """Capture stderr, also of native code: Ray prints a line per second about a wrong token."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), 100_000, 0).decode(errors="replace")
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
