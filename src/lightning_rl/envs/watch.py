"""Notice an env that hangs: say which, in what, and where; then end the wait, or the process."""

import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

from lightning_rl.envs.vector_env import VectorEnv
from lightning_rl.system.errors import EnvFaultError
from lightning_rl.system.process import end_process

TICK_SECONDS = 1.0
"""How often the thread looks; where more than twice that has passed, the process stood still."""

IDLE_TICKS = 3
"""After how many looks without a call the thread ends."""

GRACE_SECONDS = 3.0
"""How long a call may take to end once the processes that it waits for have been killed."""

MOST_STACKS = 3
"""How many different stacks a message shows."""

OF_ENVS = ("lightning_rl.envs", "lightning_rl.rollout", "lightning_rl.system")
"""Modules of this package that a call into an env runs through; the others are its callers."""

DEBUGGERS = ("bdb", "pydevd", "_pydevd")
"""How the modules are named whose code runs while a person looks at a thread that they stopped."""


class EnvTimeoutError(EnvFaultError):
    """An env has not answered within `data.env_timeout_s`; the message holds its stack."""


class TellsWhere(ABC):
    """Steps single envs, and knows which of them it waits for."""

    @abstractmethod
    def stuck(self, frames: Sequence[FrameType]) -> dict[int, traceback.StackSummary]:
        """Return the stacks of the envs that have not answered, by number; none if unknown.

        Args:
            frames: of the thread that waits, innermost first.
        """

    def give_up(self) -> bool:
        """End what the thread waits for; return whether that is possible."""
        return False


class EnvWatch:
    """Looks once a second, in one thread, at the calls into the envs of a run.

    The thread adds up what has passed between its looks, of each at most two seconds: a process
    that was stopped, or a machine that slept, did not hang, nor does one that a person debugs. It
    ends where there are no calls, and the next call starts it again.

    A call that takes too long ends with `EnvTimeoutError` where the envs have processes: these are
    killed. Python cannot interrupt an env in the thread that calls it. Where another thread waits
    for that one, it is told (`on_hang`); else the process is ended, with the message. An env in C
    code that does not let other threads run (it holds Python's lock) is noticed only where it has a
    process of its own: `vectorization: async`.

    Args:
        timeout_s: how long a call may take, in seconds; None for any time.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.is_idle = timeout_s is not None  # whether the next call has to start the thread
        self._watched: list[EnvCalls] = []
        self._starting = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def calls(
        self, whose: str, on_hang: Callable[[EnvTimeoutError], bool] = lambda error: False
    ) -> "EnvCalls":
        """Return what times the calls into an env.

        Args:
            whose: the env, for the message: `the training`.
            on_hang: is told the error, from the watching thread; returns whether another thread
                than that of the call waits for a rollout, and has now got the error instead.
        """
        calls = EnvCalls(self, whose, on_hang)
        self._watched.append(calls)
        return calls

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._starting:
            if self.is_idle:
                self.is_idle = False
                self._closed.clear()
                self._thread = threading.Thread(
                    target=self._look_on, name="watch of the envs", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End the thread, once the envs are closed. May be called more than once."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _look_on(self) -> None:
        assert self.timeout_s is not None
        tick = min(TICK_SECONDS, self.timeout_s / 4)
        last, idle = time.monotonic(), 0
        while not self._closed.wait(tick):
            now = time.monotonic()
            passed, last = min(now - last, 2 * tick), now
            called = [calls.look(passed, self.timeout_s) for calls in self._watched]
            idle = 0 if any(called) else idle + 1
            if idle >= IDLE_TICKS and self._rests():
                return
        self.is_idle = True

    def _rests(self) -> bool:
        """Note that the thread ends, unless a call has begun: that does not start another."""
        with self._starting:
            self.is_idle = True
            self.is_idle = not any(calls.under_way for calls in self._watched)
            return self.is_idle


class EnvCalls:
    """Times the calls into an env, `with calls("step"): env.step(...)`, in .3 µs each.

    Args:
        watch: looks at them.
        whose: see `EnvWatch.calls`.
        on_hang: likewise.

    Attributes:
        is_lost: whether a thread hangs in the env, which then cannot be closed.
    """

    def __init__(
        self, watch: EnvWatch, whose: str, on_hang: Callable[[EnvTimeoutError], bool]
    ) -> None:
        self._watch, self._whose, self._on_hang = watch, whose, on_hang
        self._num_envs = 0
        self._env: Callable[[], VectorEnv | None] = lambda: None
        self._timed: dict[str, _Call] = {}
        self.is_lost = False

    def __call__(self, doing: str) -> AbstractContextManager[None]:
        """Return the context of calls of a kind, which the message names: `step`.

        It raises `EnvTimeoutError` for a call that was ended.
        """
        if doing not in self._timed:
            self._timed[doing] = _Call(doing, self._watch)
        return self._timed[doing]

    def make(self, factory: Callable[[int], VectorEnv], num_envs: int) -> VectorEnv:
        """Make an env of N, whose calls are then timed.

        Raises:
            EnvTimeoutError: where that takes too long, and the envs have processes.
        """
        self._num_envs, self.is_lost = num_envs, False
        try:
            with self("construction"):
                env = factory(num_envs)
        except BaseException:
            self._watch.close()  # the run has no other envs then, or ends too
            raise
        self._env = weakref.ref(env)
        return env

    @property
    def under_way(self) -> bool:
        """Whether some call has begun and not ended."""
        return any(call.began != call.ended for call in list(self._timed.values()))

    def look(self, passed: float, timeout_s: float) -> bool:
        """Count the seconds since the last look, and end what takes too long.

        Returns:
            whether there has been a call since then.
        """
        env = self._env()
        progress, called = 0 if env is None else env.progress, False
        for call in list(self._timed.values()):
            seen = (call.began, progress)
            called |= call.ended != call.began or seen != call.seen
            if call.ended == call.began or seen != call.seen or _is_debugged(call.thread):
                call.seen, call.spent = seen, 0.0
            else:
                call.spent += passed
                if call.spent >= timeout_s and not self.is_lost:
                    self._end(call)
        return called

    def _end(self, call: "_Call") -> None:
        """Kill the processes that a call waits for; else tell whoever waits, or end the process."""
        frames = _frames_of(call.thread)
        steppers = [one for one in _owners(frames) if isinstance(one, TellsWhere)]
        stuck = steppers[0].stuck(frames) if steppers else {}
        call.error = error = self._error(call, frames, stuck)
        if stuck and steppers[0].give_up() and call.ends_within(GRACE_SECONDS):
            return
        self.is_lost = True
        if not self._on_hang(error):
            end_process(error)

    def _error(
        self,
        call: "_Call",
        frames: Sequence[FrameType],
        stuck: dict[int, traceback.StackSummary],
    ) -> EnvTimeoutError:
        envs = [one for one in _owners(frames) if isinstance(one, VectorEnv)]
        told = _told(stuck) if stuck else ["It is at:\n", *_summary(frames).format()]
        which = f"The {self._num_envs} envs"
        if stuck:
            numbers = ", ".join(map(str, stuck))
            which = f"Env{'s' if len(stuck) > 1 else ''} {numbers} of {self._num_envs}"
        return EnvTimeoutError(
            f"{which} of {self._whose}{_name(envs[0]) if envs else ''} hung: the {call.doing} took "
            f"more than data.env_timeout_s: {self._watch.timeout_s:g} seconds. Raise it where that "
            "may take longer, or set it to null, for no limit, where a person takes part. "
            f"{''.join(told).rstrip()}"
        )


class _Call:
    """A kind of call, which is under way where it has begun more often than ended.

    Attributes:
        began, ended: how often.
        thread: that of the last one.
        error: what it ends with where the watch has ended it.
        seen, spent: what the watch saw of it when it last changed, and the seconds since.
    """

    def __init__(self, doing: str, watch: EnvWatch) -> None:
        self.doing, self.watch = doing, watch
        self.began = self.ended = self.thread = 0
        self.error: EnvTimeoutError | None = None
        self.seen, self.spent = (0, 0), 0.0

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.began += 1
        if self.watch.is_idle:
            self.watch.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended = self.began
        if self.error is not None:
            error, self.error = self.error, None
            if raised is not None:
                raise error from None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the call that is under way, and return whether it came."""
        deadline = time.monotonic() + seconds
        while self.ended != self.began and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.ended == self.began


def _told(stuck: dict[int, traceback.StackSummary]) -> list[str]:
    """Return the stacks of envs, each once."""
    numbers: dict[str, list[int]] = {}
    for number, stack in stuck.items():
        text = "".join(stack.format()) or "  (it shows no stack: its process stands still)\n"
        numbers.setdefault(text, []).append(number)
    shown = list(numbers.items())[:MOST_STACKS]
    lines = [
        f"Env{'s' if len(at) > 1 else ''} {', '.join(map(str, at))} at:\n{text}"
        for text, at in shown
    ]
    if len(numbers) > len(shown):
        lines.append(f"The stacks of others differ: {len(numbers) - len(shown)} more.")
    return lines


def _name(env: VectorEnv) -> str:
    """Return class and id of an env that may not be made yet."""
    id = getattr(env, "id", None)
    return f" ({type(env).__name__}{f' {id!r}' if id else ''})"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _all_frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first."""
    frames, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _frames_of(thread: int) -> list[FrameType]:
    """Return the frames of what the caller of an env has called, innermost first."""
    frames = _all_frames_of(thread)
    for depth, frame in enumerate(frames):
        module = _module(frame)
        if depth and module.startswith("lightning_rl.") and not module.startswith(OF_ENVS):
            return frames[:depth]
    return frames


def _is_debugged(thread: int) -> bool:
    """Tell whether a person has stopped a thread, to look at it."""
    return any(_module(one).startswith(DEBUGGERS) for one in _all_frames_of(thread))


def _owners(frames: Sequence[FrameType]) -> list[object]:
    return [frame.f_locals.get("self") for frame in frames]


def _summary(frames: Sequence[FrameType]) -> traceback.StackSummary:
    return traceback.StackSummary.extract((frame, frame.f_lineno) for frame in reversed(frames))
