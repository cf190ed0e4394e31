"""Hand the settings of a run to its loggers."""

from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.callbacks.parts import algorithm_of, data_of
from lightning_rl.record import Recorded, plain, settings_of


class SettingsWriter(Callback):
    """Write what the run was made with, where it begins and where it is resumed.

    A run has one. That of the command line knows the whole configuration; this one asks the
    constructors of algorithm, data module and trainer what they took.
    """

    def settings(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the settings, nested as in a configuration."""
        return {
            "seed_everything": data_of(trainer).seed,
            "model": plain(algorithm_of(pl_module)),
            "data": settings_of(data_of(trainer)),
            "trainer": settings_of(cast(Recorded, trainer)),
        }

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write them."""
        if trainer.is_global_zero and trainer.loggers:
            settings = self.settings(trainer, pl_module)
            for logger in trainer.loggers:
                logger.log_hyperparams(settings)
