"""Let a checkpoint of a run in Python hold its configuration, as one of `rl-cli` does."""

from typing import Any, cast

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.callbacks.parts import algorithm_of
from lightning_rl.checkpoint_format import CONFIG_KEY, LACKS_KEY
from lightning_rl.construction import Constructed, construction, described
from lightning_rl.data import RLDataModule

OF_THE_RUN = ("run_dir", "output_dir", "exp_name", "init_from")
"""Settings of the trainer that say where a run writes, and what it began with."""


class ConfigurationOfPython(Callback):
    """Write down how the algorithm, its policy, the data module and the trainer were made.

    What cannot be written (a lambda, an object of a foreign class) is named instead, so that who
    reads the checkpoint can say what is missing. A run of `rl-cli` has a configuration already.
    """

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the configuration, unless there is one."""
        if CONFIG_KEY not in checkpoint:
            config, lacks = configuration_of(trainer, pl_module)
            checkpoint[CONFIG_KEY] = yaml.safe_dump(config, sort_keys=False)
            checkpoint[LACKS_KEY] = lacks


def configuration_of(
    trainer: Trainer, pl_module: LightningModule
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the configuration of a run, and what it lacks in words, by path."""
    lacks: dict[str, str] = {}
    data = cast(Any, trainer).datamodule
    model = construction(algorithm_of(pl_module))
    runner = construction(cast(Constructed, trainer))
    lacks |= {f"model.{path}": what for path, what in model.lacks.items()}
    settings: dict[str, Any] = {}
    if type(data) is RLDataModule:
        settings = {k: described(v, f"data.{k}", lacks) for k, v in data.settings().items()}
    else:
        lacks["data"] = f"an object of {type(data).__name__}"
    lacks |= {
        f"trainer.{path.removeprefix('init_args.')}": what for path, what in runner.lacks.items()
    }
    trained = runner.config["init_args"]
    config = {
        "seed_everything": settings.get("seed", True),
        "exp_name": trained.get("exp_name", "run"),
        "model": {key: value for key, value in model.config.items() if value is not None},
        "data": {key: value for key, value in settings.items() if f"data.{key}" not in lacks},
        "trainer": {key: value for key, value in trained.items() if key not in OF_THE_RUN},
    }
    return config, lacks
