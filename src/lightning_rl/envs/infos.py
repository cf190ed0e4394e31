"""Read the infos of envs: success, reward terms, metrics, interventions and penalties.

`EnvReport` collects them as float64 arrays [N], NaN for missing values. Gymnasium's arrays have the
type of the first number instead: after an integer 1, the 0.7 of another env becomes 0.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.envs.step_results import (
    KINDS,
    kind_of,
    one_number,
    refuse_kind,
    shortened,
    wrong_shape,
    wrong_value,
)
from lightning_rl.system.errors import EnvFaultError

TREES = ("rewards", "metrics")
"""Info entries that are dicts of numbers by name."""

EnvReport = dict[str, Any]
"""Reports of N envs: `success` [N], `rewards` {term: [N]}, `metrics` {name: [N]}, if reported.

With `data.extra_fields`: `kept_info` {name: [N, ...]}, float32.
With interventions: `executed_action` {i: [*A]} of envs with a different action, and `intervened`
[N]. With penalties: `penalty` [N].
"""

INTERVENED, EXECUTED_ACTION = "intervened", "executed_action"
"""Info keys of interventions."""


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


KEPT = "kept_info"
"""Info key of the entries that rollouts store, by name; see `KeptInfo`."""

READ = ("success", "is_success", *TREES, KEPT, EXECUTED_ACTION, INTERVENED, "penalty")
"""Info keys that are read; the last three are read only if the env announces them."""


class InfoReader:
    """Reads the infos of N envs by the table of `step_results`.

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
        # Runs for each env at each step: a loop over the keys takes three times as long.
        """Return whether the info of an env has any entry to read."""
        return bool(info) and (
            "metrics" in info
            or "success" in info
            or "rewards" in info
            or "is_success" in info
            or KEPT in info
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
        for name, array in info.get(KEPT, {}).items():
            columns = report.setdefault(KEPT, {})
            if name not in columns:
                columns[name] = np.zeros((self._num_envs, *array.shape), np.float32)
            columns[name][i] = array

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
            warnings.warn(
                f"{self._refusal(key, value, wanted)} The entry is ignored.", stacklevel=2
            )

    def _refusal(self, key: str, value: Any, wanted: str) -> str:
        return (
            f"{self._name} returned info['{key}'] = {shortened(value)} instead of {wanted}. "
            "Correct the env, or rename the key in a wrapper."
        )


def _column_of(values: Any, given: np.ndarray) -> np.ndarray | None:
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
    kept = report.get(KEPT, {})
    return tensors | {name: torch.from_numpy(array) for name, array in kept.items()}


def read_interventions(name: str, report: EnvReport, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Return `executed_action` [N, *A] and `intervened` [N] bool for given `actions` [N, *A].

    Raises:
        EnvFaultError: an executed action has another shape.
    """
    executed = actions.copy()
    for i, action in report.get(EXECUTED_ACTION, {}).items():
        if np.shape(action) != actions.shape[1:]:
            got = np.shape(action)
            raise EnvFaultError(wrong_shape(name, EXECUTED_ACTION, got, actions.shape[1:]))
        refuse_kind(name, EXECUTED_ACTION, action.dtype, actions.dtype, action)
        executed[i] = action
    differs = (executed != actions).reshape(len(actions), -1).any(1)
    flags = report.get(INTERVENED)
    intervened = differs if flags is None else np.where(np.isnan(flags), differs, flags != 0)
    return {EXECUTED_ACTION: executed, INTERVENED: intervened.astype(bool)}


def check_info(env: Any, info: dict[str, Any], num_envs: int, fields: Sequence[str] = ()) -> None:
    """Check the step info of a batched torch env by the table of `step_results`, but no values.

    Checking values could wait for a device. `fields` are the announced keys.

    Raises:
        EnvFaultError: names the key, its value and the expected value.
    """
    name = type(env).__name__
    for key in fields:
        if key not in info:
            raise EnvFaultError(f"{name} announces info['{key}'], but returned none from step.")
    for key in ("success", INTERVENED, "penalty"):
        if key in info and (key == "success" or key in fields):
            kinds = "biuf" if key == "penalty" else "biu"
            _check_vector(name, key, info[key], num_envs, kinds)
    for kind in (*TREES, "final_metrics", "log"):
        for key, value in info.get(kind, {}).items():
            if not isinstance(value, Tensor):
                wanted = f"a tensor [{num_envs}]"
                raise EnvFaultError(wrong_value(name, f"info {kind}.{key}", value, wanted))


def _check_vector(name: str, key: str, value: Any, num_envs: int, kinds: str) -> None:
    if (
        not isinstance(value, Tensor)
        or value.shape != (num_envs,)
        or kind_of(value.dtype) not in kinds
    ):
        wanted = f"a tensor [{num_envs}] of {'numbers' if 'f' in kinds else 'bool'}"
        raise EnvFaultError(wrong_value(name, f"info {key}", value, wanted))


def read_penalty(report: EnvReport, num_envs: int) -> np.ndarray:
    """Return `penalty` [N] float32, 0 for envs without one; see `VectorEnv.step`."""
    penalty = report.get("penalty")
    return (
        np.zeros(num_envs, np.float32) if penalty is None else np.nan_to_num(penalty).astype("f4")
    )


def _merged(report: EnvReport, final: EnvReport, done: np.ndarray) -> EnvReport:
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
