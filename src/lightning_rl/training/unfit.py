"""Refuse settings and callbacks of Lightning that do not fit reinforcement learning."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_rl.algorithms.checks import PRECISIONS, check_precision
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.extensions import HOOKS, function_at
from lightning_rl.system.lightning_private import saves_by_time

REFUSED: dict[str, tuple[Any, str]] = {
    "accumulate_grad_batches": (
        1,
        "a batch of Lightning is a rollout, which the update splits into minibatches. For larger "
        "minibatches raise model.batch_size; if memory runs out, set the policy's "
        "micro_batch_size, which accumulates gradients",
    ),
    "gradient_clip_val": (
        None,
        "the update clips its gradients itself: set model.max_grad_norm, the bound on the norm of "
        "the whole gradient",
    ),
    "gradient_clip_algorithm": (
        None,
        "the update clips by the norm of the whole gradient: set model.max_grad_norm",
    ),
    "barebones": (
        False,
        "it disables checkpoints and logs: set trainer.logger and trainer.enable_checkpointing to "
        "false instead",
    ),
    "overfit_batches": (
        0,
        "each batch is a new rollout, so that there are no fixed ones to overfit. Remove it; for a "
        "short trial lower data.total_env_steps, or use rl-cli check",
    ),
    "limit_predict_batches": (None, "there is no prediction: use rl-cli validate or test"),
    "reload_dataloaders_every_n_epochs": (
        0,
        "a new loader would be a second collector with an empty replay. Remove it: each batch is a "
        "new rollout already",
    ),
    "min_epochs": (
        None,
        "a run ends at data.total_env_steps, or after a signal, however few epochs it has had. To "
        "train longer, raise data.total_env_steps",
    ),
    "min_steps": (
        None,
        "a run ends at data.total_env_steps, or after a signal, however few iterations it has had. "
        "To train longer, raise data.total_env_steps",
    ),
}
"""Settings of Lightning's trainer that do not fit: the only allowed value, and the reason."""


SPLITTING = ("fsdp_", "deepspeed", "xla", "model_parallel")
"""Name prefixes of strategies of Lightning that shard a policy over processes."""


def refuse_unfit(settings: dict[str, Any]) -> None:
    """Refuse settings of Lightning's trainer that do not fit; make the strategy `fsdp`.

    Raises:
        ConfigurationError: naming the setting, its value, the reason and the cure.
    """
    for name, (allowed, reason) in REFUSED.items():
        value = settings.get(name, allowed)
        require(
            value == allowed,
            f"trainer.{name} must be {_as_yaml(allowed)}, got {_as_yaml(value)}: {reason}.",
        )
    # Lightning replaces 16-mixed on a CPU, but checkpoints would keep it.
    check_precision(settings.get("precision") or PRECISIONS[0])
    _check_devices(settings.get("accelerator", "auto"), settings.get("devices", "auto"))
    strategy = settings.get("strategy")
    require(
        not (isinstance(strategy, str) and strategy.startswith(SPLITTING)),
        f"trainer.strategy {strategy} is not supported: every process needs the whole policy to "
        "act. Use --trainer.strategy ddp or fsdp, or one device.",
    )
    # FSDP2 instead of Lightning's strategy: it shards the policy alone.
    if strategy == "fsdp":
        settings["strategy"] = function_at(HOOKS["fsdp"])()


def usable_callbacks(callbacks: list[Callback] | Callback | None) -> list[Callback]:
    """Return the user's callbacks as a list.

    Raises:
        ConfigurationError: naming one that would train or save something else than it says.
    """
    listed: list[Callback] = as_list(callbacks)
    for callback in listed:
        reason = _unfit(callback)
        require(not reason, f"trainer.callbacks has {type(callback).__name__}{reason}")
    return listed


def _unfit(callback: Callback) -> str:
    """Return why a callback does not fit, and the cure; an empty text if it fits."""
    match callback:
        case LearningRateFinder() | BatchSizeFinder():
            return (
                ", which tries settings on batches of a fixed dataset, but each batch here is a "
                "new rollout. Remove it, and compare settings by rl-cli sweep."
            )
        case BaseFinetuning():
            return (
                ", which unfreezes parameters within a run, but a run trains the same parameters "
                "from its beginning to its end. Remove it, freeze parameters before the run, and "
                "train all of them in another one that begins with its weights (trainer.init_from)."
            )
        case StochasticWeightAveraging():
            return (
                ", whose averaged weights would be in no checkpoint, and whose swa_lrs model."
                "lr_schedule overwrites. Use lightning.pytorch.callbacks.EMAWeightAveraging."
            )
        case OnExceptionCheckpoint():
            return (
                ": with it Lightning begins a new run with the weights of an earlier one. Remove "
                "it: last.ckpt is written after each epoch; resume with ckpt_path."
            )
    if getattr(callback, "save_on_exception", False):
        return (
            " with save_on_exception, which saves in the middle of an update, from where no run "
            "can resume exactly. Set it to false: last.ckpt is written after each epoch, and "
            "iteration_*.ckpt at trainer.checkpoint_every_n_iterations."
        )
    if saves_by_time(callback):
        return (
            " with train_time_interval, at which Lightning saves nothing here. Set "
            "trainer.checkpoint_every_n_iterations."
        )
    if is_overridden("on_before_zero_grad", callback, Callback):
        return (
            " with on_before_zero_grad, which would never be called, because the update clears its "
            "gradients itself. Use on_before_backward."
        )
    return ""


def _check_devices(accelerator: Any, devices: Any) -> None:
    cuda, mps = torch.cuda.device_count() > 0, torch.backends.mps.is_available()
    kinds = {"auto": True, "cpu": True, "gpu": cuda or mps, "cuda": cuda, "mps": mps}
    usable = [name for name, is_here in kinds.items() if is_here]
    if isinstance(accelerator, str):
        require(
            accelerator.lower() in usable,
            f"trainer.accelerator must be one of {', '.join(usable)} on this machine, got "
            f"'{accelerator}'{': torch finds no such device' if accelerator in kinds else ''}. By "
            "default a GPU is used if there is one.",
        )
    on_cpu = accelerator == "cpu" or not kinds["gpu"]
    # Other values, such as "auto", start one process on a CPU.
    processes = int(devices) if str(devices).isdecimal() else 1
    limit = max(8, os.cpu_count() or 1)
    require(
        not on_cpu or processes <= limit,
        f"trainer.devices must be at most {limit} on this machine without GPU, got {devices}: on a "
        "CPU each device is a process.",
    )


def _as_yaml(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn an error of Lightning about settings of its trainer into one message.

    Raises:
        ConfigurationError: with Lightning's text.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except (MisconfigurationException, TypeError, ValueError, ImportError, RuntimeError) as error:
        cores = " For CPU cores for the envs, set --cpus-per-task and one task."
        raise ConfigurationError(
            f"Lightning's trainer cannot be made with these settings of trainer: {error}"
            f"{cores if '--ntasks' in str(error) else ''}"
        ) from error


def as_list(setting: Any) -> list[Any]:
    """Return a list of what a setting has: it may be a list, or None."""
    return setting if isinstance(setting, list) else [setting] if setting else []
