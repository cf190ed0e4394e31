"""Typed access to the algorithm and the data module of a trainer."""

from typing import cast

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.algorithms import Algorithm
from lightning_rl.training.data import RLDataModule


def algorithm_of(module: LightningModule) -> Algorithm:
    """Return the module as an `Algorithm`."""
    return cast(Algorithm, module)


def data_of(trainer: Trainer) -> RLDataModule:
    """Return the data module of a running trainer."""
    return cast(RLDataModule, trainer.datamodule)  # type: ignore[attr-defined]  # set by `fit`
