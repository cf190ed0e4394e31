"""Refuse what an env returns in another shape or kind than announced, before it is broadcast."""

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.errors import ConfigurationError


def check_like(name: str, value: Any, storage: Any, field: str) -> None:
    """Compare a tensor or an array, or a tree of tensors, to the storage that it goes into.

    Args:
        name: of the env.
        value: what the env returned, [N, ...].
        storage: of the right shape.
        field: what it is called.

    Raises:
        ConfigurationError: naming the field, both shapes, and the cure.
    """
    if not isinstance(storage, Tensor | np.ndarray):
        for key in storage.keys():
            if key not in value.keys():
                raise ConfigurationError(f"{name} returned no {field}.{key}, which its space has.")
            check_like(name, value[key], storage[key], f"{field}.{key}")
        return
    if getattr(value, "shape", None) != storage.shape and tuple(np.shape(value)) != storage.shape:
        raise ConfigurationError(_message(name, field, np.shape(value), storage.shape))
    if getattr(value, "dtype", None) is not storage.dtype:
        _refuse_cut(name, field, getattr(value, "dtype", None), storage.dtype)


def refuse_missing_end(name: str, missing: Any) -> None:
    """Refuse that a time limit cut episodes whose final observation nobody gave.

    Args:
        name: of the env.
        missing: bool, [N] of a step or [T, N] of a rollout, true at such ends.

    Raises:
        ConfigurationError: naming the env and the key, and what to return.
    """
    if not missing.any():
        return
    *step, row = (int(index) for index in np.argwhere(np.asarray(missing))[0])
    at = f", at step {step[0]} of the rollout" if step else ""
    raise ConfigurationError(
        f"{name} truncated the episode of env {row}{at} without info['final_obs']. A return that "
        "time cut short goes on with the value of the observation at which it was cut, and the one "
        "that step returns is of the next episode. Return info['final_obs'] [N, ...] from step, "
        "the observation before the reset of every env that finished (other rows mean nothing); "
        "or report `terminated`, where the episode is over for another reason than time."
    )


def check_observation(env: gymnasium.Env, observation: Any) -> None:
    """Compare what a single env returned to its observation space.

    Raises:
        ConfigurationError: see `check_like`.
    """
    _check_space(_name(env), env.observation_space, observation, "observation")


def check_step(env: gymnasium.Env, result: tuple[Any, ...]) -> None:
    """Compare what a step of a single env returned to what it should be.

    Raises:
        ConfigurationError: see `check_like`.
    """
    if len(result) != 5:
        raise ConfigurationError(
            f"{_name(env)} returned {len(result)} things from step, not observation, reward, "
            "terminated, truncated and info: is it written for an old version of Gym?"
        )
    check_observation(env, result[0])
    for field, value in zip(("reward", "terminated", "truncated"), result[1:4], strict=True):
        if np.size(value) != 1:
            raise ConfigurationError(_message(_name(env), field, np.shape(value), ()))


def _check_space(name: str, space: gymnasium.Space[Any], value: Any, field: str) -> None:
    if isinstance(space, gymnasium.spaces.Dict):
        for key, child in space.items():
            if key not in value:
                raise ConfigurationError(f"{name} returned no {field}.{key}, which its space has.")
            _check_space(name, child, value[key], f"{field}.{key}")
    elif space.shape is not None:
        if tuple(np.shape(value)) != space.shape:
            raise ConfigurationError(_message(name, field, np.shape(value), space.shape))
        _refuse_cut(name, field, np.asarray(value).dtype, space.dtype)


def _refuse_cut(name: str, field: str, got: Any, announced: Any) -> None:
    """Refuse fractions for a field of integers; other numbers may be stored in another type."""
    if _kind(got) in ("f", "c") and _kind(announced) in ("i", "u"):
        raise ConfigurationError(
            f"{name} returned {_article(field)} of dtype {got} instead of {announced}, which would "
            "cut off the fractions: mend its step and reset, or the space that it announces."
        )


def _kind(dtype: Any) -> str | None:
    """Return NumPy's letter for the kind of a dtype; None for what has no dtype."""
    if isinstance(dtype, torch.dtype):
        if dtype.is_complex:
            return "c"
        return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"
    return getattr(dtype, "kind", None)


def _name(env: gymnasium.Env) -> str:
    spec = env.unwrapped.spec
    return f"Env '{spec.id}'" if spec is not None else type(env.unwrapped).__name__


def _message(name: str, field: str, got: Any, announced: Any) -> str:
    return (
        f"{name} returned {_article(field)} of shape {list(got)} instead of {list(announced)}: "
        "mend its step and reset, or the space that it announces."
    )


def _article(field: str) -> str:
    return f"{'an' if field[0] in 'aeiou' else 'a'} {field}"
