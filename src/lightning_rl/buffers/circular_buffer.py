"""Pass rollouts from a writing thread to a reading one through a preallocated ring."""

import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning_rl.buffers.base import BufferClosed, ReadInterrupted, WriterError
from lightning_rl.buffers.segments import (
    Segment,
    Window,
    check_fits,
    saved_rollout,
)
from lightning_rl.buffers.waiting import wait_for
from lightning_rl.rollout.contract import clear_bootstrap_slot, copy_rollout
from lightning_rl.system.errors import require


class CircularBuffer:
    """A ring of time slices of N envs between one writer (a collector) and one reader (a learner).

    The ring consists of K segments of T+1 slots. The writer takes a free segment (`begin_write`),
    fills its slots 0 to T-1 in place, writes the last observation into slot T, and hands it over
    (`commit`). The reader takes the oldest one (`take`) as a window [N, T+1], a view, and frees it
    by the next `take`. Windows come in the order of their writing, each once.

    Why segments, not a ring of single slots: a window must be contiguous where the ring wraps, or
    it could not be a view; and the bootstrap slot of one window is slot 0 of the next, which the
    writer needs while the learner holds the first. The price is one slot per segment, and one
    observation that the writer copies every T steps.

    K is max_staleness + 2: a collector that keeps the bound is at most max_staleness + 1 windows
    ahead of what was read, and the learner keeps one more, maybe through an evaluation.

    A segment belongs to one side at a time, so its content needs no lock; changing hands does. The
    reader may write into its window and add fields, but leaves `observation` and `state` alone. On
    a GPU both sides use the same stream, as PyTorch's threads do unless told otherwise.

    Args:
        segments: K of them, of N envs and T steps.
        overflow: what a writer meets who has no free segment: `block`, it waits; `overwrite`, the
            oldest window that nobody has read is dropped, and counted.
        timeout_s: how long the reader waits for a window before it raises, in seconds; `inf` for
            ever. The writer waits for ever: for as long as an update and an evaluation take.

    Raises:
        ConfigurationError: for a time out of range, or an unknown `overflow`.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        overflow: Literal["block", "overwrite"] = "block",
        timeout_s: float = 600.0,
    ) -> None:
        require(
            overflow in ("block", "overwrite"),
            f"overflow must be 'block' (the writer waits) or 'overwrite' (the oldest unread "
            f"rollout is dropped), got {overflow!r}.",
        )
        require(timeout_s > 0, f"timeout_s must be positive (inf: no limit), got {timeout_s}.")
        self.num_envs, slots = segments[0].rollout.batch_size
        self.num_steps = slots - 1
        self.overflow = overflow
        self.timeout_s = timeout_s
        self.segments = segments
        self._changed = threading.Condition()  # guards everything below
        self._free = deque(self.segments)
        self._unread: deque[Window] = deque()
        self._writing: Segment | None = None
        self._held: Segment | None = None
        self._closed = self._interrupted = False
        self._error: BaseException | None = None
        self._counters = {"written_steps": 0, "read_steps": 0, "dropped_steps": 0}
        self._waited = {"writer": 0.0, "reader": 0.0}

    # --- the writer's side ---

    def begin_write(self) -> Segment:
        """Return a free segment; what is in it is left from an earlier lap.

        Waits for one, or drops a window, as `overflow` says.

        Raises:
            BufferClosed: after `close` or `fail`, also while waiting.
            RuntimeError: where the segment before has not been committed.
        """
        with self._changed:
            if self._writing is not None:
                raise RuntimeError(
                    f"Segment {self._writing.index} is still being written: one writer at a time, "
                    "and commit() before the next begin_write()."
                )
            self._wait("writer", self._has_room, math.inf)
            self._refuse_stopped()
            segment = self._free.popleft() if self._free else self._drop_oldest()
            self._writing = segment
        return segment

    def commit(self, num_steps: int, notes: Mapping[str, Any] | None = None) -> None:
        """Hand the segment that was begun to the reader.

        Args:
            num_steps: T' of T steps that were taken; the window is [N, T'+1], and slot T' is its
                bootstrap slot.
            notes: what else the reader is to know of the window, as plain data.

        Raises:
            ValueError: for a number of steps out of range.
            BufferClosed: after `close` or `fail`.
            RuntimeError: where no segment has been begun.
        """
        if not 1 <= num_steps <= self.num_steps:
            raise ValueError(f"num_steps must lie in [1, {self.num_steps}], got {num_steps}.")
        if self._writing is None:
            raise RuntimeError("No segment is being written: call begin_write() first.")
        clear_bootstrap_slot(self._writing.steps[num_steps])
        with self._changed:
            self._refuse_stopped()
            self._unread.append(Window(self._writing, num_steps, dict(notes or {})))
            self._writing = None
            self._counters["written_steps"] += num_steps * self.num_envs
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Hand over the exception that ended the writer, for the reader's `take` to raise.

        The first one counts; `BufferClosed` does not, it only says that the writer obeyed.
        """
        with self._changed:
            if self._error is None and not isinstance(error, BufferClosed):
                self._error = error
            self._changed.notify_all()

    # --- the reader's side ---

    def take(self) -> Window:
        """Free the window that was taken before, and give out the oldest one; waits for one.

        Raises:
            WriterError: from the exception that ended the writer, whatever else is unread.
            BufferClosed: after `close`, also while waiting.
            ReadInterrupted: after `interrupt`, also while waiting, where there is no window.
            TimeoutError: where no window came in time; one may try again.
        """
        with self._changed:
            self._free_held()
            came = self._wait(
                "reader", lambda: bool(self._unread) or self._interrupted, self.timeout_s
            )
            if not came:
                raise TimeoutError(
                    f"No rollout came within {self.timeout_s:g} s: the collector "
                    f"{'has begun one' if self._writing else 'has begun none'}. Is it stuck, or do "
                    f"{self.num_steps} steps of {self.num_envs} envs take longer than timeout_s?"
                )
            if self._error is not None:
                raise WriterError(
                    f"The collector failed: {type(self._error).__name__}: {self._error}"
                ) from self._error
            self._refuse_stopped()
            if not self._unread:
                raise ReadInterrupted("The reader was asked not to wait for a rollout.")
            window = self._unread.popleft()
            self._held = window.segment
            self._counters["read_steps"] += window.num_steps * self.num_envs
        return window

    def interrupt(self) -> None:
        """Have the reader wait no more, for good. Signal handlers may: the lock is reentrant."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    # --- either side's ---

    def close(self) -> None:
        """Wake both sides with `BufferClosed`, for good; may be called more than once.

        What nobody has read stays in `state_dict`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether both sides are to stop: after `close`, or `fail`."""
        return self._closed or self._error is not None

    def statistics(self) -> dict[str, float]:
        """Return what the ring has seen.

        `queue_depth`: windows that wait to be read. `writer_wait_seconds`, `reader_wait_seconds`:
        what each side spent waiting for the other, finished waits only, since this object was made.
        `written_steps`, `read_steps`, `dropped_steps`: env steps over all N envs, a resumed run's
        past included; what was written and neither read nor dropped waits.
        """
        with self._changed:
            waited = {f"{side}_wait_seconds": value for side, value in self._waited.items()}
            return {"queue_depth": float(len(self._unread)), **waited, **self._counters}

    def state_dict(self) -> dict[str, Any]:
        """Return the windows that wait to be read, with their content, and the counters.

        The window that the reader holds counts as read; a segment under way is not part of it.
        """
        with self._changed:
            # No wait in seconds is saved: two runs that did the same shall have the same state.
            return {"windows": [window.state_dict() for window in self._unread], **self._counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state, before anything is written or read.

        Windows that do not fit are counted as dropped: where N, T or the spaces have changed, with
        a warning; where the ring has become shorter, the oldest.

        Raises:
            RuntimeError: where the buffer is in use.
        """
        with self._changed:
            if len(self._free) < len(self.segments):
                raise RuntimeError("Load a state before the first begin_write().")
            self._counters = {key: state[key] for key in self._counters}
            for kept in state["windows"]:
                saved = saved_rollout(kept)
                try:
                    check_fits(self.segments[0], saved)
                except ValueError as error:
                    self._counters["dropped_steps"] += saved[:, 1:].numel()
                    warnings.warn(f"A rollout of the checkpoint is dropped: {error}", stacklevel=2)
                    continue
                segment = self._free.popleft() if self._free else self._drop_oldest()
                window = Window(segment, saved.batch_size[1] - 1, kept["notes"])
                copy_rollout(window.rollout(), saved)
                self._unread.append(window)

    # --- with the lock held ---

    def _wait(self, side: str, possible: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is possible, or the buffer is stopped; False where time ran out."""
        came, seconds = wait_for(self._changed, lambda: self.closed or possible(), timeout_s)
        self._waited[side] += seconds
        return came

    def _has_room(self) -> bool:
        return bool(self._free) or (self.overflow == "overwrite" and bool(self._unread))

    def _drop_oldest(self) -> Segment:
        window = self._unread.popleft()
        self._counters["dropped_steps"] += window.num_steps * self.num_envs
        return window.segment

    def _free_held(self) -> None:
        if self._held is not None:
            self._free.append(self._held)
            self._held = None
            self._changed.notify_all()

    def _refuse_stopped(self) -> None:
        if self.closed:
            raise BufferClosed("The buffer was closed: nothing is written or read any more.")
