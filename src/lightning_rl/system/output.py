"""Print so that a lost terminal, pipe or log file does not end a run.

`rl-cli fit 2>&1 | tee log`: Ctrl-C ends `tee`, too, and the run that saves itself can no longer
write.
"""

import os
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
        with suppress(OSError), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())
        if stream is not sys.stderr:
            tell(f"Standard output is lost ({error.strerror}): no more is printed.", sys.stderr)
