"""Fail on what a file that was sent may not do: import, open outside, connect, start a process."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile")
MARK = "evilmod"
"""Name of the sender's module, and part of the names of files that nothing may open."""

_watched: list[list[str]] = []


def _note(event, arguments):
    if not _watched:
        return
    text = str(arguments[0]) if arguments else ""
    told = _watched[-1]
    if event == "import" and text.partition(".")[0] in (MARK, "antigravity"):
        told.append(f"imports {text}")
    elif event == "open" and Path(os.fsdecode(text)).name.startswith(MARK):
        told.append(f"opens {text}")
    elif event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        told.append(f"{event} {arguments[1:]}")
        raise OSError("not in this test")
    # The patterns of an adapter are matched in a process of their own, isolated by -I.
    elif event.startswith(STARTS) and not (event == STARTS[0] and "-I" in list(arguments[1])):
        told.append(f"starts {text}")


sys.addaudithook(_note)  # which cannot be removed


@contextmanager
def nothing_happens():
    """Fail if the block imports the sender's module, opens a marked file, connects, or starts a process."""
    _watched.append([])
    try:
        yield
    finally:
        told = _watched.pop()
    assert not told, told
