"""Refuse results of envs: what they are, what they should be, and the cure."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.rollout.structured_actions import StructuredActions
from lightning_rl.system.errors import EnvFaultError, require

KINDS = "biuf"
"""NumPy kind letters of stored numbers: bool, integers, unsigned integers, floats."""


def kind_of(dtype: Any) -> str:
    """Return the NumPy kind letter of a dtype; "?" for other objects."""
    if isinstance(dtype, torch.dtype):
        if dtype.is_complex:
            return "c"
        return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"
    return str(getattr(dtype, "kind", "?"))


def refuse_missing_end(name: str, missing: Any, cure: str = "") -> None:
    """Refuse truncated episodes without a final observation, where `missing` is true.

    `missing` is bool, [N] of a step or [T, N] of a rollout; `cure` is a further cure.

    Raises:
        EnvFaultError: names the env, the key and the cure.
    """
    if not missing.any():
        return
    *step, row = (int(index) for index in np.argwhere(np.asarray(missing))[0])
    at = f", at step {step[0]} of the rollout" if step else ""
    raise EnvFaultError(
        f"{name} truncated the episode of env {row}{at} without info['final_obs']. The return of a "
        "truncated episode needs the value of its final observation, but step returns the first "
        "observation of the next episode. Return info['final_obs'] [N, ...] from step: the "
        "observation before the reset for every finished env, anything for other envs. If no time "
        f"limit ended the episode, report `terminated`.{cure}"
    )


def wrong_value(name: str, field: str, value: Any, expected: str) -> str:
    """Return the message about a result of a wrong kind."""
    return (
        f"{name} returned {_article(field)} that is {shortened(value)} instead of {expected}: "
        "correct its step and reset."
    )


def shortened(value: Any) -> str:
    """Return a value and its type in at most 60 letters, for messages."""
    if isinstance(value, Tensor | np.ndarray) and value.shape != ():
        return f"an array of shape {list(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def refuse_kind(
    name: str, field: str, dtype: Any, announced: Any, values: np.ndarray | None = None
) -> None:
    """Refuse a dtype whose values do not fit: non-numbers, fractions, large integers.

    With `values` [...], integers are checked individually.

    Raises:
        EnvFaultError: names the field and both dtypes.
    """
    kind, place = kind_of(dtype), kind_of(announced)
    reason = None
    if kind not in KINDS:
        reason = "which holds no real numbers"
    elif kind == "f" and place != "f":
        reason = "which would cut off the fractions"
    # Flags may be integers of any dtype, and bool fits everywhere.
    elif place in "biu" and kind != "b" and field not in ("terminated", "truncated"):
        if values is None:  # on a device: judge by the dtypes, without a wait
            fits = np.can_cast(_numpy(dtype), _numpy(announced))
        else:
            low, high = (0, 1) if place == "b" else _limits(announced)
            fits = bool(((values >= low) & (values <= high)).all())
        reason = None if fits else "which cannot hold these numbers"
    if reason is not None:
        raise EnvFaultError(
            f"{name} returned {_article(field)} of dtype {dtype} instead of {announced}, {reason}: "
            "correct its step and reset, or its space."
        )


def _limits(dtype: Any) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _numpy(dtype: Any) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else dtype


def refuse_beyond(name: str, field: str, array: np.ndarray, low: Any, high: Any) -> None:
    """Refuse numbers [...] below `low` or above `high`, the categories of a space.

    Raises:
        EnvFaultError: names the field, the value and the allowed range.
    """
    beyond = (array < low) | (array > high)
    if not beyond.any():
        return
    at = tuple(np.argwhere(beyond)[0])
    low, high = (np.broadcast_to(bound, array.shape)[at] for bound in (low, high))
    raise EnvFaultError(
        f"{name} returned {_article(field)} of the category {array[at]}, but its space has {low} "
        f"to {high} there: correct its step and reset, or its space."
    )


def wrong_shape(name: str, field: str, shape: Any, announced: Any) -> str:
    """Return the message about a result of another shape."""
    return (
        f"{name} returned {_article(field)} of shape {list(shape)} instead of {list(announced)}: "
        "correct its step and reset, or its space."
    )


def _article(field: str) -> str:
    return f"{'an' if field[0] in 'aeiou' else 'a'} {field}"


def refuse_unclipped_parts(name: str, space: Any, clips: bool) -> None:
    """Refuse `clip_action` false for actions of several parts, which `FlatAction` always clips.

    Raises:
        ConfigurationError: names the setting and the space.
    """
    parts = space.parts if isinstance(space, StructuredActions) else ()
    require(
        clips or all(part.counts for part in parts),
        f"{name} has actions of several parts, {space}, whose numbers are always clipped to their "
        "bounds, but clip_action is false: remove clip_action, or widen the bounds in a wrapper "
        "(gymnasium.wrappers.TransformAction).",
    )
