"""Where a thread is in an env, and the processes that it waits for."""

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

OF_ENVS = ("lightning_rl.envs", "lightning_rl.rollout", "lightning_rl.system")
"""Modules of this package between caller and env."""

DEBUGGERS = ("bdb", "pydevd", "_pydevd")
"""Module prefixes of debuggers, which run while a person inspects a stopped thread."""


class EnvProcesses(Protocol):
    """Processes of envs that a thread waits for; see `waiting_for`."""

    def stacks(self) -> str:
        """Return the stacks of the processes that are in their envs."""

    def kill(self) -> None:
        """Kill all processes."""


awaited: dict[int, EnvProcesses] = {}
"""Processes that a thread waits for, by the thread's identifier."""


@contextmanager
def waiting_for(processes: EnvProcesses) -> Iterator[None]:
    """Mark that this thread waits for processes, which the watch may kill."""
    thread = threading.get_ident()
    awaited[thread] = processes  # a dict write is atomic, so no lock
    try:
        yield
    finally:
        del awaited[thread]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _frames_of(thread: int) -> list[FrameType]:
    frame = sys._current_frames().get(thread)
    return [] if frame is None else [inner for inner, _ in traceback.walk_stack(frame)]


def stack_in_env(thread: int) -> str:
    """Return the stack of a thread below its call into the env."""
    frames = _frames_of(thread)
    outside = (
        depth
        for depth, frame in enumerate(frames)
        if _module(frame).startswith("lightning_rl.") and not _module(frame).startswith(OF_ENVS)
    )
    inner = frames[: next(outside, None)] or frames
    walk = ((frame, frame.f_lineno) for frame in reversed(inner))
    return "".join(traceback.StackSummary.extract(walk).format())


def is_debugged(thread: int) -> bool:
    """Return whether a person inspects a thread in a debugger."""
    return any(_module(frame).startswith(DEBUGGERS) for frame in _frames_of(thread))
