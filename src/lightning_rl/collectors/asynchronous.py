"""Collect rollouts in a background thread while the learner trains."""

import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from lightning_rl.buffers import BufferClosed, CircularBuffer, Window, saved_rollout
from lightning_rl.collectors.base import Collector
from lightning_rl.collectors.context import CollectorContext
from lightning_rl.collectors.loop import RolloutLoop
from lightning_rl.collectors.weights import PublishedWeights, acting_copy
from lightning_rl.system.errors import check_range
from lightning_rl.system.process import Computing
from lightning_rl.system.sharded import whole_state

JOIN_SECONDS = 5.0
"""Seconds that `close` waits for the thread, which stops between two env steps."""


MOST_TIMES = 10_000
"""Maximum number of env step start times kept between two calls of `metrics`."""


class AsyncCollector(Collector):
    """Step the env in a background thread, with a copy of the policy that lags the learner's.

    The thread fills a `CircularBuffer`; `collect` returns the oldest rollout, and waits only if
    there is none. The learner publishes weights after each update (off-policy algorithms also
    within an iteration), and the thread loads them between two env steps. `policy_version` is the
    number of completed updates in the weights of each step.

    Rollout k begins after k - `max_staleness` updates (the capacity rule of Fu et al. 2025,
    "AReaL", section 5.1), so no rollout is too old, and none is dropped. With `max_staleness` 0,
    learner and collector alternate, and results equal `SyncCollector`'s bit for bit. With
    `overflow: overwrite` the thread never waits: old rollouts are dropped and counted
    (`async/dropped_steps`).

    A checkpoint holds the unread rollouts and the start state of the current rollout: a resumed run
    collects that rollout again.

    Args:
        context: see `Collector`.
        max_staleness: largest lag, in updates, of a step's weights behind the learner's.
        overflow: if the buffer is full, `block` the thread or `overwrite` the oldest rollout.
        timeout_s: seconds that the learner waits for a rollout before the run ends.
        device: device of the acting policy. Default: the learner's device.
    """

    in_background = True

    def __init__(
        self,
        context: CollectorContext,
        *,
        max_staleness: int = 1,
        overflow: Literal["block", "overwrite"] = "block",
        timeout_s: float = 600.0,
        device: str | None = None,
    ) -> None:
        super().__init__(context)
        policy = context.policy
        check_range("max_staleness", max_staleness, minimum=0)
        check_range("timeout_s", timeout_s, above=0)
        self.max_staleness = max_staleness
        self.may_drop_rollouts = overflow == "overwrite"
        own_device = torch.device(device) if device else policy.version.device
        self._acting = acting_copy(policy, own_device)
        self._weights = PublishedWeights(policy, own_device)
        self._first_version = self._weights.version
        self._acting_number = -1  # number of the publication in use
        acting = replace(context, policy=self._acting)
        self._buffer = CircularBuffer(acting.segments(max_staleness + 2), overflow, timeout_s)
        self._loop = RolloutLoop(
            acting,
            self._buffer.segments,
            load_weights=self._load_weights,
        )
        self.code_paths = self._loop.code_paths
        self.num_rollouts = len(self._buffer.segments)
        self._begun = 0
        self._read = 0  # number of the last returned rollout, from 1
        self._stale_steps = 0
        self._boundary = threading.Lock()  # guards the state of a checkpoint
        self._resume_from = self._loop.state_dict()
        self._thread: threading.Thread | None = None
        self._is_lost = False  # `fail` was called, because the thread hangs
        self._measured = {"at": time.perf_counter(), "collector": 0.0, "learner": 0.0}
        self._begun_at: deque[float] = deque(maxlen=MOST_TIMES)  # start of env steps, in seconds

    def collect(self) -> TensorDict:
        if self._thread is None:
            self._start()
        try:
            window = self._buffer.take()
            while self._is_too_old(window):
                self._stale_steps += window.num_steps * self.env.num_envs
                window = self._buffer.take()
        except TimeoutError as error:
            raise TimeoutError(f"{error} {self._thread_status()}") from error
        self.reports_success = self._loop.reports_success
        if window.notes["number"] != self._read + 1:  # a rollout in between was dropped
            self.skip_rollout()
        self._read = window.notes["number"]
        rollout = window.rollout().to(self.policy.version.device)
        return self.count_rollout(rollout, window.notes["envs_were_reset"], window.notes["reports"])

    def interrupt(self) -> None:
        self._buffer.interrupt()

    def fail(self, error: Exception) -> bool:
        self._is_lost = self._thread is not None
        if self._is_lost:
            self._buffer.fail(error)
        return self._is_lost

    def publish(self) -> None:
        self._weights.publish(self.policy)

    def metrics(self) -> dict[str, float]:
        statistics = self._buffer.statistics()
        now = {
            "at": time.perf_counter(),
            "collector": statistics["writer_wait_seconds"] + self._weights.waited_seconds,
            "learner": statistics["reader_wait_seconds"],
        }
        elapsed = {key: now[key] - self._measured[key] for key in now}
        self._measured = now
        return (
            super().metrics()
            | self._pace()
            | {
                "async/queue_depth": statistics["queue_depth"],
                "async/collector_idle": 100.0 * min(1.0, elapsed["collector"] / elapsed["at"]),
                "async/learner_idle": 100.0 * min(1.0, elapsed["learner"] / elapsed["at"]),
                "async/dropped_steps": statistics["dropped_steps"] + self._stale_steps,
                "async/collected_steps": statistics["written_steps"],
                "async/publish_ms": 1000.0 * self._weights.publish_seconds,
            }
        )

    def _pace(self) -> dict[str, float]:
        times = [self._begun_at.popleft() for _ in range(len(self._begun_at) - 1)]
        times += self._begun_at  # keep the last time for the next call
        if len(times) < 3:
            return {}
        gaps = 1000.0 * np.diff(times)
        return {"async/step_ms": float(gaps.mean()), "async/step_jitter_ms": float(gaps.std())}

    def state_dict(self) -> dict[str, Any]:
        with self._boundary:
            return super().state_dict() | {
                "loop": self._resume_from,
                "buffer": self._buffer.state_dict(),
                "stale_steps": self._stale_steps,
                "read": self._read,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loop.load_state_dict(state["loop"])
        self._read = state.get("read", state["loop"]["rollouts"])  # older checkpoints lack it
        if "buffer" in state:
            self._stale_steps = state["stale_steps"]
            saved = [
                {**window, "notes": _notes(window["notes"])}
                for window in state["buffer"]["windows"]
            ]
            windows = self._fresh_enough(saved)
            self._buffer.load_state_dict(state["buffer"] | {"windows": windows})
        self._begun = int(self._buffer.statistics()["queue_depth"])
        self._resume_from = state["loop"]

    def close(self) -> None:
        self._weights.close()
        self._buffer.close()
        if self._thread is not None:
            self._thread.join(0.0 if self._is_lost else JOIN_SECONDS)
            if self._thread.is_alive() and not self._is_lost:  # a lost one was reported
                warnings.warn(
                    f"The collector's thread has not stopped within {JOIN_SECONDS:g} s: a step of "
                    f"{type(self.env).__name__} or of {type(self.policy).__name__} hangs. The "
                    "thread ends with the process.",
                    stacklevel=2,
                )
            self._thread = None

    # --- the thread ---

    def _start(self) -> None:
        # `load_state_dict` may have been called since the constructor.
        self._acting.load_state_dict(whole_state(self.policy))
        self._weights.publish(self.policy)
        self._first_version = self._weights.version
        work = (Computing.here().apply,)
        self._thread = threading.Thread(target=self._work, args=work, name="collector", daemon=True)
        self._thread.start()

    def _work(self, begin: Callable[[], None]) -> None:
        begin()
        try:
            while True:
                self._weights.wait_until(self._may_begin)
                segment = self._buffer.begin_write()
                self._acting_number = self._weights.load_into(self._acting)
                steps, notes = self._loop.run(segment)
                notes["number"] = self._loop.rollouts
                # A checkpoint in between would have this rollout twice, or not at all.
                with self._boundary:
                    self._buffer.commit(steps, notes)
                    self._begun += 1
                    self._resume_from = self._loop.state_dict()
        except BufferClosed:  # `close` ends the thread
            pass
        except BaseException as error:  # the learner's next `collect` raises it
            self._buffer.fail(error)

    def _may_begin(self, version: int) -> bool:
        updates = version - self._first_version
        # The thread always waits for the first update, which compiles and allocates.
        if self._buffer.overflow == "overwrite":
            return updates > 0 or self._begun == 0
        return self._begun <= updates + (self.max_staleness if updates else 0)

    def _load_weights(self, finish: Callable[[], None]) -> bool:
        self._weights.refuse_closed()  # ends the thread between two steps
        self._begun_at.append(time.perf_counter())
        if self._weights.number == self._acting_number:
            return False
        finish()
        self._acting_number = self._weights.load_into(self._acting)
        return True

    def _is_too_old(self, window: Window) -> bool:
        if self._buffer.overflow == "block":
            return False  # cannot occur: see `_may_begin`
        oldest = window.rollout()["policy_version"][:, :-1].min()
        return int(self.policy.version) - int(oldest) > self.max_staleness

    def _fresh_enough(self, windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._buffer.overflow == "overwrite":
            return windows  # `collect` drops them
        rollouts = [saved_rollout(window) for window in windows]
        oldest = [int(rollout["policy_version"][:, :-1].min()) for rollout in rollouts]
        now, dropped = int(self.policy.version), 0
        while any(
            # The unread rollout number `turn` is trained on after as many further updates.
            now + turn - version > self.max_staleness
            for turn, version in enumerate(oldest[dropped:])
        ):
            self._stale_steps += rollouts[dropped][:, 1:].numel()
            dropped += 1
        if dropped:
            warnings.warn(
                f"Dropped {dropped} rollouts of the checkpoint that are older than "
                f"max_staleness={self.max_staleness} allows.",
                stacklevel=2,
            )
        return windows[dropped:]

    def _thread_status(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread else None
        if frame is None:
            return "Its thread has ended."
        return f"Its thread is at:\n{''.join(traceback.format_stack(frame))}"


def _notes(saved: dict[str, Any]) -> dict[str, Any]:
    # With the types that `RolloutLoop.run` gives: the checkpoint may be from somebody else.
    reports = {str(name): float(value) for name, value in saved["reports"].items()}
    was_reset = bool(saved["envs_were_reset"])
    return {"number": int(saved["number"]), "envs_were_reset": was_reset, "reports": reports}
