"""Detect envs that hang: report env, call and stack; end the call or the process."""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from lightning_rl.envs.hanging import awaited, is_debugged, stack_in_env
from lightning_rl.envs.vector_env import VectorEnv
from lightning_rl.system.errors import EnvFaultError
from lightning_rl.system.process import end_process, exit_of_env, restore_defaults
from lightning_rl.system.torch_private import devices

TICK_SECONDS = 1.0
"""Period of the checks; after a gap of more than two periods the process was suspended."""

IDLE_TICKS = 3
"""Checks without a call after which the thread ends; the next call starts it again."""

GRACE_SECONDS = 3.0
"""Time for a call to return after its processes were killed."""


class EnvTimeoutError(EnvFaultError):
    """An env did not respond within `data.env_timeout_s`; the message contains its stack."""


class EnvWatch:
    """Times the calls into an env, `with calls("step"): env.step(...)`, in .3 µs each.

    A thread checks every second whether the same call is still running, and adds up the time
    between checks, at most two seconds each: a suspended process or a debugged env does not count
    as hanging.

    After too long a call, processes of the envs are killed and the call raises `EnvTimeoutError`.
    Python cannot interrupt an env in the calling thread: then the pending rollout of another thread
    fails (`on_hang`), or, if there is none, the process ends with the message. Only `vectorization:
    async` detects C code that holds Python's lock.

    Args:
        owner: owner of the env, for the message, such as `the training`.
        timeout_s: maximum seconds per call; None: no limit.
        on_hang: called with the error in the watching thread; returns whether it failed the pending
            rollout of another thread.

    Attributes:
        is_lost: whether a thread hangs in the env, which then cannot be closed.
        is_idle: whether the next call must start the thread.
    """

    def __init__(
        self,
        owner: str,
        timeout_s: float | None,
        on_hang: Callable[[EnvTimeoutError], bool] = lambda error: False,
    ) -> None:
        self.owner, self.timeout_s, self._on_hang = owner, timeout_s, on_hang
        self.is_lost, self._num_envs = False, 0
        self.is_idle = timeout_s is not None
        self.env: Callable[[], VectorEnv | None] = lambda: None
        self._calls: dict[str, _Call] = {}
        self._starting = threading.Lock()  # two threads may begin a call together
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, doing: str) -> AbstractContextManager[None]:
        """Return the context of one kind of call, such as `step`."""
        if doing not in self._calls:
            self._calls[doing] = _Call(doing, self)
        return self._calls[doing]

    def make(self, factory: Callable[[int], VectorEnv], num_envs: int) -> VectorEnv:
        self._num_envs, self.is_lost = num_envs, False
        try:
            with self("construction"):
                env = factory(num_envs)
        except BaseException:
            self.close()
            raise
        self.env = weakref.ref(env)  # the watch must not keep the env alive
        return env

    def start(self) -> None:
        with self._starting:
            if self.is_idle:
                self.is_idle = False
                self._closed.clear()
                name = f"watch of {self.owner}"
                self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread, after the env is closed. May be called more than once."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self.timeout_s is not None
        tick, idle, last = min(TICK_SECONDS, self.timeout_s / 4), 0, time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            passed, last = min(now - last, 2 * tick), now  # a longer gap: the process was suspended
            idle = 0 if self._count_seconds(passed, self.timeout_s) else idle + 1
            if idle >= IDLE_TICKS and self._stop_if_idle():
                return
        self.is_idle = True

    def _stop_if_idle(self) -> bool:
        with self._starting:
            self.is_idle = True  # before the check, so that a new call starts the thread
            # A call that began before `is_idle` was set shows here.
            self.is_idle = all(call.ended == call.began for call in list(self._calls.values()))
            return self.is_idle

    def _count_seconds(self, passed: float, timeout_s: float) -> bool:
        env = self.env()
        progress, is_called = 0 if env is None else env.progress, False
        for call in list(self._calls.values()):
            # Another count of calls, or progress within a long one, means that nothing hangs.
            state, runs = (call.began, progress), call.ended != call.began
            is_called |= runs or state != call.state
            if not runs or state != call.state or is_debugged(call.thread):
                call.state, call.spent = state, 0.0
            else:
                call.spent += passed
                if call.spent >= timeout_s and not self.is_lost:
                    self._end(call)
        return is_called

    def _end(self, call: "_Call") -> None:
        """Kill the processes of a call. If it has none, fail the rollout, or exit."""
        processes = awaited.get(call.thread)
        stacks = stack_in_env(call.thread) if processes is None else processes.stacks()
        env = self.env()
        call.error = error = EnvTimeoutError(
            f"The {self._num_envs} envs of {self.owner}{'' if env is None else _name(env)} hung: "
            f"the {call.doing} took more than data.env_timeout_s: {self.timeout_s:g} seconds. "
            "Raise this limit if a step may take longer, or set it to null (no limit) if a person "
            f"takes part. The stack where it hangs:\n{stacks.rstrip()}"
        )
        if processes is not None:
            processes.kill()
            if call.ends_within(GRACE_SECONDS):  # it raises `call.error`
                return
        self.is_lost = True  # the thread cannot be interrupted
        if not self._on_hang(error):
            end_process(error)


class _Call:
    """Calls of one kind; a call is running while `began` exceeds `ended`.

    `error` is raised from the last call; `spent` are the seconds since the last change.
    """

    def __init__(self, doing: str, watch: EnvWatch) -> None:
        self.doing, self.watch = doing, watch
        self.began = self.ended = self.thread = 0
        self.error: EnvTimeoutError | None = None
        self.state, self.spent = (0, 0), 0.0

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
        # `CURRENT_DEVICE`, because `torch.get_default_device()` takes 4 µs.
        if torch.get_default_dtype() is not torch.float32 or devices.CURRENT_DEVICE is not None:
            restore_defaults(self.watch.owner)
        if self.error is not None:
            error, self.error = self.error, None
            if raised is not None:  # an effect of the kill
                raise error from None
        elif isinstance(raised, SystemExit):
            env = self.watch.env()
            name = "The env" if env is None else type(env).__name__
            raise exit_of_env(f"{name} of {self.watch.owner}", raised) from raised

    def ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.ended != self.began and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.ended == self.began


def _name(env: VectorEnv) -> str:
    id = getattr(env, "id", None)
    return f" ({type(env).__name__}{f' {id!r}' if id else ''})"
