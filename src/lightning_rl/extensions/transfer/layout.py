"""Read the layout of a policy: its observation, joints, gains and periods."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import check_range, closest, require
from lightning_rl.extend.files import read_text, read_yaml
from lightning_rl.extend.spaces import by_name, names_of

JOINT_NAMES = ("joint_names", "dof_names")
"""Names of the order of the joints in the metadata of ONNX files, ours and holosoma's."""

IN_METADATA = {
    "default_position": ("default_joint_pos", "default_dof_angles"),
    "stiffness": ("joint_stiffness", "kp"),
    "damping": ("joint_damping", "kd"),
    "action_scale": ("action_scale",),
    "control_period": ("control_period",),
}
"""Settings of a layout by their names in metadata."""

PER_JOINT = ("default_position", "stiffness", "damping", "action_scale")
"""Settings with a number for each joint."""

TOLERANCE = 1e-4
"""Relative difference of two numbers that count as equal."""

ROUNDING = 0.5e-3
"""Largest error of a number in a text of metadata: mjlab writes three decimals."""


@dataclasses.dataclass(frozen=True)
class LayoutTerm:
    """A part of the policy's observation, named as a term of the env's.

    Attributes:
        scale: factor of the env's numbers.
        joints: the numbers belong to the joints, in their order.
        history: last values in the observation, oldest first.
        newest_first: the newest value of a history is first.
    """

    scale: float = 1.0
    joints: bool = False
    history: int = 1
    newest_first: bool = False


@dataclasses.dataclass(frozen=True)
class PolicyLayout:
    """What the numbers mean that a policy reads and returns.

    Attributes:
        observation: parts of the policy's input, in its order.
        default_position: rad, for each joint, in the order of the policy's action.
        stiffness: N m/rad, by joint.
        damping: N m s/rad, by joint.
        action_scale: rad per unit of action, by joint.
        control_period: seconds between two actions.
        height: m, of the robot's base when it stands.
        phases: rad, clocks at the start of an episode, for terms `sin_phase` and `cos_phase`.
        phase_period: seconds per turn of the clocks.
        signs: -1 for each joint that the policy has with the opposite direction.
    """

    observation: dict[str, LayoutTerm]
    default_position: dict[str, float]
    stiffness: dict[str, float]
    damping: dict[str, float]
    action_scale: dict[str, float]
    control_period: float
    height: float
    phases: tuple[float, ...] = ()
    phase_period: float = 1.0
    signs: dict[str, float] | None = None

    @property
    def joints(self) -> list[str]:
        """Names of the joints, in the order of the policy's action."""
        return list(self.default_position)

    def sign(self, joint: str) -> float:
        """Return -1 for a joint that the policy has with the opposite direction, otherwise 1."""
        return (self.signs or {}).get(joint, 1.0)


def read_layout(path: str | Path, metadata: Mapping[str, Any] | None = None) -> PolicyLayout:
    """Read a layout from a YAML file; the metadata of the policy's file complete it.

    Args:
        path: the YAML file.
        metadata: of the policy's file.

    Raises:
        ConfigurationError: a setting is missing, unknown or out of range, or the metadata say
            something else; names the setting.
    """
    try:
        settings = read_yaml(read_text(path), f"The layout {path}")
    except FileNotFoundError:
        raise ConfigurationError(f"layout: there is no file {path}.") from None
    require(isinstance(settings, Mapping), f"{path} is no layout: it has no settings.")
    fields = {field.name: field for field in dataclasses.fields(PolicyLayout)}
    for name in settings:
        require(
            name in fields,
            f"{path} has the setting {name}; allowed: {', '.join(fields)}"
            f"{closest(str(name), list(fields))}.",
        )
    file_values = _from_metadata(metadata or {})
    joints = list(settings.get("default_position") or file_values.get("default_position") or ())
    require(bool(joints), f"{path}: give default_position, {{joint: rad}}, in the policy's order.")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        value = settings.get(name, file_values.get(name, field.default))
        require(
            value is not dataclasses.MISSING, f"{path} has no {name}, nor has the policy's file."
        )
        if name in PER_JOINT:
            value = by_name(f"{path}: {name}", value, joints)
            for joint, number in value.items():
                _check_number(f"{path}: {name} of {joint}", number)
        if name in file_values and name in settings:
            rounding = ROUNDING if name in file_values["rounded"] else 0.0
            _check_equal(f"{path}: {name}", value, file_values[name], rounding)
        values[name] = value
    order = file_values.get("joints", joints)
    require(
        order == joints,
        f"{path} has the joints {', '.join(joints)}, the policy's file {', '.join(order)}: give "
        "default_position in the file's order.",
    )
    values["observation"] = _terms(path, values["observation"])
    values["phases"] = tuple(values["phases"])
    for name in ("control_period", "phase_period", "height"):
        _check_number(f"{path}: {name}", values[name])
        check_range(f"{path}: {name}", values[name], above=0)
    return PolicyLayout(**values)


def columns_of_terms(space: gymnasium.Space[Any]) -> dict[str, list[int]]:
    """Return the columns of each term: numbers have names `term/i`, parts of a Dict follow."""
    parts = space.values() if isinstance(space, gymnasium.spaces.Dict) else [space]
    by_term: dict[str, list[int]] = {}
    for column, name in enumerate(name for part in parts for name in names_of(part)):
        by_term.setdefault(name.rpartition("/")[0], []).append(column)
    return by_term


def _from_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    joints = next((_listed(metadata[name]) for name in JOINT_NAMES if name in metadata), None)
    values: dict[str, Any] = {} if joints is None else {"joints": joints}
    values["rounded"] = []
    for setting, names in IN_METADATA.items():
        for name in (name for name in names if metadata.get(name) is not None):
            value = _listed(metadata[name])
            if isinstance(metadata[name], str):
                values["rounded"].append(setting)
            is_list = isinstance(value, list)
            values[setting] = _by_joint(name, value, joints or []) if is_list else value
    return values


def _listed(value: Any) -> Any:
    """Return the parts of a text of metadata: mjlab separates them by commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _by_joint(name: str, value: list[Any], joints: list[str]) -> dict[str, float]:
    try:
        return {joint: float(part) for joint, part in zip(joints, value, strict=True)}
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The policy's file has {name} {value}: it must have a number for each joint of "
            f"{' or '.join(JOINT_NAMES)}, {joints} ({error})."
        ) from error


def _terms(path: str | Path, terms: Any) -> dict[str, LayoutTerm]:
    require(isinstance(terms, Mapping), f"{path}: observation must have terms, got {terms}.")
    allowed = [field.name for field in dataclasses.fields(LayoutTerm)]
    for name, term in terms.items():
        unknown = [key for key in term or {} if key not in allowed]
        require(
            not unknown,
            f"{path}: observation.{name} has {', '.join(unknown)}; allowed: {', '.join(allowed)}.",
        )
        _check_number(f"{path}: observation.{name}.scale", (term or {}).get("scale", 1.0))
        check_range(
            f"{path}: observation.{name}.history", (term or {}).get("history", 1), minimum=1
        )
    return {name: LayoutTerm(**(term or {})) for name, term in terms.items()}


def _check_number(place: str, value: Any) -> None:
    require(isinstance(value, int | float), f"{place} must be a number, got {value!r}.")


def equal(value: Any, other: Any, rounding: float = 0.0) -> bool:
    """Return whether numbers, of joints or alone, are equal but for rounding."""
    if isinstance(value, Mapping):
        return all(equal(number, other[name], rounding) for name, number in value.items())
    allowed = rounding + TOLERANCE * max(abs(value), abs(other))
    return abs(value - other) <= allowed  # type: ignore[no-any-return]  # bool


def _check_equal(place: str, value: Any, from_file: Any, rounding: float) -> None:
    value = value if isinstance(value, Mapping) else {"": value}
    from_file = from_file if isinstance(from_file, Mapping) else dict.fromkeys(value, from_file)
    for name, number in value.items():
        file_number = from_file.get(name, number)
        require(
            equal(number, file_number, rounding),
            f"{place}{f' of {name}' if name else ''} is {number}, but the policy's file says "
            f"{file_number}: leave the setting out, or correct it.",
        )
