"""Decide which remote collector begins a rollout when, and which rollout is trained on next.

Where collectors run, and how one talks to them, is a `Cluster`'s to know: nothing here is about
Ray.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from lightning_rl.buffers import BufferClosed, ReadInterrupted, WriterError
from lightning_rl.buffers.waiting import LOOK_SECONDS
from lightning_rl.system.errors import ConfigurationError

MOST_TOLD = 8
"""To how many collectors a publication goes: each is a call of about a millisecond."""

LONGEST_BACK_OFF = 60.0
"""The longest that a collector which fails again and again waits to be replaced, in seconds."""


class Answer(NamedTuple):
    """What a collector has answered to a request.

    Attributes:
        value: of `start` the state that the collector begins with; of `collect` a rollout, and the
            state behind it.
        error: what ended it instead, with the collector's own traceback among its notes.
    """

    value: Any
    error: Exception | None = None


class Cluster(Protocol):
    """Runs collectors in processes of their own, here or elsewhere.

    Nothing waits but `answered`. A handle stands for a collector, a request for what it is asked.
    """

    def start(self, index: int, seed: int, state: Any) -> tuple[Any, Any]:
        """Have a collector started, perhaps later; return its handle, and the request.

        Args:
            index: which of the collectors it is.
            seed: of its envs and of the sampling of actions.
            state: with which it goes on, of an answer or from a checkpoint; None for none.
        """

    def collect(self, handle: Any, version: int) -> Any:
        """Ask for a rollout, begun with the weights that were put last; return the request."""

    def publish(self, handle: Any, version: int) -> None:
        """Hand the weights that were put last to a collector, which may be collecting."""

    def answered(self, requests: Sequence[Any], timeout_s: float) -> list[tuple[Any, Answer]]:
        """Return those requests that are answered, after at most so many seconds none."""

    def kill(self, handle: Any) -> None:
        """End a collector, whatever it is doing."""


Doing = Literal["starting", "idle", "collecting", "done", "failed"]
"""What a collector is doing: `done` has a rollout that waits to be trained on."""


@dataclass
class Remote:
    """A remote collector, as the learner knows it.

    Attributes:
        index: which of them.
        generation: how often it was replaced; it has a stream of seeds of its own.
        state: what its next rollout begins with; while one is under way, what that began with.
        doing: what the learner has last heard that it does.
        version: of the weights with which its rollout began.
        begun: the number of that rollout among all.
        told: the number of the last publication that went to it.
        healthy: whether it has not failed since its last rollout.
    """

    index: int
    generation: int = 0
    state: Any = None
    doing: Doing = "failed"
    handle: Any = None
    request: Any = None
    version: int = 0
    begun: int = -1
    told: int = -1
    since: float = 0.0
    again_at: float = 0.0
    failures: int = 0
    healthy: bool = True
    value: Any = None
    error: Exception | None = None


class Taken(NamedTuple):
    """A rollout that is to be trained on.

    Attributes:
        origin: which collector it comes from.
        version: of the weights with which it began.
        value: the rollout, as the collector has sent it.
    """

    origin: int
    version: int
    value: Any


@dataclass
class Rules:
    """How remote collectors are handled; see `RayCollector`."""

    max_staleness: int
    overflow: Literal["block", "overwrite"]
    min_healthy: int
    timeout_s: float
    back_off_s: float


@dataclass
class Counts:
    """What has become of rollouts: begun = taken + lost + those under way."""

    begun: int = 0
    taken: int = 0
    lost: int = 0
    restarts: int = 0


@dataclass
class RemoteCollectors:
    """M collectors, each with at most one rollout under way or waiting.

    A rollout that begins with version v, or goes on with newer ones, may be trained on while the
    learner is at most at v + `max_staleness`. With `overflow: block` one begins only if it and all
    that are under way can have their turn by then, however they come in, as each update takes one
    rollout; and of those that are there the oldest is taken that leaves the others theirs (earliest
    deadline first, Liu and Layland 1973, finds an order wherever there is one). So none is ever too
    old. With `overwrite` every collector collects all the time, and who takes a rollout looks
    whether it is too old.

    A collector that dies, raises, or does not answer in time is ended, and replaced by one with
    another stream of seeds: after `back_off_s`, and twice as long each time that it fails again.
    What its user can cure ends the run instead, where it keeps one from starting before any rollout
    was trained on.

    Args:
        cluster: where they run.
        count: M.
        seed_of: gives the seed of a collector by its index and generation.
        rules: how they are handled.
        version: of the learner's weights.
        clock: returns seconds.
    """

    cluster: Cluster
    count: int
    seed_of: Callable[[int, int], int]
    rules: Rules
    version: int
    clock: Callable[[], float] = time.monotonic
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.remotes = [Remote(index) for index in range(self.count)]
        self.interrupted = self.closed = False
        self._training = False  # on a rollout whose update is still to come
        self._publications = 0

    @property
    def alive(self) -> int:
        """How many can collect."""
        return sum(one.doing in ("idle", "collecting", "done") for one in self.remotes)

    def take(self) -> Taken:
        """Wait for the next rollout; the collector that it comes from may then begin another.

        Raises:
            ConfigurationError: that keeps a collector from starting, before the first rollout.
            WriterError: from what went wrong, where too few collectors are healthy.
            TimeoutError: where no rollout came in time.
            ReadInterrupted: after `interrupted` was set, where no rollout is there.
            BufferClosed: after `closed` was set, likewise.
        """
        began = self.clock()
        while True:
            self.look(0.0)
            found = self._choose()
            if found is not None:
                break
            if self.closed:
                raise BufferClosed("The collector was closed: nobody collects any more.")
            if self.interrupted:
                raise ReadInterrupted("The learner was asked not to wait for a rollout.")
            if self.clock() - began > self.rules.timeout_s:
                raise TimeoutError(self._why_nothing_came()) from self._last_error()
            self.look(LOOK_SECONDS)
        rollout, found.state = found.value
        taken = Taken(found.index, found.version, rollout)
        found.value, found.doing = None, "idle"
        self.counts.taken += 1
        self._training = True
        self._begin()
        return taken

    def skip(self) -> None:
        """Take note that what was taken is not trained on."""
        self._training = False

    def publish(self, version: int) -> None:
        """Take note of new weights, hand them to those who collect, and begin what may begin.

        Those of the version that there was are of an update under way, which goes on. Of many
        collectors those get them that have gone without for the longest time, so that what the
        learner waits for does not grow with their number.
        """
        self._training &= version == self.version
        self.version = version
        self._publications += 1
        collecting = [one for one in self.remotes if one.doing == "collecting"]
        for one in sorted(collecting, key=lambda one: one.told)[:MOST_TOLD]:
            self.cluster.publish(one.handle, version)
            one.told = self._publications
        self.look(0.0)

    def look(self, timeout_s: float) -> None:
        """Take in what has come, replace who is to be replaced, and begin what may begin.

        Args:
            timeout_s: how long to wait for something to come, in seconds.

        Raises:
            ConfigurationError: that keeps a collector from starting, before the first rollout.
            WriterError: from what went wrong, where too few collectors are healthy.
        """
        now = self.clock()
        for one in self.remotes:
            if one.doing == "failed" and now >= one.again_at:
                self._start(one)
        waiting = {one.request: one for one in self.remotes if one.request is not None}
        for request, answer in self.cluster.answered(list(waiting), timeout_s):
            self._take_in(waiting[request], answer)
        for one in self.remotes:
            if one.doing == "collecting" and self.clock() - one.since > self.rules.timeout_s:
                hung = f"has not finished its rollout within {self.rules.timeout_s:g} s"
                self._fail(one, TimeoutError(f"It {hung}: it hangs, or timeout_s is too short."))
        self._begin()

    def end(self) -> None:
        """End all collectors at once."""
        for one in self.remotes:
            if one.handle is not None:
                self.cluster.kill(one.handle)
            one.handle = one.request = None

    def state_dict(self, fetch: Callable[[Any], Any]) -> list[dict[str, Any]]:
        """Return what each collector's next rollout begins with, that under way counted as not.

        Args:
            fetch: returns a state as plain data.
        """
        return [{"generation": one.generation, "loop": fetch(one.state)} for one in self.remotes]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take up a saved state, before any has started; those it knows nothing of begin anew."""
        for one, saved in zip(self.remotes, state, strict=False):
            one.generation, one.state = saved["generation"], saved["loop"]

    # --- when a rollout may begin, and which one is next ---

    def _begin(self) -> None:
        """Begin rollouts, with the collector first that has waited for the longest time."""
        if self.closed:
            return
        for one in sorted(self.remotes, key=lambda one: one.begun):
            if one.doing == "idle" and self._has_its_turn(self.version):
                one.request = self.cluster.collect(one.handle, self.version)
                one.doing, one.version, one.since = "collecting", self.version, self.clock()
                one.begun, one.told = self.counts.begun, self._publications
                self.counts.begun += 1

    def _has_its_turn(self, begun_with: int) -> bool:
        under_way = [one.version for one in self.remotes if one.doing in ("collecting", "done")]
        return self._in_time([*under_way, begun_with], self.version + self._training)

    def _in_time(self, begun_with: list[int], turn: int) -> bool:
        """Tell whether all rollouts can be trained on in time, one at each version from `turn`."""
        if self.rules.overflow == "overwrite":
            return True
        oldest_first = enumerate(sorted(begun_with))
        return all(turn + i - version <= self.rules.max_staleness for i, version in oldest_first)

    def _choose(self) -> Remote | None:
        """Return whose rollout is next, of those that are there."""
        under_way = [one for one in self.remotes if one.doing in ("collecting", "done")]
        for one in sorted(under_way, key=lambda one: one.begun):
            others = [other.version for other in under_way if other is not one]
            if one.doing == "done" and self._in_time(others, self.version + 1):
                return one
        return None

    # --- what collectors answer ---

    def _start(self, one: Remote) -> None:
        seed = self.seed_of(one.index, one.generation)
        one.handle, one.request = self.cluster.start(one.index, seed, one.state)
        one.doing, one.since = "starting", self.clock()

    def _take_in(self, one: Remote, answer: Answer) -> None:
        if answer.error is not None:
            self._fail(one, answer.error)
            return
        one.request = None
        if one.doing == "starting":
            one.state = answer.value
            one.doing = "idle"
        else:
            one.value = answer.value
            one.doing, one.failures, one.healthy, one.error = "done", 0, True, None

    def _fail(self, one: Remote, error: Exception) -> None:
        """End a collector that is to be replaced; its rollout is lost.

        Raises:
            ConfigurationError: that kept it from starting, before any rollout was trained on.
            WriterError: from the error, where too few are healthy then.
        """
        self.cluster.kill(one.handle)
        if isinstance(error, ConfigurationError) and not self.counts.taken:
            raise error
        self.counts.lost += one.doing == "collecting"
        self.counts.restarts += 1
        waits = min(self.rules.back_off_s * 2**one.failures, LONGEST_BACK_OFF)
        one.failures += 1
        one.generation += 1
        one.doing, one.healthy, one.error = "failed", False, error
        one.handle = one.request = one.state = None
        one.again_at = self.clock() + waits
        said = str(error).partition("\n")[0]
        warnings.warn(
            f"Collector {one.index} failed, and is replaced in {waits:g} s: "
            f"{type(error).__name__}: {said}",
            stacklevel=2,
        )
        healthy = sum(other.healthy for other in self.remotes)
        if healthy < self.rules.min_healthy:
            raise WriterError(
                f"{healthy} of {self.count} collectors are healthy, and min_healthy is "
                f"{self.rules.min_healthy}. Collector {one.index} failed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _last_error(self) -> Exception | None:
        return next((one.error for one in self.remotes if one.error is not None), None)

    def _why_nothing_came(self) -> str:
        kinds = [one.doing for one in self.remotes]
        seen = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        error = self._last_error()
        cause = "" if error is None else f" The last error was {type(error).__name__}: {error}"
        return (
            f"No rollout came within {self.rules.timeout_s:g} s. Of {self.count} collectors are "
            f"{seen}: one that is starting waits for a node with room for it, or for its env; a "
            f"rollout that takes longer wants a larger timeout_s.{cause}"
        )
