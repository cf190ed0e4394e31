"""Join a Ray cluster, or start one on this machine: with a token, and with readable errors."""

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
"""How long the head of a cluster may take to answer."""

HEAD_SECONDS = 15.0
"""How long it may not answer before the run ends; Ray itself ends the process after a minute."""

ENDED = (
    "rl-cli: error: The learner's process was ended from outside: somebody killed it, or Ray did, "
    "because its node on this machine has ended (by ray stop, with the head of the cluster, or for "
    "lack of memory). Start what has ended again, and go on from the last checkpoint: rl-cli fit "
    "--ckpt_path last.\n"
)
"""What a `Witness` prints."""

ALIKE = ("lightning-rl", "torch", "tensordict", "gymnasium", "numpy")
"""Packages that have the same version on both sides: what is sent is made of their classes."""


class Connection:
    """Have this process in a cluster.

    Args:
        address: of a running cluster, `host:port`; None to start one on this machine.

    Attributes:
        joined: whether it is in.
        head: of the cluster, once it is.
        ray: the package, once it is.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self.joined = False
        self.ray: Any = None
        self._is_ours = False

    def join(self, room: Mapping[str, Any]) -> None:
        """Start or join the cluster, unless this process has joined one.

        Args:
            room: what `ray.init` is told of this machine, where the cluster is started here.

        Raises:
            ConfigurationError: where that is not possible.
        """
        self.ray = _import_ray()
        if not self.ray.is_initialized():
            with _signals_kept():
                self._join(room)
            self._is_ours = True
            hide_token()
        self.joined = True
        self.head = Head(self.ray.get_runtime_context().gcs_address)
        self._witness = Witness()

    def _join(self, room: Mapping[str, Any]) -> None:
        if self._address is not None:
            check_answers(self._address)
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
        """Leave the cluster, and end it where it was started here."""
        self.joined = False
        self.head.close()
        if self._is_ours:
            with _signals_kept():
                self.ray.shutdown()
        self._witness.close()


class Head:
    """Looks whether the head of a cluster answers, in a thread of its own.

    Without a head nothing can be started; what runs goes on, until Ray ends this process after a
    minute, with a message of its own and nothing closed.

    Args:
        address: of the head, `host:port`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._answered_at = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="head of the cluster", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether it has not answered for too long."""
        return time.monotonic() - self._answered_at > HEAD_SECONDS

    def refuse_lost(self) -> None:
        """End without a head.

        Raises:
            ConfigurationError: where it has not answered for `HEAD_SECONDS`.
        """
        require(
            not self.is_lost,
            f"The head of the Ray cluster at {self._address} has not answered for "
            f"{HEAD_SECONDS:g} s: it has ended, or this machine was cut off from it. Start it "
            "again, and go on from the last checkpoint: rl-cli fit --ckpt_path last.",
        )

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _look(self) -> None:
        host, _, port = self._address.rpartition(":")
        while not self._closed.wait(1.0):
            with suppress(OSError):
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
                self._answered_at = time.monotonic()


class Witness:
    """A process that says so where this one ends without a word.

    Ray does that to a process whose node has ended: at once, with exit code 1.
    """

    def __init__(self) -> None:
        code = "import sys; sys.stdin.read() or sys.stderr.write(sys.argv[1])"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, ENDED],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which then closes it
        )

    def close(self) -> None:
        """End it: this process ends in its own way."""
        self._process.communicate(b"closed")


def refuse_without_ray(what: str) -> None:
    """Say what to install, where Ray is not.

    Raises:
        ConfigurationError: where it is not installed.
    """
    require(
        importlib.util.find_spec("ray") is not None,
        f"{what} needs a package that is not installed: pip install 'lightning-rl[ray]'",
    )


def prepare_environment() -> None:
    """Switch Ray's token authentication on and its usage statistics off, unless set otherwise.

    And its lines on each process that has died, which our own warnings are about, and the dump of
    its state that follows. What nobody refers to is deleted at once, and not once a second, in
    which every publication would take new memory. Before Ray is imported, which reads all that
    then; processes that it starts inherit it.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "0")
    os.environ.setdefault(
        "RAY_DEDUP_LOGS_SKIP_REGEX", r"^A worker died or was killed|\[state-dump\]"
    )


def make_token() -> None:
    """Write a token that nobody else can read, unless there is one.

    Ray itself would write a file that others can read, until `hide_token` is called.
    """
    path = _token_path()
    if "RAY_AUTH_TOKEN" in os.environ or os.environ.get("RAY_AUTH_MODE") != "token":
        return
    with suppress(OSError):  # it exists, or Ray says why it cannot be written
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))


def hide_token() -> None:
    """Let only its owner read the token: one that Ray has written, others can read."""
    with suppress(OSError):  # there is none, or it is another user's to protect
        _token_path().chmod(0o600)


def _token_path() -> Path:
    place = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(place) if place else Path.home() / ".ray" / "auth_token"


def check_answers(address: str) -> None:
    """See whether somebody answers at an address: Ray itself would ask for minutes.

    Raises:
        ConfigurationError: where nobody does, or it is none.
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
    """Say why a cluster cannot be joined, and what to do.

    Args:
        address: of its head, `host:port`; None where Ray was to be started here.
        error: that ended the attempt.
        printed: what Ray has printed meanwhile.
    """
    said = _brief(error)
    if address is None:
        return f"Ray cannot be started on this machine: {said}"
    where = f"The Ray cluster at {address} cannot be joined"
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return f"{where}: {said}. Is the name of its machine right, as in node0:6379?"
    if isinstance(error, OSError) and type(error) is not ConnectionError:
        return (
            f"{where}: nobody answers there. Start its head, 'ray start --head --port 6379', and "
            "open that port to this machine."
        )
    whole = f"{error}\n{printed}"
    if mismatch := re.search(r"version mismatch.*", whole, re.IGNORECASE | re.DOTALL):
        said = _brief(RuntimeError(mismatch[0]))
        return f"{where}: {said.rstrip('.')}. Install the same versions on all machines."
    cure = (
        "copy ~/.ray/auth_token of the machine that runs its head to this one, or set "
        "RAY_AUTH_TOKEN to what stands there."
    )
    if "no authentication token was found" in whole:
        return f"{where}: this machine has no token: {cure}"
    # Ray tries a wrong token for a while, and then says only that it cannot connect.
    known = "InvalidAuthToken" in whole
    return (
        f"{where}: it answers, and does not let this process in. Its token is another one: {cure}"
        f"{'' if known else f' Ray says: {said}'}"
    )


def _brief(error: Exception) -> str:
    """Return what an error of Ray says, in one line, without what follows on where to look."""
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split("\n\n")[0].split())[:500]


def versions() -> dict[str, str]:
    """Return the versions that both sides must have in common."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python} | {name: version_of(name) for name in ALIKE}


def check_versions(wanted: Mapping[str, str]) -> None:
    """Refuse a node whose packages have other versions.

    Args:
        wanted: what `versions` has returned in the learner's process.

    Raises:
        ConfigurationError: naming this node, and them.
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


def _import_ray() -> Any:
    """Import Ray, and give back the signals that it takes."""
    prepare_environment()
    with _signals_kept():
        import ray
        import ray.exceptions
    return ray


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Give SIGTERM back to who had it: Ray takes it when it is started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """Keep what the process prints to stderr, whoever prints it; hand out what returns it.

    Ray prints a line a second while it tries to get into a cluster by a wrong token.
    """
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
