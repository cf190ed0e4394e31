"""Notice an env that hangs: say which, in what, and where; end the call, or else the process."""

import ctypes
import signal
import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_rl.envs.vector_env import VectorEnv
from lightning_rl.system.errors import EnvFaultError
from lightning_rl.system.process import end_process

TICK_SECONDS = 1.0
"""How often the thread looks; where more than twice that has passed, the process stood still."""

IDLE_TICKS = 3
"""After how many looks without a call the thread ends; the next call starts another."""

GRACE_SECONDS = 3.0
"""How long a call may take to end once its env has been given up, and the learner to hear of it."""

WATCHED = {
    "reset": "reset",
    "step": "step",
    "step_arrays": "step",
    "render": "render",
    "make_renderable": "make_renderable",
    "show": "opening of a window",
    "state_dict": "state_dict",
    "load_state_dict": "load_state_dict",
    "replay_some": "replay of an episode",
    "close": "close",
}
"""Methods of an env that are timed, and what the message calls them."""

MAKING = "construction"

MOST_STACKS = 3
"""How many different stacks a message shows."""

# Its default is to be ignored, so that one which comes too late does no harm.
URGENT = getattr(signal, "SIGURG", None)

Call = tuple[str, int]
"""What an env is doing, and the thread that asked for it. Each call is an object of its own."""


class EnvTimeoutError(EnvFaultError):
    """An env has not answered within `data.env_timeout_s`; the message holds its stack."""


class _GivenUp(BaseException):
    """Ends a call that hangs; what the caller gets is `EnvTimeoutError`."""


class TellsWhere(ABC):
    """Steps single envs, and knows which of them it waits for."""

    @abstractmethod
    def stuck(self, frames: Sequence[FrameType]) -> dict[int, traceback.StackSummary]:
        """Return the stacks of the envs that have not answered, by number; none if unknown.

        Args:
            frames: of the thread that waits, innermost first.
        """

    @abstractmethod
    def give_up(self) -> bool:
        """End what the thread waits for; return whether that is possible."""


class EnvWatch:
    """Times the calls into an env, and ends one that takes too long.

    A call costs a fifth of a microsecond more. A thread looks once a second at whether the call is
    still the one of a second ago, and adds up what has passed between its looks, of each at most
    two seconds: a process that was stopped, or a machine that slept, did not hang.

    The call ends with `EnvTimeoutError`: its workers are killed, or its thread is interrupted. A
    background thread that sleeps cannot be, and `on_hang` is told instead. Where all of that does
    not help, as in C code that never returns, the process is ended, with the message. An env in C
    code that does not let other threads run (it holds Python's lock) is noticed only where it has a
    process of its own: `vectorization: async`.

    Args:
        whose: the env, for the message: `the training`.
        timeout_s: how long a call may take, in seconds; None for any time.
        on_hang: told the error, from another thread, where the env hangs in a background thread.
    """

    def __init__(
        self,
        whose: str,
        timeout_s: float | None,
        on_hang: Callable[[EnvTimeoutError], object] = lambda error: None,
    ) -> None:
        self.whose = whose
        self.timeout_s = timeout_s
        self._on_hang = on_hang
        self._num_envs = 0
        self._call: Call | None = None
        self._verdict: tuple[Call, EnvTimeoutError] | None = None
        self._running = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._acknowledged = threading.Event()  # the run is ending
        self._closed = threading.Event()

    def make(self, factory: Callable[[int], VectorEnv], num_envs: int) -> VectorEnv:
        """Make an env of N, and time its methods from then on.

        They are shadowed in the instance, not wrapped in another env: who asks for the class of the
        env, or for its attributes, still finds them.

        Raises:
            EnvTimeoutError: where that takes too long; as any of its methods from then on.
        """
        if self.timeout_s is None:
            return factory(num_envs)
        self._acknowledged.clear()
        self._closed.clear()
        self._num_envs, self._verdict = num_envs, None
        try:
            env: VectorEnv = self._timed(MAKING, factory)(num_envs)
        except BaseException:
            self.close()
            raise
        for name in WATCHED:
            if hasattr(env, name):
                setattr(env, name, self._timed(name, getattr(env, name)))
        setattr(env, "close", self._closing(env.close))  # noqa: B010  # as above
        return env

    def acknowledge(self) -> None:
        """Say that the run is ending: whoever had to know of a hang does."""
        self._acknowledged.set()

    def close(self) -> None:
        """End the thread, once the env is closed. May be called more than once."""
        self._acknowledged.set()
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(GRACE_SECONDS)

    # --- the thread that calls ---

    def _timed(self, doing: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that does the same, under the clock; a call within a call has its own."""
        ident = threading.get_ident

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = self._call
            self._call = call = (doing, ident())
            if not self._running:
                self._start()
            try:
                return method(*args, **kwargs)
            except BaseException:
                verdict = self._verdict
                if verdict is not None and verdict[0] is call:
                    raise verdict[1] from None
                raise
            finally:
                self._call = outer

        return timed

    def _closing(self, close: Callable[[], None]) -> Callable[[], None]:
        """Return an env's `close` that waits little for one that hung, and asks it once."""
        asked = False

        def closing() -> None:
            nonlocal asked
            if self._verdict is None:
                close()
            elif not asked:
                asked = True
                helper = threading.Thread(target=_quietly, args=(close,), daemon=True)
                helper.start()
                helper.join(GRACE_SECONDS / 2)

        return closing

    def _start(self) -> None:
        with self._starting:
            if self._running or self._closed.is_set():
                return
            name = f"watch of {self.whose}"
            thread = threading.Thread(target=self._watch_calls, name=name, daemon=True)
            with suppress(RuntimeError):  # the interpreter ends, and takes no new ones
                thread.start()
                self._thread, self._running = thread, True
                _take_signal(self)

    # --- the thread that looks ---

    def _watch_calls(self) -> None:
        assert self.timeout_s is not None
        tick = min(TICK_SECONDS, self.timeout_s / 4)
        seen, spent, idle, last = self._call, 0.0, 0, time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            passed, last = min(now - last, 2 * tick), now
            call = self._call
            idle = idle + 1 if call is None and seen is None else 0
            if idle >= IDLE_TICKS and self._end_if_idle():
                return
            spent = spent + passed if call is seen and call is not None else 0.0
            seen = call
            if call is not None and spent >= self.timeout_s:
                self._end(call)
                break
        self._running = False

    def _end_if_idle(self) -> bool:
        """End for want of calls, unless one begins just now."""
        self._running = False
        if self._call is None:
            return True
        with self._starting:
            ours = not self._running
            self._running = True
        return not ours

    def _end(self, call: Call) -> None:
        """End a call that hangs, have the learner hear of it, or end the process."""
        error, owner = self._explain(call)
        self._verdict = (call, error)
        main = threading.main_thread().ident
        if owner is None or not owner.give_up():
            _interrupt(call[1])
        if call[1] == main:
            if self._ended_in_time(call):
                return
        else:
            self._on_hang(error)
            if self._acknowledged.wait(GRACE_SECONDS):
                return
            assert main is not None
            _interrupt(main)  # it is busy with something else
            if self._acknowledged.wait(GRACE_SECONDS / 2):
                return
        end_process(error)

    def _ended_in_time(self, call: Call) -> bool:
        deadline = time.monotonic() + GRACE_SECONDS
        while self._call is call and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._call is not call

    def _explain(self, call: Call) -> tuple[EnvTimeoutError, TellsWhere | None]:
        """Return the error, and what waits for single envs, if anything does."""
        doing, thread = call
        frames = _frames_above(thread)
        owners = [frame.f_locals.get("self") for frame in frames]
        envs = [owner for owner in owners if isinstance(owner, VectorEnv)]
        steppers = [owner for owner in owners if isinstance(owner, TellsWhere)]
        stuck = steppers[0].stuck(frames) if steppers else {}
        told = _told(stuck) if stuck else ["It is at:\n", *_summary(frames).format()]
        name = _name(envs[0]) if envs else ""
        which = f"The {self._num_envs} envs"
        if stuck:
            numbers = ", ".join(map(str, stuck))
            which = f"Env{'s' if len(stuck) > 1 else ''} {numbers} of {self._num_envs}"
        message = (
            f"{which} of {self.whose}{name} hung: the {WATCHED.get(doing, doing)} took more than "
            f"data.env_timeout_s: {self.timeout_s:g} seconds. Raise it where that may take longer, "
            f"or set it to null, for no limit, where a person takes part. {''.join(told).rstrip()}"
        )
        return EnvTimeoutError(message), steppers[0] if stuck else None

    def answer_signal(self) -> None:
        """Raise in the main thread, where it hangs or has to hear of a hang."""
        if self._verdict is None:
            return
        call, error = self._verdict
        if call[1] != threading.main_thread().ident:
            if not self._acknowledged.is_set():
                raise error
        elif self._call is call:
            raise _GivenUp


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


def _frames_above(thread: int) -> list[FrameType]:
    """Return the frames of what a call has called, innermost first."""
    frames, frame = [], sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != __file__:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _summary(frames: Sequence[FrameType]) -> traceback.StackSummary:
    return traceback.StackSummary.extract((frame, frame.f_lineno) for frame in reversed(frames))


def _quietly(function: Callable[[], None]) -> None:
    """Call a function whose failure says nothing that is not known already."""
    with suppress(BaseException):
        function()


def _interrupt(thread: int) -> None:
    """Have a thread raise: the main thread also out of a wait, others between two lines."""
    if thread != threading.main_thread().ident:
        raised = ctypes.py_object(_GivenUp)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
    elif URGENT is not None:
        signal.pthread_kill(thread, URGENT)


# --- the signal that interrupts the main thread, which Python allows no other way ---

_watches: "weakref.WeakSet[EnvWatch]" = weakref.WeakSet()
_previous: Any = None


def _take_signal(watch: EnvWatch) -> None:
    """Handle the signal from now on, beside who did so before; only the main thread can say so.

    It is not given back: Lightning puts back, at the end of a run, what it found at its beginning.
    """
    global _previous
    if URGENT is None or threading.current_thread() is not threading.main_thread():
        return
    _watches.add(watch)
    if signal.getsignal(URGENT) is not _answer:
        _previous = signal.signal(URGENT, _answer)


def _answer(number: int, frame: FrameType | None) -> None:
    if callable(_previous):
        _previous(number, frame)
    for watch in list(_watches):
        watch.answer_signal()
