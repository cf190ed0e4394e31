"""Keep the processes of a run together: one run directory, one end."""

import atexit
import time
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.system import ranks
from lightning_rl.system.lightning_private import processes_launched_by

GRACE_SECONDS = 5.0
"""Seconds that a failed process gets to report its error before it is killed."""


class Peers(Callback):
    """Share rank 0's run directory with all ranks; end all processes if rank 0 fails.

    Lightning's launcher ends rank 0 if another process fails, but not the reverse.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if ranks.world_size() > 1:
            # Registered last, so that it runs first at exit.
            atexit.unregister(ranks.disconnect)
            atexit.register(ranks.disconnect)
        run_dir: str = trainer.strategy.broadcast(str(cast(Any, trainer).run_dir))
        cast(Any, trainer).run_dir = Path(run_dir)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        launched = processes_launched_by(trainer.strategy)
        if ranks.is_lost_rank(exception):
            deadline = time.monotonic() + GRACE_SECONDS
            # The failed process prints its own error first.
            while any(p.poll() is None for p in launched) and time.monotonic() < deadline:
                time.sleep(0.05)
        for process in launched:
            process.kill()
