"""Print so that a lost terminal, pipe or log file does not end a run, nor delay a signal.

`rl-cli fit 2>&1 | tee log`: Ctrl-C ends `tee`, too, and the run that saves itself can no longer
write. `rl-cli fit | less`: a pager that waits for its user stops to read, and the next print waits.
"""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO


def tell(text: object = "", stream: IO[str] | None = None, end: str = "\n") -> None:
    """Print a text to `stream` (default: standard output), which may be lost."""
    stream = sys.stdout if stream is None else stream
    with losable(stream):
        print(text, file=stream, end=end, flush=True)


@contextmanager
def losable(stream: IO[str]) -> Iterator[None]:
    """Catch an error of writing to `stream`, and discard all that is written to it later."""
    try:
        yield
    except OSError as error:
        _discard(stream)
        if stream is not sys.stderr:
            tell(f"Standard output is lost ({error.strerror}): no more is printed.", sys.stderr)


def tell_from_handler(text: str) -> None:
    """Print a text to stderr from a signal handler, which may have interrupted a print.

    Output whose reader has stopped is discarded from now on: a print that waits for it continues.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # no file behind it, or not on Windows
            if not select.select([], [stream.fileno()], [], 0)[1]:
                _discard(stream)
    try:
        # `print` is not reentrant: a handler may have interrupted one.
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
    except (OSError, ValueError):
        with suppress(Exception):
            print(text, file=sys.stderr)


def _discard(stream: IO[str]) -> None:
    with suppress(OSError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())
