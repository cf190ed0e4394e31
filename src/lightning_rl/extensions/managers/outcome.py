"""Compute rewards, terminations and metrics of a step by terms."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.extend.errors import EnvFaultError, require
from lightning_rl.extensions.managers.term import BoundTerm, Ends, Metric, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView

OUTCOMES: dict[Ends, tuple[str, ...]] = {
    "terminated": ("terminated",),
    "success": ("success", "terminated"),
    "fail": ("fail", "terminated"),
    "truncated": ("truncated",),
    "nothing": ("success",),
}
"""The flags of a step that a termination term sets."""


class Rewards:
    """Weighted sum of named reward terms; a term with weight 0 is neither computed nor reported.

    Args:
        terms: by name.
        owner: name of the env, for messages.
        factor: of all weights, such as seconds per step.
    """

    def __init__(self, terms: Mapping[str, Reward], owner: str, factor: float = 1.0) -> None:
        self.terms: list[tuple[str, float, str | None, BoundTerm]] = []
        for name, term in terms.items():
            weight = 1.0 if term.weight is None else float(term.weight)
            require(
                bool(np.isfinite(weight)),
                f"{owner}: the weight of '{name}' must be finite, got {weight}.",
            )
            # The weight is known before the first step: do not build terms that are never called.
            if weight != 0.0:
                bound_term = BoundTerm(term, "rewards", name, owner)
                self.terms.append((name, weight * factor, term.level, bound_term))

    def total(self, env: EnvView) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the reward [N], and the weighted value of each term, {name: [N]}."""
        values: dict[str, Tensor] = {}
        total, shape = None, env.rows_shape
        for name, weight, level, term in self.terms:
            env.stream = term.stream
            value = term.call(env)
            # The cheap test here, since it runs for each term and step; the message in `checked`.
            if value.__class__ is not Tensor or value.shape != shape:
                checked(term, value, env)
            value = value * weight
            if level is not None:
                value = value * env.level(level)
            values[name] = value
            total = value if total is None else total + value
        if total is None:
            total = torch.zeros(env.num_envs, device=env.device)
        return total, values


class Terminations:
    """Ends of episodes by named terms."""

    def __init__(self, terms: Mapping[str, Termination], owner: str) -> None:
        self.terms = {
            name: (
                OUTCOMES[term.ends or "terminated"],
                BoundTerm(term, "terminations", name, owner),
            )
            for name, term in terms.items()
        }

    def parameter(self, name: str, parameter: str, otherwise: float) -> float:
        if name not in self.terms:
            return otherwise
        return float(self.terms[name][1].settings.params.get(parameter, otherwise))

    def judge(self, env: EnvView) -> dict[str, Any]:
        """Set the outcome of a step in the view, and return the entries that `TorchEnv` reads."""
        outcome: dict[str, Tensor] = {}
        shape = env.rows_shape
        for outcomes, term in self.terms.values():
            env.stream = term.stream
            flags = term.call(env)
            if flags.__class__ is not Tensor or flags.shape != shape or flags.dtype != torch.bool:
                checked(term, flags, env, torch.bool)
            # Several terms may set a flag: any of them suffices.
            for key in outcomes:
                outcome[key] = outcome[key] | flags if key in outcome else flags
        # In one step, a failure outweighs a success.
        if "success" in outcome and "fail" in outcome:
            outcome["success"] = outcome["success"] & ~outcome["fail"]
        env.outcome = outcome
        # The env returns `terminated` itself; the terms still read it in `outcome`.
        info: dict[str, Any] = outcome.copy()
        info.pop("terminated", None)
        return info


class Metrics:
    """Numbers that are reported at every step."""

    def __init__(self, terms: Mapping[str, Metric], owner: str) -> None:
        self.terms = {name: BoundTerm(term, "metrics", name, owner) for name, term in terms.items()}

    def values(self, env: EnvView) -> dict[str, Tensor]:
        """Return the metrics of a step, {name: [N]}."""
        values: dict[str, Tensor] = {}
        for name, term in self.terms.items():
            env.stream = term.stream
            values[name] = value = term.call(env)
            if value.__class__ is not Tensor or value.shape != env.rows_shape:
                checked(term, value, env)
        return values


def checked(term: BoundTerm, value: Any, env: EnvView, dtype: torch.dtype | None = None) -> Tensor:
    """Return the value of a term, if it is a tensor [N] of numbers or of `dtype`."""
    if (
        not isinstance(value, Tensor)
        or value.shape != (env.num_envs,)
        or (value.dtype != dtype if dtype is not None else value.is_complex())
    ):
        actual = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        expected = "numbers" if dtype is None else str(dtype)
        raise EnvFaultError(
            f"{term.label} returned {actual}: return a tensor [{env.num_envs}] of {expected}, one "
            "per env."
        )
    return value
