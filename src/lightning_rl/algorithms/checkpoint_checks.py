"""Checks that a checkpoint fits the module, policy and optimizers that load it."""

import math
from collections.abc import Set
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.checkpoints.format import (
    CONFIG_KEY,
    DESCRIPTION_KEY,
    SPACES_KEY,
    STATE_KEY,
    WEIGHTS,
    check_schema,
    check_types,
    restoring,
)
from lightning_rl.checkpoints.saved import settings_of
from lightning_rl.policies import Policy
from lightning_rl.policies.description import describe, differences, with_statistics
from lightning_rl.rollout.names import names_within
from lightning_rl.rollout.spaces import space_from
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.lightning_private import trainer_of


def check_checkpoint(
    module: LightningModule, policy: Policy, checkpoint: dict[str, Any]
) -> dict[str, Any]:
    """Refuse a checkpoint that does not fit a module; return its state besides the weights.

    Add statistics to the checkpoint's weights if an earlier version wrote it without them.
    """
    check_schema(checkpoint)
    saved: dict[str, Any] = checkpoint[STATE_KEY]
    trainer = trainer_of(module)
    require(
        saved["kind"] != WEIGHTS or trainer is None or trainer.state.fn != "fit",
        "The checkpoint holds weights only: a run cannot resume from it, because the states of "
        "the optimizer, the envs and the random streams are missing. Resume from last.ckpt, or "
        "begin a new run with its policy: rl-cli fit --config ... --trainer.init_from PATH.",
    )
    if trainer is not None:
        # Lightning takes numbers of any type, and fails later.
        loops = {name: getattr(trainer, name).state_dict() for name in LOOPS}
        check_types(checkpoint.get("loops"), loops, "The checkpoint's loops")
    described = saved.get(DESCRIPTION_KEY, {})
    checkpoint["state_dict"] = with_statistics(module, checkpoint["state_dict"], described)
    check_weights(module.state_dict(), checkpoint["state_dict"], USE_ITS_CONFIG)
    check_description(policy, saved, USE_ITS_CONFIG)
    return saved


LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
"""Attributes of a trainer, and keys in a checkpoint."""

USE_ITS_CONFIG = "Use the config that it was trained with (`--ckpt_path` alone uses it)."


def warm_start_weights(
    policy: Policy, checkpoint: dict[str, Any]
) -> tuple[dict[str, Tensor], str | None]:
    """Return a state dict that makes a policy act like a checkpoint's, and a note on the critic."""
    weights = policy.state_dict()
    described = checkpoint[STATE_KEY].get(DESCRIPTION_KEY, {})
    saved = _without_prefix(checkpoint["state_dict"], "policy.")
    saved = with_statistics(policy, saved, described)
    critic, its_critic = (
        {key: value for key, value in state.items() if policy.belongs_to_critic(key)}
        for state in (weights, saved)
    )
    fresh, note = {"version": weights["version"]}, None
    if _shapes(critic) != _shapes(its_critic):
        fresh |= critic
        note = _of_the_critic(critic, its_critic)
        weights = {key: value for key, value in weights.items() if key not in critic}
        saved = {key: value for key, value in saved.items() if key not in its_critic}
    cure = (
        "The loaded weights must give the same actions. Use the settings that the checkpoint was "
        f"trained with{_policy_section(checkpoint)}. Only the critic's modules may be missing or "
        "new: if these modules belong to the critic, add them to critic_modules of the policy's "
        f"class, now {', '.join(policy.critic_modules)}."
    )
    check_weights(weights, saved, cure)
    check_description(policy, checkpoint[STATE_KEY], cure)
    return saved | fresh, note


def _of_the_critic(critic: dict[str, Tensor], saved: dict[str, Tensor]) -> str:
    if not critic:
        return f"The critic of the checkpoint is not used: {_some(sorted(saved))}."
    reason = "critic has another shape" if saved else "policy has no critic"
    names = _some(sorted(critic))
    return f"The critic starts with new weights, because the checkpoint's {reason}: {names}."


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in state.items()}


def _without_prefix(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _policy_section(checkpoint: dict[str, Any]) -> str:
    try:
        section: Any = settings_of(str(checkpoint.get(CONFIG_KEY, "")), Path())
    except ConfigurationError:  # the caller that needs the config refuses it
        return ""
    for key in ("model", "init_args", "policy"):
        section = section.get(key) if isinstance(section, dict) else None
    if section is None:
        return ""
    text = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=math.inf)
    return f", policy: {text.strip()}"


def check_weights(weights: dict[str, Any], saved: dict[str, Any], cure: str) -> None:
    """Refuse a checkpoint's state dict if names or shapes differ."""
    differing = [
        f"{key} {list(saved[key].shape)} instead of {list(value.shape)}"
        for key, value in weights.items()
        if isinstance(value, Tensor) and key in saved and saved[key].shape != value.shape
    ]
    missing = [key for key in weights if key not in saved]
    surplus = [key for key in saved if key not in weights]
    differing += [f"no {key}" for key in missing] + [f"{key} too many" for key in surplus]
    if any(key.endswith("distribution.center") for key in missing):
        cure = (
            "Its actions were not rescaled to the bounds of the action space: set rescale_action: "
            "false for the policy (--model.init_args.policy.init_args.rescale_action false)."
        )
    elif any(key.endswith("distribution.center") for key in surplus):
        cure = (
            "Its actions were rescaled to the bounds of the action space, but here they are not, "
            "because of rescale_action: false, or because the bounds are infinite, or -1 and 1. "
            + cure
        )
    require(
        not differing,
        f"The checkpoint belongs to another policy or algorithm; {len(differing)} entries differ: "
        f"{_some(differing)}. {cure}",
    )


LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""Entries of optimizer state that have the shape of their parameter."""


def check_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Refuse the state of another optimizer, or a manipulated state."""
    # `Optimizer.load_state_dict` compares only the number of parameters.
    with restoring("optimizer state"):
        saved = state["param_groups"]
        for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
            _check_same_optimizer(optimizer, group, saved_group)
            for name, value in group.items():
                if _is_number(value) and not _is_number(saved_group.get(name, value)):
                    raise ValueError(f"{name} is {saved_group[name]!r}, but must be a number")
        numbers = [number for group in saved for number in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        complete: Set[str] = set()  # names of the moments of the first parameter
        for number, parameter in zip(numbers, parameters, strict=True):
            entries = state["state"].get(number, {})
            moments = {name: entries.get(name) for name in LIKE_PARAMETERS}
            moments = {name: value for name, value in moments.items() if value is not None}
            complete = complete or moments.keys()
            if entries and moments.keys() != complete:
                raise ValueError(f"{', '.join(sorted(complete ^ moments.keys()))} is missing")
            for name, value in moments.items():
                if value.shape != parameter.shape:
                    raise ValueError(
                        f"{name} has the shape {list(value.shape)}, but its parameter "
                        f"{list(parameter.shape)}"
                    )
                if not value.isfinite().all():  # would make the next weights NaN
                    raise ValueError(f"{name} holds numbers that are not finite")
            step = entries.get("step", 0)
            if not _is_number(step) or not 0 <= step <= 1e18:  # nan is neither
                raise ValueError(f"step is {step!r}, but must be a number from 0 to 1e18")


def _check_same_optimizer(method: Optimizer, group: dict[str, Any], saved: dict[str, Any]) -> None:
    # Another version of torch may have new flags, but a number belongs to the method.
    numbers = {name for name, value in group.items() if _is_number(value)}
    added = {"lr_scale", "initial_lr"}  # by policies and by torch's schedulers
    differing = [f"no {name}" for name in sorted(numbers - saved.keys() - added)]
    differing += [f"{name} too many" for name in sorted(saved.keys() - group.keys() - added)]
    require(
        not differing,
        f"The checkpoint holds the state of another optimizer than {type(method).__name__}: "
        f"{_some(differing)}. Resume with the optimizer of the checkpoint, or start a new run from "
        "its weights (--trainer.init_from).",
    )


def with_own_settings(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the settings of this run (`weight_decay`), except the rate."""
    settings = {*signature(type(optimizer)).parameters, "lr_scale"} - {"params", "lr"}
    groups = [
        saved | {name: value for name, value in group.items() if name in settings}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return state | {"param_groups": groups}


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) > 0 and all(map(_is_number, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_description(policy: Policy, state: dict[str, Any], cure: str) -> None:
    """Refuse other joints or another activation; warn of other settings, such as a temperature."""
    for name, data in (state.get(SPACES_KEY) or {}).items():
        saved = names_within(space_from(data)) if data else {}
        for part, names in names_within(getattr(policy, name)).items():
            require(
                saved.get(part, names) == names,
                f"The numbers or cameras of the {name} of the checkpoint's policy are "
                f"{', '.join(saved.get(part, ()))}, but of this env {', '.join(names)}: the same "
                "weights would take one for another. Use an env with the checkpoint's order.",
            )
    if DESCRIPTION_KEY not in state:
        return
    classes, settings = differences(describe(policy), state[DESCRIPTION_KEY])
    require(
        not classes,
        "The checkpoint's policy computes a different function with the same weights: "
        f"{_some(classes)}. {cure}",
    )
    if settings:
        rank_zero_warn(
            "The policy may act differently with the weights of the checkpoint, because its "
            f"settings differ: {_some(settings)}. {cure}"
        )


def _some(entries: list[str]) -> str:
    return f"{', '.join(entries[:4])}{', ...' if len(entries) > 4 else ''}"
