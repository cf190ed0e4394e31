"""Configure a task: the meaning of an action, and the reward."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.system.construction import Constructed
from lightning_rl.system.errors import closest, require

Kind = Literal["position", "velocity", "force"]
"""Kind of an action's target: position (m), velocity (m/s) or force (N)."""


class ActionTerm(ABC, Constructed):
    """Turn a policy's action into the target of a drive.

    Args:
        scale: the target per unit of action: m or rad, m/s or rad/s, N or N m.
        clip: actions are clamped to ±clip before scaling, and the action space has these bounds;
            None: unbounded.

    Attributes:
        kind: kind of the target.

    Raises:
        ConfigurationError: `scale` or `clip` is not above 0.
    """

    kind: ClassVar[Kind]

    def __init__(self, scale: float = 1.0, clip: float | None = None) -> None:
        name = type(self).__name__
        require(scale > 0, f"{name}: scale must be above 0, got {scale}.")
        require(clip is None or clip > 0, f"{name}: clip must be above 0 or null, got {clip}.")
        self.scale = scale
        self.clip = clip

    def space(self, size: int) -> gymnasium.spaces.Box:
        """Return the space of actions [size]."""
        bound = np.inf if self.clip is None else self.clip
        return gymnasium.spaces.Box(-bound, bound, (size,), np.float32)

    def bounded(self, action: Tensor) -> Tensor:
        """Return a clamped float32 copy of actions [...] of any shape.

        Without bounds it is a copy, too: the caller may overwrite its action.
        """
        action = action.to(torch.float32, copy=True)
        return action if self.clip is None else action.clamp_(-self.clip, self.clip)

    @abstractmethod
    def target(self, action: Tensor, position: Tensor) -> Tensor:
        """Return the target [N, A] of a bounded action [N, A] at the joint positions [N, A]."""


class DeltaPosition(ActionTerm):
    """Move by `scale * action` from the current position; see `ActionTerm`."""

    kind: ClassVar[Kind] = "position"

    def __init__(self, scale: float = 0.1, clip: float | None = None) -> None:
        super().__init__(scale, clip)

    def target(self, action: Tensor, position: Tensor) -> Tensor:
        return position + action * self.scale


class Position(ActionTerm):
    """Go to the position `scale * action`; see `ActionTerm`."""

    kind: ClassVar[Kind] = "position"

    def target(self, action: Tensor, position: Tensor) -> Tensor:
        return action * self.scale


class Velocity(Position):
    """Move with the velocity `scale * action`."""

    kind: ClassVar[Kind] = "velocity"


class Force(Position):
    """Push with the force `scale * action`."""

    kind: ClassVar[Kind] = "force"


class RewardTerms:
    """Weighted sum of named reward terms.

    Args:
        defaults: every term of the task, with its weight.
        weights: weights that replace the defaults. A term with weight 0 is neither computed nor
            reported.
        task: name of the task, for messages.

    Raises:
        ConfigurationError: an unknown term, or a weight that is not finite.
    """

    def __init__(
        self, defaults: Mapping[str, float], weights: Mapping[str, float] | None, task: str
    ) -> None:
        for name, weight in (weights or {}).items():
            require(
                name in defaults,
                f"{task} has no reward term '{name}'; allowed: {', '.join(defaults)}"
                f"{closest(name, defaults)}.",
            )
            require(
                bool(np.isfinite(weight)),
                f"{task}: the weight of '{name}' must be finite, got {weight}.",
            )
        self.weights = {**defaults, **(weights or {})}
        self._active = [(name, weight) for name, weight in self.weights.items() if weight != 0.0]

    def total(
        self, values: Mapping[str, Callable[[], Tensor]], like: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the reward [N], and the weighted value of each active term, {name: [N]}.

        Args:
            values: each term before its weight, as a function: only active terms are computed.
            like: [N] float, a tensor of the reward's shape.
        """
        terms = {name: values[name]() * weight for name, weight in self._active}
        total = None
        for value in terms.values():
            total = value if total is None else total + value
        return torch.zeros_like(like) if total is None else total, terms


def require_kind(term: ActionTerm, allowed: Iterable[Kind], task: str) -> None:
    """Refuse an action term that a task does not support.

    Raises:
        ConfigurationError: names the supported terms.
    """
    kinds = list(allowed)
    names = [c.__name__ for c in (DeltaPosition, Position, Velocity, Force) if c.kind in kinds]
    require(
        term.kind in kinds,
        f"{task} cannot be driven by {type(term).__name__} (a {term.kind} target); allowed: "
        f"{', '.join(names)}.",
    )
