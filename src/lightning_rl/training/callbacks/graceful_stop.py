"""Stop on a signal: finish the update, save, stop."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.collectors import Collector
from lightning_rl.system import ranks
from lightning_rl.system.lightning_private import skip_signal_exchange
from lightning_rl.system.machine import settings
from lightning_rl.system.output import tell_from_handler
from lightning_rl.system.saved_runs import CHECKPOINTS
from lightning_rl.system.signals import STOPS, handle_signals
from lightning_rl.training.callbacks.typed import data_of

SAME_SIGNAL_SECONDS = 2.0
"""Seconds in which a second SIGTERM is ignored, because `timeout` and `torchrun` send it twice."""


class GracefulStop(Callback):
    """On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, save the run after the current iteration, and end it.

    During an evaluation, the run is saved after it.

    A single process does not wait for the unfinished rollout of a background collector. A second
    Ctrl-C ends the run immediately, without saving; so does a second SIGTERM at least
    `SAME_SIGNAL_SECONDS` after the first. `trainer.stop_signal` holds the signal.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / CHECKPOINTS / "last.ckpt"
        self._received: int | None = None  # of this process; set by the handler only
        self._first = 0.0  # time of the first signal, in seconds
        self._phase = "iteration"  # or evaluation
        self._collector: Collector | None = None
        self._restore_signals: Callable[[], None] = lambda: None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._received = None
        self._collector = None
        data = data_of(trainer)
        if trainer.world_size == 1 and data.dataset is not None:
            data.dataset.on_interrupt = lambda: self._save_and_stop(trainer, self._received)
            self._collector = data.collector
        if trainer.world_size > 1 and settings().skip_signal_exchange:
            skip_signal_exchange(trainer)
        self._restore_signals = handle_signals(STOPS, self._handle)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phase = "evaluation"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phase = "iteration"

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.is_last_batch or trainer.should_stop:
            return
        number = self._received_by_any()
        if number is not None:
            self._save_and_stop(trainer, number)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.should_stop:
            return
        number = self._received_by_any()
        if number is not None:
            self._stop(trainer, number)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not with several processes: on a launcher's signal, Lightning's handler would wait for
        # processes that have ended.
        if ranks.world_size() == 1:
            self._restore_signals()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if ranks.world_size() == 1:
            self._restore_signals()

    def _received_by_any(self) -> int | None:
        # Do not store it in `_received`: a signal during the wait for the other ranks would be
        # lost.
        return ranks.max_over_ranks(self._received or 0) or None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ends_at_once(number):
            raise KeyboardInterrupt
        if self._received is None:
            self._first = time.monotonic()
        self._received = number
        if self._collector is not None:
            self._collector.interrupt()
        name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(signal.Signals(number))
        hint = f" ({name} again to stop immediately, without saving)" if name else ""
        tell_from_handler(f"{signal.Signals(number).name}: stopping after this {self._phase}{hint}")

    def _ends_at_once(self, number: int) -> bool:
        """Return whether to stop immediately, but not for a SIGTERM after another signal."""
        if self._received is None:
            return False
        is_late = time.monotonic() - self._first >= SAME_SIGNAL_SECONDS
        is_repeated = self._received == number == signal.SIGTERM and is_late
        return number == signal.SIGINT or is_repeated

    def _save_and_stop(self, trainer: Trainer, number: int | None) -> None:
        trainer.save_checkpoint(self.path)
        trainer.limit_val_batches = 0
        self._stop(trainer, number)

    def _stop(self, trainer: Trainer, number: int | None) -> None:
        trainer.should_stop = True
        trainer.stop_signal = number  # type: ignore[attr-defined]  # RLTrainer
