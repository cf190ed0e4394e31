"""Read what envs that speak NumPy say of a step: success, reward terms and metrics.

What several envs say is held together as `Said`: arrays [N] of float64, NaN where an env said
nothing. Gymnasium's own way, an array of the type of the first number that came and a mask beside
it, cuts 0.7 down to 0 where another env said the integer 1 before.
"""

from typing import Any

import numpy as np
import torch

SAID = ("success", "is_success", "rewards", "metrics")
"""The keys of `info` that are read; robotics envs call success `is_success`."""

TREES = ("rewards", "metrics")
"""Those that are dicts of numbers by name."""

Said = dict[str, Any]
"""`success` [N], `rewards` {term: [N]}, `metrics` {name: [N]}; a key that no env said is absent."""


def says_something(info: dict[str, Any]) -> bool:
    """Tell whether the info of an env has anything that is read.

    Asked of each env at each step: written out, as a loop takes three times as long.
    """
    return bool(info) and (
        "metrics" in info or "success" in info or "rewards" in info or "is_success" in info
    )


def gather(said: Said, info: dict[str, Any], i: int, num_envs: int) -> None:
    """Put what env i of N said into `said`; what is not one number is left out."""
    success = info.get("success", info.get("is_success"))
    if success is not None:
        _column(said, "success", num_envs)[i] = bool(success)
    for kind in TREES:
        numbers = info.get(kind)
        if isinstance(numbers, dict):
            tree = said.setdefault(kind, {})
            for name, value in numbers.items():
                if is_number(value):
                    _column(tree, name, num_envs)[i] = value


def is_number(value: Any) -> bool:
    """Tell whether something is one number, or one truth value."""
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf"


def read_arrays(info: dict[str, Any], num_envs: int, done: np.ndarray) -> Said:
    """Read the info of a batched env.

    Args:
        info: arrays [N], or dicts of them; an array `_x` [N] bool beside `x` says for which envs it
            counts, and without one it counts for all. `final_info` is the same for finished envs;
            where it is there, what stands outside of it is of their next episode.
        num_envs: N.
        done: [N] bool, which envs finished.
    """
    said = _of_arrays(info, np.ones(num_envs, bool))
    final = info.get("final_info")
    if isinstance(final, dict):
        return _merged(said, _of_arrays(final, np.ones(num_envs, bool)), done)
    return said


def to_tensors(said: Said) -> dict[str, Any]:
    """Return what was said as `VectorEnv.step` gives it: tensors [N]."""
    tensors: dict[str, Any] = {}
    success = said.get("success")
    if success is not None and not np.isnan(success).all():
        tensors["success"] = torch.from_numpy(np.nan_to_num(success) != 0)
    for kind in TREES:
        if said.get(kind):
            tensors[kind] = {name: torch.from_numpy(array) for name, array in said[kind].items()}
    return tensors


def _column(columns: dict[str, Any], name: str, num_envs: int) -> np.ndarray:
    """Return the array [N] of a name, at first NaN for every env."""
    if name not in columns:
        columns[name] = np.full(num_envs, np.nan)
    array: np.ndarray = columns[name]
    return array


def _of_arrays(info: dict[str, Any], given: np.ndarray) -> Said:
    """Read the arrays of a batched env; `given` [N] bool says for which envs they count."""
    said: Said = {}
    for name in ("is_success", "success"):
        if name in info:
            said["success"] = _numbers(info[name], _mask(info, name, given))
    for kind in TREES:
        tree = info.get(kind)
        if isinstance(tree, dict):
            mask = _mask(info, kind, given)
            said[kind] = {
                name: _numbers(values, _mask(tree, name, mask))
                for name, values in tree.items()
                if not (name.startswith("_") and name[1:] in tree)
            }
            said[kind] = {name: array for name, array in said[kind].items() if array is not None}
    return {key: value for key, value in said.items() if value is not None}


def _mask(values: dict[str, Any], name: str, given: np.ndarray) -> np.ndarray:
    """Return for which envs an entry counts, [N] bool."""
    mask: np.ndarray = given & np.asarray(values.get(f"_{name}", True), dtype=bool)
    return mask


def _numbers(values: Any, given: np.ndarray) -> np.ndarray | None:
    """Return one number per env, [N], NaN where it is not given; None for anything else."""
    array = np.asarray(values)
    if array.shape != given.shape:
        return None
    if array.dtype.kind == "O":  # Gymnasium puts what is not a plain number into such an array
        try:
            array = np.array([np.nan if value is None else float(value) for value in array])
        except (TypeError, ValueError):
            return None
    return np.where(given, array, np.nan) if array.dtype.kind in "biuf" else None


def _merged(said: Said, final: Said, done: np.ndarray) -> Said:
    """Take the rows of finished envs from what was said of their end."""
    merged: Said = {}
    for key in said.keys() | final.keys():
        one, other = said.get(key), final.get(key)
        if key in TREES:
            merged[key] = _merged(one or {}, other or {}, done)
        else:
            merged[key] = np.where(
                done, np.nan if other is None else other, np.nan if one is None else one
            )
    return merged
