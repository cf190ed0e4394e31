"""Pass rollouts from a writer thread to a reader thread through a preallocated ring."""

import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning_rl.buffers.base import BufferClosed, ReadInterrupted, WriterError
from lightning_rl.buffers.segments import Segment, Window, check_fits, copy_rollout, saved_rollout
from lightning_rl.buffers.waiting import wait_for
from lightning_rl.rollout.contract import clear_bootstrap_slot
from lightning_rl.system.errors import require


class CircularBuffer:
    """Ring of rollouts of N envs between one writer (collector) and one reader (learner).

    The ring has K segments of T+1 slots. The writer gets a free segment (`begin_write`), fills
    slots 0 to T-1 in place, writes the last observation into slot T, and passes the segment on
    (`commit`). The reader gets the oldest segment (`take`) as a window [N, T+1], a view; the next
    `take` frees it.

    The reader may write into its window and add fields, but must not change `observation` and
    `state`. On a GPU, both threads must use the same stream, which is PyTorch's default.

    Args:
        segments: the K segments of N envs and T steps. K = max_staleness + 2: the collector is at
            most max_staleness + 1 windows ahead, and the learner holds one more.
        overflow: behaviour if no segment is free: `block` makes the writer wait; `overwrite` drops
            and counts the oldest unread window.
        timeout_s: seconds that the reader waits for a window before it raises; `inf` for no limit.
            The writer waits without limit.

    Raises:
        ConfigurationError: if the timeout is not positive, or `overflow` is unknown.
    """

    # Segments instead of single slots, because a window must be contiguous to be a view, and
    # because the writer needs slot 0 of the next window while the learner holds the bootstrap slot
    # of this one. The cost is one slot per segment and one copied observation per T steps. Only one
    # thread owns a segment at a time, so only the change of owner needs the lock.

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
        # Reentrant: a signal handler may call `interrupt` while its thread holds the lock.
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
        """Return a free segment; wait for one or drop a window, depending on `overflow`.

        Raises:
            BufferClosed: after `close` or `fail`, also while waiting.
            RuntimeError: if the previous segment is not committed.
        """
        with self._changed:
            if self._writing is not None:
                raise RuntimeError(
                    f"Segment {self._writing.index} is still being written: call commit() "
                    "before the next begin_write()."
                )
            self._wait("writer", self._has_room, math.inf)
            self._refuse_stopped()
            segment = self._free.popleft() if self._free else self._drop_oldest()
            self._writing = segment
        return segment

    def commit(self, num_steps: int, notes: Mapping[str, Any] | None = None) -> None:
        """Pass the current segment to the reader.

        Args:
            num_steps: T' of T steps that were written; the window is [N, T'+1].
            notes: plain data about the window for the reader.

        Raises:
            ValueError: if `num_steps` is out of range.
            BufferClosed: after `close` or `fail`.
            RuntimeError: if no segment was begun.
        """
        if not 1 <= num_steps <= self.num_steps:
            raise ValueError(f"num_steps must lie in [1, {self.num_steps}], got {num_steps}.")
        if self._writing is None:
            raise RuntimeError("No segment is being written: call begin_write() first.")
        # Without the lock: until it is passed on, the segment belongs to the writer alone.
        clear_bootstrap_slot(self._writing.steps[num_steps])
        with self._changed:
            self._refuse_stopped()
            self._unread.append(Window(self._writing, num_steps, dict(notes or {})))
            self._writing = None
            self._counters["written_steps"] += num_steps * self.num_envs
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make `take` raise the first exception that ended the writer, except `BufferClosed`."""
        with self._changed:
            if self._error is None and not isinstance(error, BufferClosed):
                self._error = error
            self._changed.notify_all()

    # --- the reader's side ---

    def take(self) -> Window:
        """Free the previous window and return the oldest unread one; wait for it if necessary.

        Raises:
            WriterError: if the writer failed, even if there are unread windows.
            BufferClosed: after `close`, also while waiting.
            ReadInterrupted: after `interrupt`, if there is no window.
            TimeoutError: if no window arrived in time; `take` may be called again.
        """
        with self._changed:
            # Before the wait: the writer may need this segment for the rollout that is waited for.
            self._free_held()
            came = self._wait(
                "reader", lambda: bool(self._unread) or self._interrupted, self.timeout_s
            )
            if not came:
                raise TimeoutError(
                    f"No rollout came within {self.timeout_s:g} s: the collector "
                    f"{'is writing a rollout' if self._writing else 'has not begun a rollout'}. Is "
                    f"it stuck, or do {self.num_steps} steps of {self.num_envs} envs take longer "
                    "than timeout_s?"
                )
            if self._error is not None:
                raise WriterError(
                    f"The collector failed: {type(self._error).__name__}: {self._error}"
                ) from self._error
            self._refuse_stopped()
            if not self._unread:
                raise ReadInterrupted("interrupt() ended the wait for a rollout.")
            window = self._unread.popleft()
            self._held = window.segment
            self._counters["read_steps"] += window.num_steps * self.num_envs
        return window

    def interrupt(self) -> None:
        """End this and all later waits of the reader. Signal handlers may call this."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    # --- either side's ---

    def close(self) -> None:
        """Raise `BufferClosed` in both threads from now on; unread windows stay in `state_dict`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` or `fail` has been called."""
        return self._closed or self._error is not None

    def statistics(self) -> dict[str, float]:
        """Return the ring's statistics.

        `queue_depth`: unread windows. `writer_wait_seconds`, `reader_wait_seconds`: seconds of
        finished waits in this process. `written_steps`, `read_steps`, `dropped_steps`: env steps
        over all N envs, including those before a resume.
        """
        with self._changed:
            waited = {f"{side}_wait_seconds": value for side, value in self._waited.items()}
            return {"queue_depth": float(len(self._unread)), **waited, **self._counters}

    def state_dict(self) -> dict[str, Any]:
        """Return the unread windows and the counters, without the segments of writer and reader."""
        with self._changed:
            # Leave out waiting times: equal runs must have equal states.
            return {"windows": [window.state_dict() for window in self._unread], **self._counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state before the first write and read.

        Drop and count windows that do not fit: all windows of another N, T or space, with a
        warning, and the oldest windows if the ring has become shorter.

        Raises:
            RuntimeError: if the buffer is in use.
        """
        with self._changed:
            if len(self._free) < len(self.segments):  # a segment is written, unread or held
                raise RuntimeError("Load a state before the first begin_write().")
            self._counters = {key: state[key] for key in self._counters}
            for window_state in state["windows"]:
                saved = saved_rollout(window_state)
                try:
                    check_fits(self.segments[0], saved)
                except ValueError as error:
                    self._counters["dropped_steps"] += saved[:, 1:].numel()
                    warnings.warn(f"A rollout of the checkpoint is dropped: {error}", stacklevel=2)
                    continue
                segment = self._free.popleft() if self._free else self._drop_oldest()
                window = Window(segment, saved.batch_size[1] - 1, window_state["notes"])
                copy_rollout(window.rollout(), saved)  # the window is a view of the segment
                self._unread.append(window)

    # --- with the lock held ---

    def _wait(self, side: str, possible: Callable[[], bool], timeout_s: float) -> bool:
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
            raise BufferClosed("The buffer is closed.")
