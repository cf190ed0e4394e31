"""Schedule remote collectors: when each begins a rollout, and which rollout is trained next."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from lightning_rl import ConfigurationError
from lightning_rl.extend.algorithms import ReadInterrupted, WriterError
from lightning_rl.extend.errors import EnvFaultError


class CollectorClosed(RuntimeError):  # noqa: N818  # a requested stop, no error
    """The learner has ended."""


LOOK_SECONDS = 0.5
"""Maximum of a single wait, in seconds: Python runs no signal handler during a wait."""

MOST_SENT = 8
"""Maximum number of collectors per publication: each call takes about a millisecond."""

LONGEST_BACK_OFF = 60.0
"""Maximum seconds before a repeatedly failing collector is replaced."""


class Answer(NamedTuple):
    """Answer of a collector to a request.

    Attributes:
        value: for `start`, the initial state; for `collect`, a rollout and the state after it.
        error: the exception that ended the request, with the collector's traceback in its notes.
    """

    value: Any
    error: Exception | None = None


class Cluster(Protocol):
    """Runs collectors in other processes or machines; only `wait_for_answers` waits."""

    def start(self, index: int, seed: int, state: Any) -> tuple[Any, Any]:
        """Start a collector from a state or None, possibly later; return handle and request."""

    def collect(self, handle: Any, version: int) -> Any:
        """Request a rollout that begins with the newest weights."""

    def publish(self, handle: Any, version: int) -> None:
        """Pass the newest weights to a collector, even during a rollout."""

    def wait_for_answers(
        self, requests: Sequence[Any], timeout_s: float
    ) -> list[tuple[Any, Answer]]:
        """Return the answered requests; wait at most `timeout_s` seconds for the first."""

    def kill(self, handle: Any) -> None:
        """End a collector immediately."""


Status = Literal["starting", "idle", "collecting", "done", "failed"]
"""State of a collector; `done`: its rollout waits for training."""


@dataclass
class Remote:
    """The learner's view of a remote collector.

    Attributes:
        index: index of the collector.
        generation: number of replacements; each generation has other seeds.
        state: state at the beginning of its current or next rollout.
        status: last known state of the collector.
        version: version of the weights at the beginning of its rollout.
        begun: number of its rollout among all rollouts.
        last_sent: number of the last publication sent to it.
        healthy: whether it has not failed since its last rollout.
    """

    index: int
    generation: int = 0
    state: Any = None
    status: Status = "failed"
    handle: Any = None
    request: Any = None
    version: int = 0
    begun: int = -1
    last_sent: int = -1
    since: float = 0.0
    again_at: float = 0.0
    failures: int = 0
    healthy: bool = True
    value: Any = None
    error: Exception | None = None


class ReceivedRollout(NamedTuple):
    """A rollout to train on, its collector, and the version of the weights at its start."""

    origin: int
    version: int
    value: Any


START_SECONDS = 600.0
"""Seconds of a wait in which processes may start, in addition to `timeout_s`."""


class HungCollectorError(EnvFaultError, TimeoutError):
    """A collector did not answer in time: it is paused, it hangs, or `timeout_s` is too short."""


@dataclass
class RemoteSettings:
    """Settings of the remote collectors; see `RayCollector`."""

    max_staleness: int
    overflow: Literal["block", "overwrite"]
    min_healthy: int
    timeout_s: float
    back_off_s: float


@dataclass
class Counts:
    """Counts of rollouts (begun = taken + lost + current ones) and of restarts."""

    begun: int = 0
    taken: int = 0
    lost: int = 0
    restarts: int = 0


@dataclass
class RemoteCollectors:
    """M collectors, each with at most one rollout, collected or waiting for training.

    A rollout that begins with version v may be trained on while the learner's version is at most v
    + `max_staleness`. With `overflow: block`, a rollout begins only if no rollout gets too old, in
    any order of arrival, with one rollout per update. The learner takes the oldest rollout that
    leaves enough time for all others (earliest deadline first, Liu and Layland 1973). With
    `overwrite` all collectors collect continuously, and the caller drops old rollouts.

    A collector that dies, raises or is too slow is replaced with other seeds after `back_off_s`,
    doubled for each further failure. A `ConfigurationError` before the first trained rollout ends
    the run instead, because the user can cure it.

    Args:
        cluster: runs the collectors.
        count: M.
        seed_of: returns the seed of a collector from its index and generation.
        settings: settings of the run.
        version: version of the learner's weights.
        clock: returns seconds.
        counts: counts of rollouts so far.
    """

    cluster: Cluster
    count: int
    seed_of: Callable[[int, int], int]
    settings: RemoteSettings
    version: int
    clock: Callable[[], float] = time.monotonic
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.remotes = [Remote(index) for index in range(self.count)]
        self.interrupted = self.closed = False
        self._training = False  # during an update
        self._publications = 0

    @property
    def alive(self) -> int:
        """Number of collectors that can collect."""
        return sum(remote.status in ("idle", "collecting", "done") for remote in self.remotes)

    def take(self) -> ReceivedRollout:
        """Wait for the next rollout; its collector may then begin another.

        Raises:
            ConfigurationError: if a collector cannot start, before the first rollout.
            WriterError: from the last failure, if too few collectors are healthy.
            HungCollectorError: if no rollout arrived in time.
            ReadInterrupted: if `interrupted` is set and no rollout is ready.
            CollectorClosed: if `closed` is set and no rollout is ready.
        """
        began, start_s = self.clock(), 0.0
        while True:
            self.poll(0.0)
            # Look for a rollout first: a ready one is returned even after `interrupt`.
            remote = self._choose()
            if remote is not None:
                break
            if self.closed:
                raise CollectorClosed("The collector is closed.")
            if self.interrupted:
                raise ReadInterrupted("interrupt() ended the wait for a rollout.")
            # Count from the newest rollout of a healthy collector, so that each has its full time.
            since = max([began, *(remote.since for remote in self.remotes if not remote.failures)])
            if self.clock() - since > self.settings.timeout_s + min(start_s, START_SECONDS):
                raise HungCollectorError(self._no_rollout_message()) from self._last_error()
            looked, starts = self.clock(), any(each.status == "starting" for each in self.remotes)
            self.poll(LOOK_SECONDS)
            start_s += (self.clock() - looked) * starts
        # Only now: until a rollout is taken, a checkpoint holds the state before it.
        rollout, remote.state = remote.value
        received = ReceivedRollout(remote.index, remote.version, rollout)
        remote.value, remote.status = None, "idle"
        self.counts.taken += 1
        # The update has not raised the version yet: `_may_start_rollout` adds this turn to it.
        self._training = True
        self._begin()
        return received

    def skip(self) -> None:
        """Mark that the learner skips the last rollout."""
        self._training = False

    def publish(self, version: int) -> None:
        """Send new weights to collecting collectors, and begin the rollouts that may begin."""
        # A publication within an update has the same version, and does not end the update.
        self._training &= version == self.version
        self.version = version
        self._publications += 1
        # Send to at most MOST_SENT collectors, oldest weights first, to bound the learner's time.
        collecting = [remote for remote in self.remotes if remote.status == "collecting"]
        for remote in sorted(collecting, key=lambda remote: remote.last_sent)[:MOST_SENT]:
            self.cluster.publish(remote.handle, version)
            remote.last_sent = self._publications
        self.poll(0.0)

    def poll(self, timeout_s: float) -> None:
        """Process answers, replace failed collectors, and begin rollouts; wait at most `timeout_s`.

        Raises:
            ConfigurationError: if a collector cannot start, before the first rollout.
            WriterError: from the last failure, if too few collectors are healthy.
        """
        now = self.clock()
        for remote in self.remotes:
            if remote.status == "failed" and now >= remote.again_at:
                self._start(remote)
        waiting = {remote.request: remote for remote in self.remotes if remote.request is not None}
        # Read the answers before the times: a rollout that has just arrived is not late.
        for request, answer in self.cluster.wait_for_answers(list(waiting), timeout_s):
            self._handle_answer(waiting[request], answer)
        for remote in self.remotes:
            waited_s = self.clock() - remote.since
            if remote.status == "collecting" and waited_s > self.settings.timeout_s:
                reason = f"has not finished its rollout within {self.settings.timeout_s:g} s"
                self._fail(
                    remote, HungCollectorError(f"It {reason}: it hangs, or timeout_s is too short.")
                )
        self._begin()

    def end(self) -> None:
        """Kill all collectors."""
        for remote in self.remotes:
            if remote.handle is not None:
                self.cluster.kill(remote.handle)
            remote.handle = remote.request = None

    def state_dict(self, fetch: Callable[[Any], Any]) -> list[dict[str, Any]]:
        """Return the state before each collector's rollout; `fetch` makes it plain data."""
        return [
            {"generation": remote.generation, "loop": fetch(remote.state)}
            for remote in self.remotes
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore a saved state before the start; collectors without a saved state begin fresh."""
        for remote, saved in zip(self.remotes, state, strict=False):
            remote.generation, remote.state = saved["generation"], saved["loop"]

    # --- when a rollout may begin, and which one is next ---

    def _begin(self) -> None:
        if self.closed:
            return
        # In the order of their last rollouts, so that no collector is passed over.
        for remote in sorted(self.remotes, key=lambda remote: remote.begun):
            if remote.status == "idle" and self._may_start_rollout(self.version):
                remote.request = self.cluster.collect(remote.handle, self.version)
                remote.status, remote.since = "collecting", self.clock()
                remote.version = self.version
                remote.begun, remote.last_sent = self.counts.begun, self._publications
                self.counts.begun += 1

    def _may_start_rollout(self, begun_with: int) -> bool:
        under_way = [
            remote.version for remote in self.remotes if remote.status in ("collecting", "done")
        ]
        return self._all_fresh([*under_way, begun_with], self.version + self._training)

    def _all_fresh(self, begun_with: list[int], turn: int) -> bool:
        """Return whether all rollouts stay fresh enough if each update from `turn` on takes one."""
        if self.settings.overflow == "overwrite":
            return True
        # With one rollout per update, the i-th oldest is trained at version turn + i.
        trained_at = enumerate(sorted(begun_with), turn)
        limit = self.settings.max_staleness
        return all(turn - version <= limit for turn, version in trained_at)

    def _choose(self) -> Remote | None:
        under_way = [remote for remote in self.remotes if remote.status in ("collecting", "done")]
        # A finished rollout waits if taking it now would make an unfinished one too old.
        for remote in sorted(under_way, key=lambda remote: remote.begun):
            versions = [other.version for other in under_way if other is not remote]
            if remote.status == "done" and self._all_fresh(versions, self.version + 1):
                return remote
        return None

    # --- what collectors answer ---

    def _start(self, remote: Remote) -> None:
        seed = self.seed_of(remote.index, remote.generation)
        remote.handle, remote.request = self.cluster.start(remote.index, seed, remote.state)
        remote.status, remote.since = "starting", self.clock()

    def _handle_answer(self, remote: Remote, answer: Answer) -> None:
        if answer.error is not None:
            self._fail(remote, answer.error)
            return
        remote.request = None
        if remote.status == "starting":
            remote.state = answer.value
            remote.status = "idle"
        else:
            remote.value = answer.value
            remote.status, remote.failures, remote.healthy, remote.error = "done", 0, True, None

    def _fail(self, remote: Remote, error: Exception) -> None:
        self.cluster.kill(remote.handle)
        # A hang is a ConfigurationError by its base class, but a new process may cure it.
        hung = isinstance(error, HungCollectorError)
        if isinstance(error, ConfigurationError) and not hung and not self.counts.taken:
            raise error
        self.counts.lost += remote.status == "collecting"
        self.counts.restarts += 1
        wait_s = min(self.settings.back_off_s * 2**remote.failures, LONGEST_BACK_OFF)
        remote.failures += 1
        remote.generation += 1
        remote.status, remote.healthy, remote.error = "failed", False, error
        remote.handle = remote.request = remote.state = None
        remote.again_at = self.clock() + wait_s
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"Collector {remote.index} failed, and is replaced in {wait_s:g} s: "
            f"{type(error).__name__}: {reason}",
            stacklevel=2,
        )
        healthy = sum(other.healthy for other in self.remotes)
        if healthy < self.settings.min_healthy:
            raise WriterError(
                f"{healthy} of {self.count} collectors are healthy, but min_healthy is "
                f"{self.settings.min_healthy}. Collector {remote.index} failed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _last_error(self) -> Exception | None:
        return next((remote.error for remote in self.remotes if remote.error is not None), None)

    def _no_rollout_message(self) -> str:
        statuses = [remote.status for remote in self.remotes]
        counts = ", ".join(f"{statuses.count(kind)} {kind}" for kind in dict.fromkeys(statuses))
        error = self._last_error()
        cause = "" if error is None else f" The last error was {type(error).__name__}: {error}"
        return (
            f"No rollout came within {self.settings.timeout_s:g} s. States of the {self.count} "
            f"collectors: {counts}. A starting collector waits for a free node or for its env. "
            f"Raise timeout_s if a rollout takes longer.{cause}"
        )
