"""Refuse what an algorithm cannot do, before a run begins."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ranks
from lightning_rl.algorithms.evaluated import TrainingData
from lightning_rl.checkpoint_format import STATE_KEY, WEIGHTS, check_schema
from lightning_rl.errors import ConfigurationError, require

PRECISIONS = ("32-true", "bf16-mixed")
"""Those that are tested."""


def check_before_fit(trainer: Trainer, batch_size: int, data: TrainingData) -> None:
    """Refuse settings that do not go together."""
    check_trainer(trainer)
    check_batch_size(batch_size, data)


def check_trainer(trainer: Trainer) -> None:
    """Refuse trainer settings under which the update would be wrong."""
    check_strategy(trainer)
    if trainer.precision not in PRECISIONS:
        raise ConfigurationError(
            f"trainer.precision {trainer.precision} is not supported: "
            + (
                "its loss would be scaled, which the update does not undo."
                if "mixed" in str(trainer.precision)
                else "it would convert the rollouts themselves, rewards and log-probs included."
            )
            + f" Use {' or '.join(PRECISIONS)}."
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
    per_iteration = data.num_envs * data.buffer_size
    require(
        batch_size <= per_iteration,
        f"model.batch_size={batch_size} is larger than a rollout: data.num_envs * "
        f"data.buffer_size = {per_iteration} transitions. Lower batch_size, or raise num_envs or "
        "buffer_size.",
    )


def check_rollout(rollout: TensorDict) -> None:
    """Refuse what an env returned where it is not finite, before it spoils any statistics.

    Costs one sum per field and rollout [N, T+1], nothing per step. All ranks do so together, and
    all end where one has to.

    Raises:
        FloatingPointError: naming the field, and the first env and step.
    """
    fault = _first_fault(rollout)
    if ranks.agree(fault is not None):
        raise FloatingPointError(next(filter(None, ranks.gather_over_ranks(fault))))


def _first_fault(rollout: TensorDict) -> str | None:
    """Say what is not finite, or return None."""
    for name, field in _returned(rollout):
        if not field.sum().isfinite() and not (finite := field.isfinite()).all():
            row, step, *entry = (~finite).nonzero()[0].tolist()
            value = field[(row, step, *entry)].item()
            where = f", entry {entry}" if entry else ""
            return (
                f"The env returned a {name} that is not finite: {value} in env {row}, at step "
                f"{step} of the rollout{where}. Training cannot go on from it; mend the env, or "
                "bound what it returns by a wrapper. last.ckpt holds the last epoch's end."
            )
    return None


def _returned(rollout: TensorDict) -> Iterator[tuple[str, Tensor]]:
    """Yield what the env wrote into a rollout, as far as it may be no number."""
    fields = rollout.select("observation", "final_observation", "reward", strict=False)
    for name, field in fields.flatten_keys(".").items():
        if field.is_floating_point():
            yield name, field


def check_checkpoint(module: LightningModule, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Refuse what a module cannot take up; return what a checkpoint says beside the weights.

    Raises:
        ConfigurationError: where the checkpoint is not one of ours, is one of another policy, or is
            to be trained on from and holds weights only.
    """
    check_schema(checkpoint)
    saved: dict[str, Any] = checkpoint[STATE_KEY]
    trainer = module._trainer
    require(
        saved["kind"] != WEIGHTS or trainer is None or trainer.state.fn != "fit",
        "The checkpoint holds weights only: a run cannot go on from it exactly, for want of the "
        "optimizer's, the env's and the random streams' states. Resume from last.ckpt, or begin a "
        "new run with its policy: rl-cli fit --config ... --trainer.init_from PATH.",
    )
    check_weights(module.state_dict(), checkpoint["state_dict"])
    return saved


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
