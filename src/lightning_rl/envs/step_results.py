"""Validate the results of `reset` and `step`, for every kind of env.

| what                  | a single env returns               | a batched env returns | otherwise |
| --------------------- | ---------------------------------- | --------------------- | --------- |
| observation           | shape, keys and dtype of its space | the same, [N, ...]    | refused   |
| a choice in it        | a category of its space            | the same              | refused   |
| reward                | one number                         | numbers [N]           | refused   |
| terminated, truncated | true, false, 0 or 1                | bool, integers [N]    | refused   |
| info                  | a dict                             | a dict                | refused   |
| success, is_success   | true, false, 0 or 1                | the same, [N]         | refused   |
| rewards, metrics      | a dict of numbers by name          | a dict of numbers [N] | left out  |
| intervened            | true, false, 0 or 1                | the same, [N]         | refused   |
| executed_action       | an action of the space             | [N, *A]               | refused   |
| penalty               | one finite number                  | finite numbers [N]    | refused   |

A different dtype is accepted if its numbers fit: floats of any precision, integers in range. One
number is a Python or NumPy number, or a tensor or array with one entry. None and NaN are missing
values of success, terms and metrics. Entries that are left out cause one warning.

The last three are read only if the env announces them (`reports_interventions`, `reports_penalty`).
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from lightning_rl.envs.refusals import (
    KINDS,
    kind_of,
    refuse_beyond,
    refuse_kind,
    shortened,
    wrong_shape,
    wrong_value,
)
from lightning_rl.rollout.contract import leaves_by_path
from lightning_rl.system.errors import EnvFaultError


def check_like(name: str, value: Any, like: Any, field: str) -> None:
    """Compare a result of an env with its space, or a result [N, ...] with its storage.

    The storage is an array, a tensor or a tree. Only with a space, integers are compared with the
    range of their dtype, and choices with their categories.

    Raises:
        EnvFaultError: names the field, both shapes, and the cure.
    """
    if hasattr(like, "keys"):  # a Dict space or a TensorDict
        if not hasattr(value, "keys"):
            raise EnvFaultError(wrong_value(name, field, value, f"a dict of {', '.join(like)}"))
        for key in like.keys():
            if key not in value.keys():
                raise EnvFaultError(f"{name} returned no {field}.{key}, which its space has.")
            check_like(name, value[key], like[key], f"{field}.{key}")
    elif isinstance(like, gymnasium.Space):
        if like.shape is not None:
            _check_array(name, value, like, field)
    # First the attribute: `np.shape` is slow, and only lists and numbers need it.
    elif getattr(value, "shape", None) != like.shape and tuple(np.shape(value)) != like.shape:
        raise EnvFaultError(wrong_shape(name, field, np.shape(value), like.shape))
    elif getattr(value, "dtype", None) is not like.dtype:
        refuse_kind(name, field, getattr(value, "dtype", None), like.dtype)


def check_vector(name: str, field: str, value: Any, num_envs: int, kinds: str = KINDS) -> Tensor:
    """Return a result of a batched torch env if it is a tensor [N] of these dtype kinds.

    Raises:
        EnvFaultError: names the field, its value and the expected one.
    """
    if (
        not isinstance(value, Tensor)
        or value.shape != (num_envs,)
        or kind_of(value.dtype) not in kinds
    ):
        expected = f"a tensor [{num_envs}] of {'numbers' if 'f' in kinds else 'torch.bool'}"
        raise EnvFaultError(wrong_value(name, field, value, expected))
    return value


def check_observation(env: gymnasium.Env, observation: Any) -> None:
    """Compare the observation of a single env with its space, including integer ranges.

    Raises:
        EnvFaultError: see `check_like`.
    """
    check_like(name_of(env), observation, env.observation_space, "observation")


def copy_of(space: gymnasium.Space[Any], observation: Any) -> Any:
    """Copy a checked observation to the dtypes of its space."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: copy_of(child, observation[key]) for key, child in space.items()}
    return np.array(observation, dtype=space.dtype)


NUMBERS = frozenset((float, int, np.float64, np.float32))
"""Reward types that pass without further checks."""

FLAGS = frozenset((bool, np.bool_))
"""Types of `terminated` and `truncated` that pass without further checks."""


def read_reset(env: gymnasium.Env, result: Any) -> tuple[Any, dict[str, Any]]:
    """Return observation and info of a single env's reset.

    Raises:
        EnvFaultError: the result is not an observation and an info.
    """
    if not (isinstance(result, tuple) and len(result) == 2):  # Gym before 0.26: the observation
        raise EnvFaultError(_other_things(env, "reset", result, "observation and info"))
    return result[0], _read_info(env, "reset", result[1])


def read_step(env: gymnasium.Env, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Return the step results of a single env: the outcome as plain numbers, the info as a dict.

    The observation is not checked.

    Raises:
        EnvFaultError: for another number of results, and for results that the table above refuses.
    """
    try:
        observation, reward, terminated, truncated, info = result
    except (TypeError, ValueError):
        expected = "observation, reward, terminated, truncated and info"
        raise EnvFaultError(_other_things(env, "step", result, expected)) from None
    if type(reward) in NUMBERS and type(terminated) in FLAGS and type(truncated) in FLAGS:
        if type(info) is dict:  # the fast path of nearly all steps
            return result  # type: ignore[no-any-return]  # of five things
    else:
        number = one_number(reward)
        if number is None:
            raise EnvFaultError(wrong_value(name_of(env), "reward", reward, "one number"))
        flags = []
        for field, value in (("terminated", terminated), ("truncated", truncated)):
            flag = one_flag(value)
            if flag is None:
                raise EnvFaultError(wrong_value(name_of(env), field, value, "true or false"))
            flags.append(flag)
        reward, (terminated, truncated) = number, flags
    return observation, reward, terminated, truncated, _read_info(env, "step", info)


def one_number(value: Any) -> float | None:
    """Convert a value to a number; return None if it is not one number."""
    if isinstance(value, Tensor | np.ndarray):
        if int(np.prod(value.shape)) != 1 or kind_of(value.dtype) not in KINDS:
            return None
        value = value.item()
    if isinstance(value, Real | np.bool_):  # np.bool_ is no Real
        try:
            return float(value)
        except OverflowError:  # an integer beyond float64
            return None
    return None


def one_flag(value: Any) -> bool | None:
    """Convert a value (true, false, 0 or 1) to bool, or return None."""
    number = one_number(value)
    return bool(number) if number in (0.0, 1.0) else None


def _read_info(env: gymnasium.Env, method: str, info: Any) -> dict[str, Any]:
    if type(info) is dict:
        return info
    if not isinstance(info, Mapping):
        raise EnvFaultError(wrong_value(name_of(env), f"{method} info", info, "a dict"))
    return dict(info)


def _other_things(env: gymnasium.Env, method: str, result: Any, expected: str) -> str:
    kind = f"{len(result)} things" if isinstance(result, tuple | list) else shortened(result)
    return (
        f"{name_of(env)} returned {kind} from {method}, not {expected}: it may be written for an "
        "old version of Gym. Correct the env, or wrap it in shimmy's GymV21CompatibilityV0."
    )


def _check_array(name: str, value: Any, space: gymnasium.Space[Any], field: str) -> None:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or a tensor elsewhere
        raise EnvFaultError(wrong_value(name, field, value, "an array")) from error
    if array.shape != space.shape:
        raise EnvFaultError(wrong_shape(name, field, array.shape, space.shape))
    if array.dtype is not space.dtype:  # NumPy's own dtypes are singletons
        refuse_kind(name, field, array.dtype, space.dtype, array)
    if not isinstance(space, gymnasium.spaces.Box):  # many envs exceed the bounds of their Box
        refuse_beyond(name, field, array, *bounds_of(space))


def bounds_of(space: gymnasium.Space[Any]) -> tuple[Any, Any]:
    """Return the lowest and the highest value (or category) of a space of one array."""
    if isinstance(space, gymnasium.spaces.Box):
        return space.low, space.high
    if isinstance(space, gymnasium.spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


class ObservedChoices:
    """Checks the categories of all choices in observations; false for a space without choices."""

    def __init__(self, name: str, space: gymnasium.Space[Any]) -> None:
        self._name = name
        self._ranges = [
            (path, *bounds_of(part))
            for path, part in leaves_by_path(space).items()
            if not isinstance(part, gymnasium.spaces.Box)
        ]

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def check(self, observation: Any) -> None:
        """Refuse observations [..., N, ...] with a category out of range.

        Raises:
            EnvFaultError: names the field, the value and the allowed range.
        """
        for path, low, high in self._ranges:
            values = observation
            for key in path:
                values = values[key]
            array = values.cpu().numpy() if isinstance(values, Tensor) else values
            refuse_beyond(self._name, ".".join(("observation", *path)), array, low, high)


def name_of(env: gymnasium.Env) -> str:
    """Return the name of a single env, for messages."""
    spec = env.unwrapped.spec
    return f"Env '{spec.id}'" if spec is not None else type(env.unwrapped).__name__
