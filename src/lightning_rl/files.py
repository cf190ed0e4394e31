"""Write files whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a temporary file beside the target, flush it to the disk, and rename it.

    A kill at any moment leaves the file that was there before; an error leaves no temporary one.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".tmp-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
