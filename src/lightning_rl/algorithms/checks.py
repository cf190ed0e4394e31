"""Refuse what an algorithm cannot do, before a run begins."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from lightning_rl.algorithms.evaluated import TrainingData
from lightning_rl.errors import ConfigurationError, require


def check_trainer(trainer: Trainer) -> None:
    """Refuse trainer settings under which the update would be wrong."""
    check_strategy(trainer)
    if trainer.precision != "32-true":
        raise ConfigurationError(
            f"trainer.precision {trainer.precision} is not supported: rollouts are collected in "
            "float32, and the update's log-probs must match; in less, that is untested. Use "
            "32-true."
        )


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies that do not give each process a whole policy and envs of its own."""
    strategy = trainer.strategy
    started = getattr(strategy, "_start_method", "popen")
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy) or started != "popen":
        name = type(strategy).__name__ + ("" if started == "popen" else f" by {started}")
        raise ConfigurationError(
            f"trainer.strategy {name} is not supported: "
            + (
                "every process needs the whole policy, to act with."
                if started == "popen"
                else "its processes would share the worker processes of an env, and what they "
                "counted would not come back."
            )
            + " Use --trainer.strategy ddp, or one device."
        )


def check_batch_size(batch_size: int, data: TrainingData) -> None:
    """Refuse a minibatch that is larger than a rollout."""
    per_iteration = data.env_steps_per_iteration
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
