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

The last three are read only from envs that announce them (`reports_interventions`,
`reports_penalty`). Other keys of an info are ignored.

`EnvReport` collects success, reward terms and metrics of several NumPy envs as float64 arrays [N],
NaN for missing values. Gymnasium's arrays have the type of the first number instead: after an
integer 1, the 0.7 of another env becomes 0.
"""

import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.system.errors import ConfigurationError, EnvFaultError

TREES = ("rewards", "metrics")
"""Info entries that are dicts of numbers by name."""

EnvReport = dict[str, Any]
"""`success` [N], `rewards` {term: [N]}, `metrics` {name: [N]}; missing keys: no env reported them.

With interventions: `executed_action` {i: [*A]} of envs with a different action, and `intervened`
[N]. With penalties: `penalty` [N]."""


def check_space(owner: str, kind: str, space: gymnasium.Space[Any], field: str = "") -> None:
    """Refuse a space of one env that rollouts cannot store; `kind` is `observation` or `action`.

    Raises:
        ConfigurationError: names the part and the cure.
    """
    part = f"{kind}{field}"
    wrapper = f"gymnasium.wrappers.Transform{kind.title()}"
    if isinstance(space, gymnasium.spaces.Dict):
        for key, child in space.items():
            if not (isinstance(key, str) and key):
                raise ConfigurationError(
                    f"{owner} has the key {key!r} in its {part} space, and keys must be texts: "
                    f"rename it in the env ('{key}'), or by a wrapper ({wrapper})."
                )
            check_space(owner, kind, child, f"{field}.{key}")
        if not len(space.spaces):
            raise ConfigurationError(f"{owner} has a {part} space without keys.")
        return
    if space.shape is not None and 0 in space.shape:
        nothing = "there is nothing to do" if kind == "action" else "it shows nothing"
        raise ConfigurationError(
            f"{owner} has the {part} space {space}, which holds no numbers: {nothing}. Leave it "
            f"out, or announce what there is ({wrapper})."
        )
    dtype = space.dtype
    if dtype is not None and (dtype.kind not in KINDS or dtype.name in ("uint64", "longdouble")):
        raise ConfigurationError(
            f"{owner} has the {part} space {space} of {dtype}, with which torch does not "
            f"calculate: use int64, or float32 ({wrapper}, or the env itself)."
        )


def check_like(name: str, value: Any, storage: Any, field: str) -> None:
    """Compare a result [N, ...] of an env with its storage: an array, a tensor or a tree.

    Raises:
        EnvFaultError: names the field, both shapes, and the cure.
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
        _refuse_kind(name, field, getattr(value, "dtype", None), storage.dtype)


def check_outcome(name: str, field: str, value: Any, flags: Tensor) -> None:
    """Check `reward` or `terminated` of a batched torch env by its flags [N] bool.

    Raises:
        EnvFaultError: for another shape; for rewards that are not numbers; for flags that are not
            bool.
    """
    if getattr(value, "shape", None) != flags.shape:
        raise EnvFaultError(_message(name, field, np.shape(value), flags.shape))
    if _kind(value.dtype) not in (KINDS if field == "reward" else "b"):
        wanted = "numbers" if field == "reward" else "torch.bool"
        raise EnvFaultError(_not_one(name, field, value, wanted))


def refuse_missing_end(name: str, missing: Any) -> None:
    """Refuse truncated episodes without a final observation.

    `missing` is bool, [N] of a step or [T, N] of a rollout, and true for such ends.

    Raises:
        EnvFaultError: names the env, the key and the cure.
    """
    if not missing.any():
        return
    *step, row = (int(index) for index in np.argwhere(np.asarray(missing))[0])
    at = f", at step {step[0]} of the rollout" if step else ""
    raise EnvFaultError(
        f"{name} truncated the episode of env {row}{at} without info['final_obs']. The return of "
        "a truncated episode needs the value of its final observation, but step returns the first "
        "observation of the next episode. Return info['final_obs'] [N, ...] from step, the "
        "observation before the reset of every env that finished (other rows mean nothing); or "
        "report `terminated` if the episode did not end by time."
    )


def check_observation(env: gymnasium.Env, observation: Any) -> None:
    """Compare the observation of a single env with its space, including integer ranges.

    Raises:
        EnvFaultError: see `check_like`.
    """
    _check_space(name_of(env), env.observation_space, observation, "observation")


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
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvFaultError(_other_things(env, "reset", result, "observation and info"))
    return result[0], _read_info(env, "reset", result[1])


def read_step(env: gymnasium.Env, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Return the step results of a single env: the outcome as plain numbers, the info as a dict.

    Does not check the observation.

    Raises:
        EnvFaultError: for another number of results, and for results that the table above refuses.
    """
    try:
        observation, reward, terminated, truncated, info = result
    except (TypeError, ValueError):
        wanted = "observation, reward, terminated, truncated and info"
        raise EnvFaultError(_other_things(env, "step", result, wanted)) from None
    if type(reward) in NUMBERS and type(terminated) in FLAGS and type(truncated) in FLAGS:
        if type(info) is dict:
            return result  # type: ignore[no-any-return]  # of five things
    else:
        number = one_number(reward)
        if number is None:
            raise EnvFaultError(_not_one(name_of(env), "reward", reward, "one number"))
        flags = []
        for field, value in (("terminated", terminated), ("truncated", truncated)):
            flag = one_flag(value)
            if flag is None:
                raise EnvFaultError(_not_one(name_of(env), field, value, "true or false"))
            flags.append(flag)
        reward, (terminated, truncated) = number, flags
    return observation, reward, terminated, truncated, _read_info(env, "step", info)


def one_number(value: Any) -> float | None:
    """Convert a value to a number, or return None if it is not one number."""
    if isinstance(value, Tensor | np.ndarray):
        if int(np.prod(value.shape)) != 1 or _kind(value.dtype) not in KINDS:
            return None
        value = value.item()
    if isinstance(value, Real | np.bool_):
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
        raise EnvFaultError(_not_one(name_of(env), f"{method} info", info, "a dict"))
    return dict(info)


def _other_things(env: gymnasium.Env, method: str, result: Any, wanted: str) -> str:
    kind = f"{len(result)} things" if isinstance(result, tuple | list) else _in_short(result)
    return (
        f"{name_of(env)} returned {kind} from {method}, not {wanted}: is it written for an old "
        "version of Gym? Correct it, or wrap it (shimmy's GymV21CompatibilityV0 does that)."
    )


def _not_one(name: str, field: str, value: Any, wanted: str) -> str:
    return (
        f"{name} returned {_article(field)} that is {_in_short(value)} instead of {wanted}: "
        "correct its step and reset."
    )


def _in_short(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray) and value.shape != ():
        return f"an array of shape {list(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


KINDS = "biuf"
"""NumPy kind letters of stored numbers: bool, integers, unsigned integers, floats."""


def _check_space(name: str, space: gymnasium.Space[Any], value: Any, field: str) -> None:
    if isinstance(space, gymnasium.spaces.Dict):
        if not isinstance(value, Mapping):
            raise EnvFaultError(_not_one(name, field, value, f"a dict of {', '.join(space)}"))
        for key, child in space.items():
            if key not in value:
                raise EnvFaultError(f"{name} returned no {field}.{key}, which its space has.")
            _check_space(name, child, value[key], f"{field}.{key}")
    elif space.shape is not None:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # ragged, or a tensor elsewhere
            raise EnvFaultError(_not_one(name, field, value, "an array")) from error
        if array.shape != space.shape:
            raise EnvFaultError(_message(name, field, array.shape, space.shape))
        if array.dtype is not space.dtype:
            _refuse_kind(name, field, array.dtype, space.dtype, array)
        if isinstance(space, gymnasium.spaces.Box):
            return
        least, greatest = bounds_of(space)
        if ((array < least) | (array > greatest)).any():
            raise EnvFaultError(_out_of_range(name, field, array, least, greatest))


def _refuse_kind(
    name: str, field: str, got: Any, announced: Any, values: np.ndarray | None = None
) -> None:
    """Refuse a dtype whose values do not fit: non-numbers, fractions, large integers.

    With `values`, integers are checked individually.
    """
    kind, place = _kind(got), _kind(announced)
    why = None
    if kind not in KINDS:
        why = "which holds no real numbers"
    elif kind == "f" and place != "f":
        why = "which would cut off the fractions"
    elif place in "biu" and kind != "b" and field not in ("terminated", "truncated"):
        if values is None:
            fits = np.can_cast(_numpy(got), _numpy(announced))
        else:
            low, high = (0, 1) if place == "b" else _limits(announced)
            fits = bool(((values >= low) & (values <= high)).all())
        why = None if fits else "which does not hold these numbers"
    if why is not None:
        raise EnvFaultError(
            f"{name} returned {_article(field)} of dtype {got} instead of {announced}, {why}: "
            "correct its step and reset, or its space."
        )


def _limits(dtype: Any) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _numpy(dtype: Any) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else dtype


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
    """Checks the categories of all choices in observations. It is false if the space has none.

    A category out of range would be read as a category of the next choice, or as none.
    """

    def __init__(self, name: str, space: gymnasium.Space[Any]) -> None:
        self._name = name
        self._ranges = list(_ranges(space, ()))

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def check(self, observation: Any) -> None:
        """Refuse observations [..., N, ...] with a category out of range.

        Raises:
            EnvFaultError: names the field, the value and the allowed range.
        """
        for path, least, greatest in self._ranges:
            values = observation
            for key in path:
                values = values[key]
            array = values.cpu().numpy() if isinstance(values, Tensor) else values
            if ((array < least) | (array > greatest)).any():
                field = ".".join(("observation", *path))
                raise EnvFaultError(_out_of_range(self._name, field, array, least, greatest))


def _ranges(space: gymnasium.Space[Any], path: tuple[str, ...]) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        for key, child in space.items():
            yield from _ranges(child, (*path, key))
    elif not isinstance(space, gymnasium.spaces.Box):
        yield path, *bounds_of(space)


def _out_of_range(name: str, field: str, array: np.ndarray, least: Any, greatest: Any) -> str:
    beyond = np.argwhere((array < least) | (array > greatest))[0]
    least, greatest = (
        np.broadcast_to(one, array.shape)[tuple(beyond)] for one in (least, greatest)
    )
    return (
        f"{name} returned {_article(field)} of the category {array[tuple(beyond)]}, and its space "
        f"has {least} to {greatest} there: correct its step and reset, or its space."
    )


def _kind(dtype: Any) -> str:
    """Return the NumPy kind letter of a dtype; "?" for other objects."""
    if isinstance(dtype, torch.dtype):
        if dtype.is_complex:
            return "c"
        return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"
    return str(getattr(dtype, "kind", "?"))


def name_of(env: gymnasium.Env) -> str:
    """Return the name of a single env, for messages."""
    spec = env.unwrapped.spec
    return f"Env '{spec.id}'" if spec is not None else type(env.unwrapped).__name__


def _message(name: str, field: str, got: Any, announced: Any) -> str:
    return (
        f"{name} returned {_article(field)} of shape {list(got)} instead of {list(announced)}: "
        "correct its step and reset, or its space."
    )


def _article(field: str) -> str:
    return f"{'an' if field[0] in 'aeiou' else 'a'} {field}"


INTERVENED, EXECUTED_ACTION = "intervened", "executed_action"
"""Info keys: whether a person or a script took over, and the executed action."""


def report_intervention(info: dict[str, Any], policy_action: Any, taken: bool) -> dict[str, Any]:
    """Report in an info whether a layer around the env replaced the action (`taken`).

    The inner env's action is `policy_action` [*A]. The innermost report of the executed action
    counts; `intervened` of any layer stays true.
    """
    executed = info.get(EXECUTED_ACTION, policy_action)
    inside = info.get(INTERVENED, not np.array_equal(executed, policy_action))
    return {**info, EXECUTED_ACTION: executed, INTERVENED: bool(inside) or taken}


def renamed(info: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename some keys of an info, and their masks `_x`."""
    if not any(theirs in info for theirs in names):
        return info
    names = {**names, **{f"_{theirs}": f"_{ours}" for theirs, ours in names.items()}}
    return {names.get(key, key): value for key, value in info.items()}


READ = ("success", "is_success", *TREES, EXECUTED_ACTION, INTERVENED, "penalty")
"""Info keys that are read; the last three only if announced."""


class InfoReader:
    """Reads the infos of N envs, by the table at the top.

    Args:
        name: name of the envs.
        num_envs: N.
        interventions, penalty: whether the envs announce these reports.
    """

    def __init__(
        self, name: str, num_envs: int, *, interventions: bool = False, penalty: bool = False
    ) -> None:
        self._name, self._num_envs = name, num_envs
        self._interventions, self._penalty = interventions, penalty
        self._announced = interventions or penalty
        self._warned: set[str] = set()

    @classmethod
    def of(cls, name: str, num_envs: int, metadata: Mapping[str, Any]) -> "InfoReader":
        """Return a reader for N envs with this metadata."""
        interventions, penalty = (
            bool(metadata.get(key, False)) for key in ("reports_interventions", "reports_penalty")
        )
        return cls(name, num_envs, interventions=interventions, penalty=penalty)

    def has_reports(self, info: dict[str, Any]) -> bool:
        # Runs for each env at each step. A loop over the keys takes three times as long.
        """Return whether the info of an env has any entry to read."""
        return bool(info) and (
            "metrics" in info
            or "success" in info
            or "rewards" in info
            or "is_success" in info
            or (
                self._announced
                and (EXECUTED_ACTION in info or INTERVENED in info or "penalty" in info)
            )
        )

    def gather(self, report: EnvReport, info: dict[str, Any], i: int) -> None:
        """Add the report of env i to `report`.

        Raises:
            EnvFaultError: for entries that the table refuses.
        """
        for key in ("is_success", "success"):  # `success` overrides `is_success`
            if info.get(key) is not None:
                self._put_flag(report, "success", info[key], i, key)
        if self._interventions:
            if EXECUTED_ACTION in info:
                report.setdefault(EXECUTED_ACTION, {})[i] = np.array(info[EXECUTED_ACTION])
            if INTERVENED in info:
                self._put_flag(report, INTERVENED, info[INTERVENED], i, INTERVENED)
        if self._penalty and "penalty" in info:
            number = one_number(info["penalty"])
            if number is None or not np.isfinite(number):
                raise EnvFaultError(self._refusal("penalty", info["penalty"], "one finite number"))
            self._column(report, "penalty")[i] = number
        for kind in TREES:
            if kind in info:
                self._put_numbers(report, kind, info[kind], i)

    def read_arrays(
        self, info: dict[str, Any], done: np.ndarray, names: Mapping[str, str] | None = None
    ) -> EnvReport:
        """Read the info of a batched env.

        Args:
            info: arrays [N], or dicts of arrays. A mask `_x` [N] bool selects the envs that
                reported `x` (default: all). `final_info` has the same structure and describes
                finished envs; the other entries then describe their next episode.
            done: [N] bool, which envs finished.
            names: maps the env's own keys to ours.

        Raises:
            EnvFaultError: for entries that the table refuses.
        """
        names = names or {}
        report = self._of_arrays(renamed(info, names))
        final = info.get("final_info")
        if isinstance(final, dict):
            return _merged(report, self._of_arrays(renamed(final, names)), done)
        return report

    def _put_flag(self, report: EnvReport, name: str, value: Any, i: int, key: str) -> None:
        number = one_number(value)
        if number is None or number not in (0.0, 1.0):
            if number is not None and np.isnan(number):
                return
            raise EnvFaultError(self._refusal(key, value, "true or false"))
        self._column(report, name)[i] = number

    def _put_numbers(self, report: EnvReport, kind: str, numbers: Any, i: int) -> None:
        """Add `rewards` or `metrics` of env i. Wrong entries only cause a warning."""
        if not isinstance(numbers, Mapping):
            self._warn(kind, numbers, "a dict of numbers by name")
            return
        tree = report.setdefault(kind, {})
        for name, value in numbers.items():
            number = one_number(value)
            if number is None:
                self._warn(f"{kind}.{name}", value, "one number")
            else:
                self._column(tree, str(name))[i] = number

    def _column(self, columns: dict[str, Any], name: str) -> np.ndarray:
        if name not in columns:
            columns[name] = np.full(self._num_envs, np.nan)
        array: np.ndarray = columns[name]
        return array

    def _of_arrays(self, info: dict[str, Any]) -> EnvReport:
        report: EnvReport = {}
        keys = ["is_success", "success", *[INTERVENED] * self._interventions]
        for key in [*keys, *["penalty"] * self._penalty]:
            if key in info:
                name = "success" if key == "is_success" else key
                report[name] = self._numbers(key, info[key], self._mask(info, key))
        if self._interventions and EXECUTED_ACTION in info:
            rows = np.flatnonzero(self._mask(info, EXECUTED_ACTION))
            report[EXECUTED_ACTION] = {i: np.array(info[EXECUTED_ACTION][i]) for i in rows}
        for kind in TREES:
            if not isinstance(tree := info.get(kind, {}), Mapping):
                self._warn(kind, tree, "a dict of arrays by name")
                continue
            mask, columns = self._mask(info, kind), report.setdefault(kind, {})
            for name, values in tree.items():
                if not (str(name).startswith("_") and str(name)[1:] in tree):
                    counts = mask & self._mask(tree, name)
                    if (column := _column_of(values, counts)) is None:
                        self._warn(f"{kind}.{name}", values, f"{self._num_envs} numbers")
                    else:
                        columns[str(name)] = column
        return report

    def _mask(self, values: Mapping[str, Any], name: str) -> np.ndarray:
        mask = np.asarray(values.get(f"_{name}", True), dtype=bool)
        return np.broadcast_to(mask, (self._num_envs,))

    def _numbers(self, key: str, values: Any, given: np.ndarray) -> np.ndarray:
        """Return flags or penalties [N], NaN for envs without one."""
        column = _column_of(values, given)
        if column is None:
            raise EnvFaultError(self._refusal(key, values, f"{self._num_envs} numbers"))
        report = column[given & ~np.isnan(column)]
        if key == "penalty":
            report, good, wanted = column[given], np.isfinite(column[given]), "finite numbers"
        else:
            good, wanted = (report == 0) | (report == 1), "true or false"
        if not good.all():
            raise EnvFaultError(self._refusal(key, report[~good][0], wanted))
        return column

    def _warn(self, key: str, value: Any, wanted: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"{self._refusal(key, value, wanted)} It is left out.", stacklevel=2)

    def _refusal(self, key: str, value: Any, wanted: str) -> str:
        return (
            f"{self._name} says info['{key}'] = {_in_short(value)}, which is read as {wanted}. "
            "Correct the env, or rename the key in a wrapper."
        )


def _column_of(values: Any, given: np.ndarray) -> np.ndarray | None:
    """Return numbers [N] float64, NaN for envs without one; None for other values."""
    array = np.asarray(values)
    if array.shape != given.shape:
        return None
    if array.dtype.kind == "O":  # Gymnasium stores anything but plain numbers in object arrays
        given = given & np.array([value is not None for value in array])
        numbers = [
            one_number(value) if here else 0.0 for value, here in zip(array, given, strict=True)
        ]
        if None in numbers:
            return None
        array = np.array(numbers)
    return np.where(given, array, np.nan) if array.dtype.kind in KINDS else None


def to_tensors(report: EnvReport) -> dict[str, Any]:
    """Convert reports to the tensors [N] of a `VectorEnv.step` info."""
    tensors: dict[str, Any] = {}
    success = report.get("success")
    if success is not None and not np.isnan(success).all():
        tensors["success"] = torch.from_numpy(np.nan_to_num(success) != 0)
    for kind in TREES:
        if report.get(kind):
            tensors[kind] = {name: torch.from_numpy(array) for name, array in report[kind].items()}
    return tensors


def read_interventions(name: str, report: EnvReport, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Return `executed_action` [N, *A] and `intervened` [N] bool; see `VectorEnv.step`.

    `actions` [N, *A] are the given actions, `report` the reports of N envs.

    Raises:
        EnvFaultError: an executed action has another shape.
    """
    executed = actions.copy()
    for i, action in report.get(EXECUTED_ACTION, {}).items():
        if np.shape(action) != actions.shape[1:]:
            got = np.shape(action)
            raise EnvFaultError(_message(name, EXECUTED_ACTION, got, actions.shape[1:]))
        _refuse_kind(name, EXECUTED_ACTION, action.dtype, actions.dtype, action)
        executed[i] = action
    differs = (executed != actions).reshape(len(actions), -1).any(1)
    flags = report.get(INTERVENED)
    intervened = differs if flags is None else np.where(np.isnan(flags), differs, flags != 0)
    return {EXECUTED_ACTION: executed, INTERVENED: intervened.astype(bool)}


def check_info(env: Any, info: dict[str, Any], num_envs: int, fields: Sequence[str] = ()) -> None:
    """Check the step info of a batched torch env by the table at the top.

    Values are not checked: that could wait for a device. `fields` are the announced keys.

    Raises:
        EnvFaultError: names the key, its value and the expected value.
    """
    name = type(env).__name__
    for key in fields:
        if key not in info:
            raise EnvFaultError(f"{name} announces info['{key}'], and returned none from step.")
    for key in ("success", INTERVENED, "penalty"):
        if key in info and (key == "success" or key in fields):
            kinds = "biuf" if key == "penalty" else "biu"
            _check_vector(name, key, info[key], num_envs, kinds)
    for kind in (*TREES, "final_metrics"):
        for key, value in info.get(kind, {}).items():
            if not isinstance(value, Tensor):
                wanted = f"a tensor [{num_envs}]"
                raise EnvFaultError(_not_one(name, f"info {kind}.{key}", value, wanted))


def _check_vector(name: str, key: str, value: Any, num_envs: int, kinds: str) -> None:
    if (
        not isinstance(value, Tensor)
        or value.shape != (num_envs,)
        or _kind(value.dtype) not in kinds
    ):
        wanted = f"a tensor [{num_envs}] of {'numbers' if 'f' in kinds else 'bool'}"
        raise EnvFaultError(_not_one(name, f"info {key}", value, wanted))


def read_penalty(report: EnvReport, num_envs: int) -> np.ndarray:
    """Return `penalty` [N] float32, 0 for envs without one; see `VectorEnv.step`."""
    penalty = report.get("penalty")
    return (
        np.zeros(num_envs, np.float32) if penalty is None else np.nan_to_num(penalty).astype("f4")
    )


def _merged(report: EnvReport, final: EnvReport, done: np.ndarray) -> EnvReport:
    """Merge reports; rows of finished envs come from the report of their end."""
    merged: EnvReport = {}
    for key in report.keys() | final.keys():
        one, other = report.get(key), final.get(key)
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
