"""Handle signals in this process alone: forked processes get the former handlers back."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_rl.system.output import tell_from_handler

STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that end a run."""

_replaced: list[dict[int, Any]] = []
"""Former handlers by signal, one dict for each open `handle_signals`."""

_came: list[list[int]] = []
"""Signals that have come, one list for each open `interrupted_by_signals`."""


def handle_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Callable[[], None]:
    """Set a handler of signals in the main thread, and return a function that restores the former.

    A SIGHUP that is ignored stays so: `nohup` starts a program so that it outlives the terminal.
    Processes that an env forks would not end by `terminate()` with our handlers, so they get the
    former ones; a process that is started by `exec` gets the default action.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    former = {}
    for number in numbers:
        replaced = signal.getsignal(number)
        if number != signal.SIGHUP or replaced is not signal.SIG_IGN:
            former[number] = signal.SIG_DFL if replaced is None else replaced
            signal.signal(number, handler)
    depth = len(_replaced)
    _replaced.append(former)

    def restore() -> None:
        # An outer `restore` has removed this level, too.
        if len(_replaced) > depth and _replaced[depth] is former:
            del _replaced[depth:]
            for number, replaced in former.items():
                signal.signal(number, replaced)

    return restore


_mask = threading.local()


def _before_fork() -> None:
    # Python drops a signal that the child gets before `_in_child`, so keep it waiting.
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _in_child() -> None:
    while _replaced:
        for number, replaced in _replaced.pop().items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # Ray's processes ignore SIGHUP
                signal.signal(number, replaced)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


@contextmanager
def interrupted_by_signals() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the first signal of `STOPS`; a second one has its default action.

    Yields a list, which holds the number of the signal once it has come, also to a block within.
    """
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        for numbers in _came:
            numbers.append(number)
        for handled in _replaced[depth]:
            signal.signal(handled, signal.SIG_DFL)
        tell_from_handler(f"{signal.Signals(number).name}: stopping")
        raise KeyboardInterrupt

    depth = len(_replaced)
    restore = handle_signals(STOPS, interrupt)
    _came.append(came)
    try:
        yield came
    finally:
        # Not the last one: `fit` may run in several threads.
        _came[:] = [numbers for numbers in _came if numbers is not came]
        restore()
