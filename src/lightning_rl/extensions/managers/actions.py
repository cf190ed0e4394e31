"""Turn a policy's action into targets of drives."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rl.extend.errors import Configurable, closest, require
from lightning_rl.extend.spaces import by_name, named
from lightning_rl.extensions.managers.term import function_of
from lightning_rl.extensions.managers.view import EnvView

Kind = Literal["position", "velocity", "force"]
"""Kind of an action's target: position (m), velocity (m/s) or force (N)."""


Numbers = float | list[float] | dict[str, float]
"""One number for all drives, one for each in order, or one for each by name."""


class ActionTerm(ABC, Configurable):
    """Turn a policy's action into the targets of drives.

    Args:
        scale: the target per unit of action: m or rad, m/s or rad/s, N or N m; one number,
            {drive: number}, or a list in the order of `drives` (default: of the env's drives).
        clip: actions are clamped to ±clip before scaling, and the action space has these bounds; as
            `scale`. None: unbounded.
        drives: names of the driven joints or actuators, or patterns such as `leg_*`. Default: all.

    Raises:
        ConfigurationError: `scale` or `clip` is not above 0.
    """

    kind: ClassVar[Kind]

    def __init__(
        self, scale: Numbers = 1.0, clip: Numbers | None = None, drives: list[str] | None = None
    ) -> None:
        name = type(self).__name__
        for setting, value in {"scale": scale, "clip": 1.0 if clip is None else clip}.items():
            numbers = value.values() if isinstance(value, dict) else value
            numbers = [numbers] if isinstance(numbers, int | float) else list(numbers)
            require(
                bool(numbers) and min(numbers) > 0,
                f"{name}: {setting} must be above 0, got {value}.",
            )
        # YAML has integers, but `scaled_action` looks for a float.
        self.scale: Numbers = float(scale) if isinstance(scale, int) else scale
        self.clip = clip
        self.drives = drives

    def ordered(self, names: Sequence[str], label: str) -> "ActionTerm":
        """Return this term with `scale` and `clip` in the order of the drives `names`.

        Raises:
            ConfigurationError: they name other drives; `label` names the term.
        """
        # A copy, because several envs may share the configured term.
        term = copy.copy(self)
        for setting in ("scale", "clip"):
            value = getattr(self, setting)
            if isinstance(value, dict):
                setattr(term, setting, list(by_name(f"{label}: {setting}", value, names).values()))
            elif isinstance(value, list) and names and self.drives != list(names):
                rank_zero_warn(
                    f"{label}: {setting} {value} is read in the order {', '.join(names)}, which "
                    "another model may change: give {name: number}."
                )
        return term

    def size(self, drives: int) -> int:
        """Return the size of the action for a number of drives."""
        return drives

    def space(self, size: int) -> gymnasium.spaces.Box:
        """Return the space of actions [size].

        Raises:
            ConfigurationError: another number of scales was given, or names of unnamed drives.
        """
        for setting, value in {"scale": self.scale, "clip": self.clip}.items():
            require(
                not isinstance(value, dict) and (not isinstance(value, list) or len(value) == size),
                f"{type(self).__name__}: {setting} must be one number or {size}, got {value}.",
            )
        clip: Any = np.inf if self.clip is None else self.clip
        bound = np.broadcast_to(np.asarray(clip, np.float32), (size,))
        return gymnasium.spaces.Box(-bound, bound, (size,), np.float32)

    def clipped_action(self, action: Tensor) -> Tensor:
        """Return a clamped float32 copy of actions [...] of any shape."""
        # A copy, because `clamp_` would change the action in the rollout.
        action = action.to(torch.float32, copy=True)
        if self.clip is None:
            return action
        if isinstance(self.clip, int | float):
            return action.clamp_(-self.clip, self.clip)
        clip = torch.tensor(self.clip, device=action.device)
        return action.clamp_(-clip, clip)

    def scaled_action(self, action: Tensor) -> Tensor:
        """Return `scale * action` [N, A]."""
        if isinstance(self.scale, float):
            return action * self.scale
        return action * torch.tensor(self.scale, device=action.device)

    @abstractmethod
    def target(self, action: Tensor, position: Tensor, env: EnvView | None = None) -> Tensor:
        """Return the targets [N, d] of clipped actions [N, A] at the joint positions [N, d]."""


class DeltaPosition(ActionTerm):
    """Move by `scale * action` from the current position; see `ActionTerm`."""

    kind: ClassVar[Kind] = "position"

    def __init__(
        self, scale: Numbers = 0.1, clip: Numbers | None = None, drives: list[str] | None = None
    ) -> None:
        super().__init__(scale, clip, drives)

    def target(self, action: Tensor, position: Tensor, env: EnvView | None = None) -> Tensor:
        return position + self.scaled_action(action)


class Position(ActionTerm):
    """Go to the position `scale * action`; see `ActionTerm`."""

    kind: ClassVar[Kind] = "position"

    def target(self, action: Tensor, position: Tensor, env: EnvView | None = None) -> Tensor:
        return self.scaled_action(action)


class Velocity(Position):
    """Move with the velocity `scale * action`."""

    kind: ClassVar[Kind] = "velocity"


class Force(Position):
    """Push with the force `scale * action`."""

    kind: ClassVar[Kind] = "force"


class EndEffectorPose(ActionTerm):
    """Move the end effector by `scale * action`, with the user's inverse kinematics.

    Args:
        inverse_kinematics: a function, in YAML its import path: `(env, change) -> positions`, with
            the view of the env, the change of the pose [N, size], and the joints' target positions
            [N, d].
        size: numbers of a change: 3 for a position, 6 with a rotation vector.
        scale: m or rad per unit of action; one number, or one for each number of the change.
        clip, drives: see `ActionTerm`.

    Raises:
        ConfigurationError: the import path leads to no function.
    """

    kind: ClassVar[Kind] = "position"

    def __init__(
        self,
        inverse_kinematics: str | Callable[..., Tensor],
        size: int = 3,
        scale: float | list[float] = 0.05,
        clip: float | list[float] | None = None,
        drives: list[str] | None = None,
    ) -> None:
        super().__init__(scale, clip, drives)
        self._size = size
        self._inverse = function_of(inverse_kinematics, "EndEffectorPose: inverse_kinematics")

    def ordered(self, names: Sequence[str], label: str) -> "ActionTerm":
        return self  # `scale` and `clip` are of the pose

    def size(self, drives: int) -> int:
        return self._size

    def target(self, action: Tensor, position: Tensor, env: EnvView | None = None) -> Tensor:
        # The user's function: a wrong shape would broadcast silently.
        target: Tensor = self._inverse(env, self.scaled_action(action))
        require(
            target.shape == position.shape,
            f"EndEffectorPose: inverse_kinematics returned {list(target.shape)}, but "
            f"{list(position.shape)} joint positions are driven.",
        )
        return target


class Drive(NamedTuple):
    """Targets [N, d] of one kind, for the drives with these indices [d]."""

    kind: Kind
    columns: list[int]
    target: Tensor


class Actions:
    """Several action terms: each has a part of the action and its own drives.

    Args:
        terms: action terms by name, in the order of their parts.
        drives: names of all drives.
        owner: name of the env, for messages.

    Attributes:
        space: space of actions [A].
        names: the drive of each number of an action; empty if they are of an end effector.

    Raises:
        ConfigurationError: a name that fits no drive, or a drive of two terms.
    """

    def __init__(self, terms: Mapping[str, ActionTerm], drives: Sequence[str], owner: str) -> None:
        require(bool(terms), f"{owner} has no actions: add at least one action term.")
        # First the drives of each term, then its numbers in the order of these drives.
        self.columns = {
            name: _columns(term, drives, f"{owner}: the action '{name}'")
            for name, term in terms.items()
        }
        self.terms = {
            name: term.ordered(
                [drives[column] for column in self.columns[name]], f"{owner}: the action '{name}'"
            )
            for name, term in terms.items()
        }
        # The later one of two targets of a drive would silently win.
        driven_by: dict[int, str] = {}
        for name, columns in self.columns.items():
            for column in columns:
                require(
                    column not in driven_by,
                    f"{owner}: the actions '{driven_by.get(column)}' and '{name}' both drive "
                    f"{drives[column]}: name the drives of each (drives: [...]).",
                )
                driven_by[column] = name
        ordered = self.terms.items()
        # A term may have fewer numbers than drives, such as the pose of an end effector.
        self._sizes = [term.size(len(self.columns[name])) for name, term in ordered]
        spaces = [term.space(size) for (_, term), size in zip(ordered, self._sizes, strict=True)]
        low, high = (
            np.concatenate([getattr(part, side) for part in spaces]) for side in ("low", "high")
        )
        poses = [term for term in self.terms.values() if isinstance(term, EndEffectorPose)]
        columns = [column for columns in self.columns.values() for column in columns]
        # The numbers of a pose belong to no single drive.
        self.names = [] if poses else [drives[column] for column in columns]
        self.space = named(gymnasium.spaces.Box(low, high, dtype=np.float32), self.names)

    def targets(self, env: EnvView, action: Tensor, position: Tensor) -> list[Drive]:
        """Return the targets of actions [N, A] at the positions [N, D] of all drives."""
        # Each term gets its part of the action, and the positions of its own drives.
        parts = zip(self.terms.items(), action.split(self._sizes, 1), strict=True)
        return [
            Drive(
                term.kind,
                self.columns[name],
                term.target(term.clipped_action(part), position[:, self.columns[name]], env),
            )
            for (name, term), part in parts
        ]


def _columns(term: ActionTerm, drives: Sequence[str], label: str) -> list[int]:
    if term.drives is None:
        return list(range(len(drives)))
    columns: list[int] = []
    for pattern in term.drives:
        matches = [i for i, name in enumerate(drives) if fnmatchcase(name, pattern)]
        require(
            bool(matches),
            f"{label} names the drive '{pattern}', which is none of {', '.join(drives)}"
            f"{closest(pattern, drives)}.",
        )
        # Patterns may overlap: each drive counts once.
        columns += [i for i in matches if i not in columns]
    return columns


def require_kind(term: ActionTerm, allowed: Iterable[Kind], task: str) -> None:
    """Refuse an action term that a task does not support.

    Raises:
        ConfigurationError: for another kind of term, or a term that names drives.
    """
    require_all_drives(term, task)
    kinds = list(allowed)
    names = [c.__name__ for c in (DeltaPosition, Position, Velocity, Force) if c.kind in kinds]
    require(
        term.kind in kinds,
        f"{task} cannot be driven by {type(term).__name__} (a {term.kind} target); allowed: "
        f"{', '.join(names)}.",
    )


def require_all_drives(term: ActionTerm, owner: str) -> None:
    """Refuse an action term that names drives for a task whose drives have no names.

    Raises:
        ConfigurationError: names the drives.
    """
    require(
        term.drives is None,
        f"{owner} has no names for its drives: remove drives: {term.drives} of "
        f"{type(term).__name__}, which then drives all of them.",
    )
