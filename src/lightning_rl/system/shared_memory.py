"""Exchange bytes between the processes of one machine through memory that they share.

Gloo takes the way through sockets and threads of its own. Where every core has a process that
computes, these wait for the scheduler's time slices: 1.2 ms on average for a gradient of 36 kB,
and 4 ms for each tenth of them, against 0.05 ms here (two processes on two cores).
"""

import mmap
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CAPACITY = 1 << 20
"""Bytes that a process exchanges at once; more of them go in rounds."""

HEADER = 64
EXCHANGES, LEFT, SIZES = 0, 1, 2
"""Words of a row's header: how many exchanges its process has taken part in, whether it has left,
and how many bytes it gave, on either side."""

SPINS = 20_000
"""How often a process asks whether the others have come, before it sleeps in between."""

PAUSE_SECONDS, CHECK_SECONDS = 2e-4, 0.1
"""How long it sleeps then, and how often it looks whether the others are alive."""


class LostRankError(RuntimeError):
    """Another process of the run has ended, or has not answered in time."""


class SharedTable:
    """A row for each process, which it alone writes and all read.

    A process writes its bytes, then how many exchanges it has taken part in, and waits until all
    have got as far. Bytes lie in two places in turn, so that a process may go on to the next
    exchange while a slower one still reads: it can be ahead by one exchange, not by two.

    It rests on stores becoming visible in the order in which they are made, which x86 promises.

    Args:
        memory: the bytes of all rows, shared.
        rank: whose row is ours.
        pids: of all processes, by rank.
        timeout: s after which a process that does not come is given up.
    """

    def __init__(self, memory: Any, rank: int, pids: list[int], timeout: float) -> None:
        table = np.frombuffer(memory, np.uint8).reshape(len(pids), -1)
        self._sides = [table[:, at : at + CAPACITY] for at in (HEADER, HEADER + CAPACITY)]
        self._words = memoryview(memory).cast("B").cast("q")
        self._rows = range(0, len(self._words), len(self._words) // len(pids))
        self._rank, self._pids, self._timeout = rank, pids, timeout
        self._own = self._rows[rank]
        self._count = 0

    def exchange(self, data: np.ndarray) -> list[np.ndarray]:
        """Return what all processes gave, by rank, flat; it holds until the next exchange.

        Args:
            data: of any size, which may differ by rank, but of one dtype.

        Raises:
            LostRankError: where a process has ended, or does not come in time.
        """
        own = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        taken: list[list[np.ndarray]] = [[] for _ in self._pids]
        start = 0
        while True:
            side = self._count % 2
            slots, size = self._sides[side], SIZES + side
            piece = own[start : start + CAPACITY]
            slots[self._rank, : len(piece)] = piece
            self._words[self._own + size] = len(own)
            # Last: whoever sees the count finds the bytes there already.
            self._count += 1
            self._words[self._own + EXCHANGES] = self._count
            self._wait()
            lengths = [self._words[row + size] for row in self._rows]
            parts = [
                slots[rank, : max(0, min(length - start, CAPACITY))]
                for rank, length in enumerate(lengths)
            ]
            start += CAPACITY
            last = start >= max(lengths)
            # What fits at once, nearly always, is handed out where it lies, without a copy.
            if last and not taken[0]:
                return [part.view(data.dtype) for part in parts]
            for rounds, part in zip(taken, parts, strict=True):
                rounds.append(part.copy())  # slots are written again
            if last:
                return [np.concatenate(rounds).view(data.dtype) for rounds in taken]

    def leave(self) -> None:
        """Tell the others that this process takes part no more."""
        self._words[self._own + LEFT] = 1

    def _wait(self) -> None:
        """Wait for all to have come as far as this process."""
        looks, began, checked = 0, time.monotonic(), 0.0
        while self._missing():
            looks += 1
            if looks < SPINS:
                # Not sleep, whose shortest is longer than most waits; nor a loop without it, which
                # keeps the others from the core where there are fewer cores than processes.
                os.sched_yield()
                continue
            time.sleep(PAUSE_SECONDS)
            waited = time.monotonic() - began
            if waited - checked > CHECK_SECONDS:
                checked = waited
                self._check_others(waited)

    def _missing(self) -> list[int]:
        """Return the ranks that have not come as far."""
        words, count = self._words, self._count
        return [i for i, row in enumerate(self._rows) if words[row + EXCHANGES] < count]

    def _check_others(self, waited: float) -> None:
        missing = self._missing()
        ended = [
            rank
            for rank in missing
            if self._words[self._rows[rank] + LEFT] or not _alive(self._pids[rank])
        ]
        if ended:
            raise LostRankError(f"rank {ended[0]} has ended")
        if missing and waited > self._timeout:
            raise LostRankError(f"rank {missing[0]} did not come within {self._timeout:.0f} s")


def open_table(rank: int, gather: Callable[[Any], list[Any]], timeout: float) -> SharedTable | None:
    """Return a table that all processes share; None on all where that is not possible.

    The memory has no name: it is gone with the processes, however they end.

    Args:
        rank: of this process.
        gather: returns what all ranks gave, in another way.
        timeout: see `SharedTable`.
    """
    world = len(gather(None))
    size = world * (HEADER + 2 * CAPACITY)
    path, token, fd = "", secrets.token_bytes(8), -1
    if rank == 0 and _possible():
        fd = os.memfd_create("lightning_rl")
        os.ftruncate(fd, size)
        os.pwrite(fd, token, size - len(token))
        path = f"/proc/{os.getpid()}/fd/{fd}"  # by which others open what has no name
    path, token = gather((path, token))[0]
    memory = _mapped(path, size, token)
    reached = gather((memory is not None, os.getpid()))
    # All have mapped it, or never will.
    if fd >= 0:
        os.close(fd)
    if memory is None or not all(ok for ok, _ in reached):
        return None
    return SharedTable(memory, rank, [pid for _, pid in reached], timeout)


def _possible() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _mapped(path: str, size: int, token: bytes) -> mmap.mmap | None:
    """Map rank 0's memory; None where it is on another machine, or out of reach."""
    if not path or not _possible():
        return None
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        # On another machine the same path may be another file; the token is in ours alone.
        if os.fstat(fd).st_size != size or os.pread(fd, len(token), size - len(token)) != token:
            return None
        return mmap.mmap(fd, size)
    except OSError:
        return None
    finally:
        os.close(fd)


def _alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and was not waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
