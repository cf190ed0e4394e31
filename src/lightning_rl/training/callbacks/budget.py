"""Stop training when the env-step budget is used up."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_rl.training.callbacks.typed import algorithm_of, data_of


class EnvStepBudget(Callback):
    """Stop after the iteration that reaches `data.total_env_steps`, evaluate, and save."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reached(trainer, pl_module):
            trainer.should_stop = True
            rank_zero_info(
                "The budget is already used up; raise data.total_env_steps to continue training."
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._reached(trainer, pl_module):
            trainer.should_stop = True

    def _reached(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        return algorithm_of(pl_module).env_steps >= data_of(trainer).total_env_steps
