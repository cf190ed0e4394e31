"""Keep the processes of a run together: one run directory, and one end."""

import atexit
import time
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.system import ranks
from lightning_rl.system.lightning_private import processes_launched_by

GRACE_SECONDS = 5.0
"""How long a process that has failed may take to say why, before it is killed."""


class Peers(Callback):
    """Give all ranks the run directory of rank 0; take the processes along when that fails.

    Lightning's launcher ends rank 0 when another process fails, but not the other way round: the
    others would wait for rank 0 until a timeout.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell the other ranks where the output is; they write nothing there."""
        if ranks.world_size() > 1:
            atexit.unregister(ranks.disconnect)
            atexit.register(ranks.disconnect)
        run_dir: str = trainer.strategy.broadcast(str(cast(Any, trainer).run_dir))
        cast(Any, trainer).run_dir = Path(run_dir)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the processes that this one has launched; one that failed first may say why."""
        launched = processes_launched_by(trainer.strategy)
        if ranks.is_lost_rank(exception):
            deadline = time.monotonic() + GRACE_SECONDS
            while any(p.poll() is None for p in launched) and time.monotonic() < deadline:
                time.sleep(0.05)
        for process in launched:
            process.kill()
