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

from lightning_rl.envs.refusals import KINDS, refuse_kind, shortened, wrong_shape, wrong_value
from lightning_rl.envs.step_results import check_vector, one_number
from lightning_rl.rollout.contract import leaves_by_path
from lightning_rl.system.errors import EnvFaultError

TREES = ("rewards", "metrics")
"""Info entries that are dicts of numbers by name."""

EnvReport = dict[str, Any]
"""Reports of N envs: `success` [N], `rewards` {term: [N]}, `metrics` {name: [N]}, if reported.

With `data.extra_fields`: `recorded_info` {name: [N, ...]}, float32.
With interventions: `executed_action` {i: [*A]} of envs with a different action, and `intervened`
[N]. With penalties: `penalty` [N].
"""

INTERVENED, EXECUTED_ACTION = "intervened", "executed_action"
"""Info keys of interventions."""


def report_intervention(info: dict[str, Any], policy_action: Any, replaced: bool) -> dict[str, Any]:
    """Report in an info whether a layer around the env replaced the action (`replaced`).

    The inner env's action is `policy_action` [*A]. The innermost report of the executed action
    counts; `intervened` of any layer stays true.
    """
    executed = info.get(EXECUTED_ACTION, policy_action)
    inside = info[INTERVENED] if INTERVENED in info else not _equal(executed, policy_action)
    return {**info, EXECUTED_ACTION: executed, INTERVENED: bool(inside) or replaced}


def _equal(action: Any, other: Any) -> bool:
    # Leaf by leaf: the parts of a Dict or Tuple have no common array that could be compared. The
    # same array is equal even if it has NaN.
    parts, others = leaves_by_path(action), leaves_by_path(other)
    return parts.keys() == others.keys() and all(
        part is others[path] or np.array_equal(part, others[path]) for path, part in parts.items()
    )


def renamed(info: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename some keys of an info, and their masks `_x`."""
    if not any(theirs in info for theirs in names):
        return info
    names = {**names, **{f"_{theirs}": f"_{ours}" for theirs, ours in names.items()}}
    return {names.get(key, key): value for key, value in info.items()}


RECORDED = "recorded_info"
"""Info key of the entries that rollouts store, by name; see `RecordedInfo`."""

READ = ("success", "is_success", *TREES, RECORDED, EXECUTED_ACTION, INTERVENED, "penalty")
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
        self._interventions = interventions
        self._keys = {"is_success": "success", "success": "success"}  # the last one counts
        self._keys |= {INTERVENED: INTERVENED} if interventions else {}
        self._keys |= {"penalty": "penalty"} if penalty else {}
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
            or RECORDED in info
            or (
                self._announced
                and (EXECUTED_ACTION in info or INTERVENED in info or "penalty" in info)
            )
        )

    def gather(self, report: EnvReport, info: Mapping[str, Any], rows: Any) -> None:
        """Add an info to `report`.

        `rows` is the index of one env; or a mask [N] bool of the envs that an info of a batched env
        describes by arrays [N], or by dicts of arrays. In such an info, masks `_x` [N] bool select
        the envs that reported `x` (default: all).

        Raises:
            EnvFaultError: for entries that the table refuses.
        """
        for key, name in self._keys.items():
            if key in info and not (name == "success" and info[key] is None):  # None: undecided
                self._put_number(report, name, key, info, rows)
        if EXECUTED_ACTION in info and self._interventions:
            executed, actions = report.setdefault(EXECUTED_ACTION, {}), info[EXECUTED_ACTION]
            if isinstance(rows, int):
                executed[rows] = np.array(actions)  # a copy, because the env may reuse its array
            else:
                reporting = np.flatnonzero(rows & info.get(f"_{EXECUTED_ACTION}", True))
                executed |= {i: np.array(actions[i]) for i in reporting}
        for kind in TREES:
            if kind in info:
                self._put_tree(report.setdefault(kind, {}), kind, info[kind], rows)
        for name, array in info.get(RECORDED, {}).items():
            columns = report.setdefault(RECORDED, {})
            if name not in columns:
                columns[name] = np.zeros((self._num_envs, *array.shape), np.float32)
            columns[name][rows] = array

    def read_arrays(
        self, info: dict[str, Any], done: np.ndarray, names: Mapping[str, str] | None = None
    ) -> EnvReport:
        """Read the info of a batched env, see `gather`; `names` maps the env's own keys to ours.

        `final_info` has the same structure and describes the finished envs, `done` [N] bool; the
        other entries then describe their next episode.

        Raises:
            EnvFaultError: for entries that the table refuses.
        """
        report: EnvReport = {}
        final = info.get("final_info")
        # The entries of finished envs describe their next episode: read theirs from `final_info`.
        rows = ~done if isinstance(final, dict) else np.ones_like(done)
        self.gather(report, renamed(info, names or {}), rows)
        if isinstance(final, dict):
            self.gather(report, renamed(final, names or {}), done)
        return report

    def _put_number(
        self, report: EnvReport, name: str, key: str, info: Mapping[str, Any], rows: Any
    ) -> None:
        rows, numbers = _numbers(info, key, rows)
        # A flag may be NaN (not reported), a penalty must be a number.
        if name == "penalty":
            ok, expected = numbers is not None and np.isfinite(numbers), "a finite number"
        else:
            ok, expected = (numbers == 0) | (numbers == 1) | (numbers != numbers), "true or false"
        if not np.all(ok):
            is_one = numbers is None or isinstance(rows, int)
            raise EnvFaultError(
                self._refusal(key, info[key] if is_one else numbers[~ok][0], expected, rows)
            )
        self._column(report, name)[rows] = numbers

    def _put_tree(self, columns: dict[str, Any], kind: str, tree: Any, rows: Any) -> None:
        if not isinstance(tree, Mapping):
            self._warn(kind, tree, "a dict of numbers by name", rows)
            return
        for name, value in tree.items():
            # Gymnasium's vector envs add a mask `_x` for each entry x.
            is_mask = not isinstance(rows, int) and str(name)[:1] == "_" and str(name)[1:] in tree
            if not is_mask:
                reporting, numbers = _numbers(tree, name, rows)
                if numbers is None:
                    self._warn(f"{kind}.{name}", value, "a number", rows)
                else:
                    self._column(columns, str(name))[reporting] = numbers

    def _column(self, columns: dict[str, Any], name: str) -> np.ndarray:
        if name not in columns:
            columns[name] = np.full(self._num_envs, np.nan)
        array: np.ndarray = columns[name]
        return array

    def _warn(self, key: str, value: Any, expected: str, rows: Any) -> None:
        if key not in self._warned:  # once per key, not per step
            self._warned.add(key)
            refusal = self._refusal(key, value, expected, rows)
            warnings.warn(f"{refusal} The entry is ignored.", stacklevel=2)

    def _refusal(self, key: str, value: Any, expected: str, rows: Any) -> str:
        each = "" if isinstance(rows, int) else f" for each of the {self._num_envs} envs"
        return (
            f"{self._name} returned info['{key}'] = {shortened(value)} instead of {expected}{each}"
            ". Correct the env, or rename the key in a wrapper."
        )

    @staticmethod
    def to_tensors(report: EnvReport) -> dict[str, Any]:
        """Convert reports to the tensors [N] of a `VectorEnv.step` info."""
        tensors: dict[str, Any] = {}
        success = report.get("success")
        if success is not None and not np.isnan(success).all():
            tensors["success"] = torch.from_numpy(np.nan_to_num(success) != 0)
        for kind in TREES:
            if report.get(kind):
                tensors[kind] = {
                    name: torch.from_numpy(array) for name, array in report[kind].items()
                }
        entries = report.get(RECORDED, {})
        return tensors | {name: torch.from_numpy(array) for name, array in entries.items()}


def _numbers(values: Mapping[str, Any], name: str, rows: Any) -> tuple[Any, Any]:
    """Return the rows that report an entry, and their numbers; None if it is no numbers."""
    if isinstance(rows, int):
        return rows, one_number(values[name])
    array = np.asarray(values[name])
    if array.shape != rows.shape:
        return rows, None
    # The mask of the entry: elsewhere its numbers are fillings.
    rows = rows & np.asarray(values.get(f"_{name}", True), dtype=bool)
    if array.dtype.kind == "O":  # Gymnasium stores anything but plain numbers in object arrays
        rows = rows & np.array([value is not None for value in array])
        numbers = [one_number(value) for value in array[rows]]
        return rows, None if None in numbers else np.array(numbers, float)
    return rows, array[rows] if array.dtype.kind in KINDS else None


def read_interventions(name: str, report: EnvReport, actions: np.ndarray) -> dict[str, np.ndarray]:
    """Return `executed_action` [N, *A] and `intervened` [N] bool for given `actions` [N, *A].

    Raises:
        EnvFaultError: an executed action has another shape.
    """
    executed = actions.copy()
    for i, action in report.get(EXECUTED_ACTION, {}).items():
        if np.shape(action) != actions.shape[1:]:
            shape = np.shape(action)
            raise EnvFaultError(wrong_shape(name, EXECUTED_ACTION, shape, actions.shape[1:]))
        refuse_kind(name, EXECUTED_ACTION, action.dtype, actions.dtype, action)
        executed[i] = action
    differs = (executed != actions).reshape(len(actions), -1).any(1)  # the default of the flag
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
    for key in {"success", *fields} & info.keys() & {"success", INTERVENED, "penalty"}:
        kinds = KINDS if key == "penalty" else "biu"
        check_vector(name, f"info {key}", info[key], num_envs, kinds)
    for kind in (*TREES, "final_metrics", "log"):
        for key, value in info.get(kind, {}).items():
            if not isinstance(value, Tensor):
                expected = f"a tensor [{num_envs}]"
                raise EnvFaultError(wrong_value(name, f"info {kind}.{key}", value, expected))


def read_penalty(report: EnvReport, num_envs: int) -> np.ndarray:
    """Return `penalty` [N] float32, 0 for envs without one; see `VectorEnv.step`."""
    penalty = report.get("penalty")
    return (
        np.zeros(num_envs, np.float32) if penalty is None else np.nan_to_num(penalty).astype("f4")
    )
