"""Configure a task: what an action means, and what is rewarded."""

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
"""What a target is of: a drive's position (m), velocity (m/s) or force (N)."""


class ActionTerm(ABC, Constructed):
    """Turn a policy's action into the target of a drive.

    Args:
        scale: the target per unit of action: m or rad, m/s or rad/s, N or N m.
        clip: actions are clamped to ±clip before they are scaled, and the action space has these
            bounds; None leaves them unbounded.

    Attributes:
        kind: what the target is of.

    Raises:
        ConfigurationError: for a scale or a clip that is not above 0.
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
        """Return a clamped copy [...], in float32, of actions [...] of any shape.

        A copy also without bounds: who gave the action may write its next one into the same memory.
        """
        action = action.to(torch.float32, copy=True)
        return action if self.clip is None else action.clamp_(-self.clip, self.clip)

    @abstractmethod
    def target(self, action: Tensor, position: Tensor) -> Tensor:
        """Return the target [N, A].

        Args:
            action: [N, A], bounded.
            position: [N, A], where the joints are.
        """


class DeltaPosition(ActionTerm):
    """Move the position by `scale * action` from where it is; see `ActionTerm`."""

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
    """Add up the named terms of a reward, each with its weight.

    Args:
        defaults: every term that the task has, with its weight.
        weights: replace the weights of the terms they name; the others keep theirs. A term with
            weight 0 is switched off: not computed, and not reported.
        task: named in errors.

    Raises:
        ConfigurationError: for a term that the task does not have, or a weight of another type.
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
        """Return the reward [N], and what each active term adds to it, {name: [N]}.

        Args:
            values: each term before its weight, as a function: only active ones are computed.
            like: [N] float, the reward's shape where no term is active.
        """
        terms = {name: values[name]() * weight for name, weight in self._active}
        total = None
        for value in terms.values():
            total = value if total is None else total + value
        return torch.zeros_like(like) if total is None else total, terms


def require_kind(term: ActionTerm, allowed: Iterable[Kind], task: str) -> None:
    """Refuse a term that aims at what a task cannot drive.

    Raises:
        ConfigurationError: naming those that it can.
    """
    kinds = list(allowed)
    names = [c.__name__ for c in (DeltaPosition, Position, Velocity, Force) if c.kind in kinds]
    require(
        term.kind in kinds,
        f"{task} cannot be driven by {type(term).__name__} (a {term.kind} target); allowed: "
        f"{', '.join(names)}.",
    )
