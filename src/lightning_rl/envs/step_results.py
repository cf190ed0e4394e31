"""Look at what a step returns: refuse wrong shapes and kinds, read what is said in infos.

A value of another shape or kind than announced would be broadcast or cut. What several envs that
speak NumPy say of success, reward terms and metrics is held together as `Said`: arrays [N] of
float64, NaN where an env said nothing. Gymnasium's own way, an array of the type of the first
number that came and a mask beside it, cuts 0.7 down to 0 where another env said the integer 1
before.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.errors import EnvFaultError

TREES = ("rewards", "metrics")
"""Those that are dicts of numbers by name."""

Said = dict[str, Any]
"""`success` [N], `rewards` {term: [N]}, `metrics` {name: [N]}; a key that no env said is absent.

Where envs name what they did instead of what they were told: `executed_action` {i: [*A]} of those
that did, and `intervened` [N]. Where they report penalties: `penalty` [N].
"""


def check_like(name: str, value: Any, storage: Any, field: str) -> None:
    """Compare a tensor or an array, or a tree of tensors, to the storage that it goes into.

    Args:
        name: of the env.
        value: what the env returned, [N, ...].
        storage: of the right shape.
        field: what it is called.

    Raises:
        EnvFaultError: naming the field, both shapes, and the cure.
    """
    if not isinstance(storage, Tensor | np.ndarray):
        for key in storage.keys():
            if key not in value.keys():
                raise EnvFaultError(f"{name} returned no {field}.{key}, which its space has.")
            check_like(name, value[key], storage[key], f"{field}.{key}")
        return
    if getattr(value, "shape", None) != storage.shape and tuple(np.shape(value)) != storage.shape:
        raise EnvFaultError(_message(name, field, np.shape(value), storage.shape))
    if getattr(value, "dtype", None) is not storage.dtype:
        _refuse_cut(name, field, getattr(value, "dtype", None), storage.dtype)


def refuse_missing_end(name: str, missing: Any) -> None:
    """Refuse that a time limit cut episodes whose final observation nobody gave.

    Args:
        name: of the env.
        missing: bool, [N] of a step or [T, N] of a rollout, true at such ends.

    Raises:
        EnvFaultError: naming the env and the key, and what to return.
    """
    if not missing.any():
        return
    *step, row = (int(index) for index in np.argwhere(np.asarray(missing))[0])
    at = f", at step {step[0]} of the rollout" if step else ""
    raise EnvFaultError(
        f"{name} truncated the episode of env {row}{at} without info['final_obs']. A return that "
        "time cut short goes on with the value of the observation at which it was cut, and the one "
        "that step returns is of the next episode. Return info['final_obs'] [N, ...] from step, "
        "the observation before the reset of every env that finished (other rows mean nothing); "
        "or report `terminated`, where the episode is over for another reason than time."
    )


def check_observation(env: gymnasium.Env, observation: Any) -> None:
    """Compare what a single env returned to its observation space.

    Raises:
        EnvFaultError: see `check_like`.
    """
    _check_space(_name(env), env.observation_space, observation, "observation")


def check_step(env: gymnasium.Env, result: tuple[Any, ...]) -> None:
    """Compare what a step of a single env returned to what it should be.

    Raises:
        EnvFaultError: see `check_like`.
    """
    if len(result) != 5:
        raise EnvFaultError(
            f"{_name(env)} returned {len(result)} things from step, not observation, reward, "
            "terminated, truncated and info: is it written for an old version of Gym?"
        )
    check_observation(env, result[0])
    for field, value in zip(("reward", "terminated", "truncated"), result[1:4], strict=True):
        if np.size(value) != 1:
            raise EnvFaultError(_message(_name(env), field, np.shape(value), ()))


def _check_space(name: str, space: gymnasium.Space[Any], value: Any, field: str) -> None:
    if isinstance(space, gymnasium.spaces.Dict):
        for key, child in space.items():
            if key not in value:
                raise EnvFaultError(f"{name} returned no {field}.{key}, which its space has.")
            _check_space(name, child, value[key], f"{field}.{key}")
    elif space.shape is not None:
        if tuple(np.shape(value)) != space.shape:
            raise EnvFaultError(_message(name, field, np.shape(value), space.shape))
        _refuse_cut(name, field, np.asarray(value).dtype, space.dtype)


def _refuse_cut(name: str, field: str, got: Any, announced: Any) -> None:
    """Refuse fractions for a field of integers; other numbers may be stored in another type."""
    if _kind(got) in ("f", "c") and _kind(announced) in ("i", "u"):
        raise EnvFaultError(
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


INTERVENED, EXECUTED_ACTION = "intervened", "executed_action"
"""Under which keys an info says whether somebody took over, and what was done."""


def say_intervention(info: dict[str, Any], told: Any, taken: bool) -> dict[str, Any]:
    """Add to what an env said of a step that a layer around it took over, or that it did not.

    Whatever is nearest to the env knows best what was executed, and nobody's "no" undoes another
    one's "yes".

    Args:
        info: of the env inside.
        told: the action [*A] that it was given.
        taken: whether the layer had put that in place of what it was told itself.
    """
    executed = info.get(EXECUTED_ACTION, told)
    inside = info.get(INTERVENED, not np.array_equal(executed, told))
    return {**info, EXECUTED_ACTION: executed, INTERVENED: bool(inside) or taken}


def renamed(info: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return an info with other names for some keys, of arrays with their masks `_x` too."""
    if not any(theirs in info for theirs in names):
        return info
    names = {**names, **{f"_{theirs}": f"_{ours}" for theirs, ours in names.items()}}
    return {names.get(key, key): value for key, value in info.items()}


def says_something(info: dict[str, Any]) -> bool:
    """Tell whether the info of an env has anything that is read.

    Asked of each env at each step: written out, as a loop takes three times as long.
    """
    return bool(info) and (
        "metrics" in info
        or "success" in info
        or "rewards" in info
        or "is_success" in info
        or EXECUTED_ACTION in info
        or INTERVENED in info
        or "penalty" in info
    )


def gather(said: Said, info: dict[str, Any], i: int, num_envs: int) -> None:
    """Put what env i of N said into `said`; what is not one number is left out."""
    success = info.get("success", info.get("is_success"))
    if success is not None:
        _column(said, "success", num_envs)[i] = bool(success)
    if EXECUTED_ACTION in info:
        said.setdefault(EXECUTED_ACTION, {})[i] = info[EXECUTED_ACTION]
    if INTERVENED in info:
        _column(said, INTERVENED, num_envs)[i] = bool(info[INTERVENED])
    if "penalty" in info:
        _column(said, "penalty", num_envs)[i] = info["penalty"]
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


def read_arrays(
    info: dict[str, Any], num_envs: int, done: np.ndarray, names: Mapping[str, str] | None = None
) -> Said:
    """Read the info of a batched env.

    Args:
        info: arrays [N], or dicts of them; an array `_x` [N] bool beside `x` says for which envs it
            counts, and without one it counts for all. `final_info` is the same for finished envs;
            where it is there, what stands outside of it is of their next episode.
        num_envs: N.
        done: [N] bool, which envs finished.
        names: by the env's own names of keys, ours.
    """
    everyone = np.ones(num_envs, bool)
    names = names or {}
    said = _of_arrays(renamed(info, names), everyone)
    final = info.get("final_info")
    if isinstance(final, dict):
        return _merged(said, _of_arrays(renamed(final, names), everyone), done)
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


def read_interventions(name: str, said: Said, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Return `executed_action` [N, *A] and `intervened` [N] bool; see `VectorEnv.step`.

    Args:
        name: of the env.
        said: by N envs.
        actions: [N, *A], what they were told.

    Raises:
        EnvFaultError: for an action of another shape than those.
    """
    executed = actions.copy()
    for i, action in said.get(EXECUTED_ACTION, {}).items():
        if np.shape(action) != actions.shape[1:]:
            got = np.shape(action)
            raise EnvFaultError(_message(name, EXECUTED_ACTION, got, actions.shape[1:]))
        executed[i] = action
    differs = (executed != actions).reshape(len(actions), -1).any(1)
    flags = said.get(INTERVENED)
    intervened = differs if flags is None else np.where(np.isnan(flags), differs, flags != 0)
    return {EXECUTED_ACTION: executed, INTERVENED: intervened.astype(bool)}


def read_penalty(said: Said, num_envs: int) -> np.ndarray:
    """Return `penalty` [N] float32, 0 where an env said nothing; see `VectorEnv.step`."""
    penalty = said.get("penalty")
    return (
        np.zeros(num_envs, np.float32) if penalty is None else np.nan_to_num(penalty).astype("f4")
    )


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
    if EXECUTED_ACTION in info:
        mask = _mask(info, EXECUTED_ACTION, given)
        said[EXECUTED_ACTION] = {i: info[EXECUTED_ACTION][i] for i in np.flatnonzero(mask)}
    if INTERVENED in info:
        said[INTERVENED] = _numbers(info[INTERVENED], _mask(info, INTERVENED, given))
    if "penalty" in info:
        said["penalty"] = _numbers(info["penalty"], _mask(info, "penalty", given))
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
        elif key == EXECUTED_ACTION:
            rows = [(i, a) for i, a in (one or {}).items() if not done[i]]
            merged[key] = dict(rows + [(i, a) for i, a in (other or {}).items() if done[i]])
        else:
            merged[key] = np.where(
                done, np.nan if other is None else other, np.nan if one is None else one
            )
    return merged
