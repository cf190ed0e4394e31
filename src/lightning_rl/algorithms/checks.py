"""Refuse what an algorithm cannot do, before a run begins."""

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl.algorithms.evaluated import TrainingData
from lightning_rl.errors import ConfigurationError, require


def check_before_fit(trainer: Trainer, batch_size: int, data: TrainingData) -> None:
    """Refuse settings that do not go together."""
    check_trainer(trainer)
    check_batch_size(batch_size, data)


def check_trainer(trainer: Trainer) -> None:
    """Refuse trainer settings under which the update would be wrong."""
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"Training on {trainer.world_size} processes is not supported: normaliser statistics "
            "and early stops would not agree between them. Use --trainer.devices 1."
        )
    if trainer.precision != "32-true":
        raise ConfigurationError(
            f"trainer.precision {trainer.precision} is not supported: rollouts are collected in "
            "float32, and the update's log-probs must match. Use 32-true."
        )


def check_batch_size(batch_size: int, data: TrainingData) -> None:
    """Refuse a minibatch that is larger than a rollout."""
    per_iteration = data.num_envs * data.buffer_size
    require(
        batch_size <= per_iteration,
        f"model.batch_size={batch_size} is larger than a rollout: data.num_envs * "
        f"data.buffer_size = {per_iteration} transitions. Lower batch_size, or raise num_envs or "
        "buffer_size.",
    )


def check_weights(own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Compare names and shapes, and name the first that differ."""
    differing = [
        f"{key} {list(saved[key].shape)} instead of {list(value.shape)}"
        for key, value in own.items()
        if isinstance(value, Tensor) and key in saved and saved[key].shape != value.shape
    ]
    differing += [f"no {key}" for key in own if key not in saved]
    differing += [f"{key} too many" for key in saved if key not in own]
    require(
        not differing,
        f"The checkpoint belongs to another policy or algorithm; {len(differing)} entries differ: "
        f"{', '.join(differing[:4])}{', ...' if len(differing) > 4 else ''}. Use the config that "
        "it was trained with "
        "(`--ckpt_path` alone does).",
    )
