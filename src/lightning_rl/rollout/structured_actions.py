"""Lay actions of several parts out flat, and give an env its structure back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.system.errors import ConfigurationError, require

LARGEST_COUNT = 2**24
"""float32 holds every whole number up to this one."""


class ActionPart(NamedTuple):
    """A part of an action, and where it lies.

    Attributes:
        name: the keys that lead to it, with dots between; `action` where it is the whole.
        space: Box of floats, Discrete, MultiDiscrete or MultiBinary.
        start, stop: its entries of the flat action.
    """

    name: str
    space: spaces.Space[Any]
    start: int
    stop: int

    @property
    def counts(self) -> list[int]:
        """How many categories each of its choices has; none of a Box."""
        return choices_of(self.space)


class StructuredActions(spaces.Box):
    """The flat form of actions of several parts, a Box [A] of float32 that knows their structure.

    Policies, rollouts, replays and datasets hold an action flat; the env receives what `structure`
    says. A Box's numbers lie there as they are; of a choice its category, counted from 0, which
    float32 holds exactly. What lies between two categories counts as the nearest.

    Args:
        structure: Box of floats, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them,
            to any depth.

    Attributes:
        structure: what the env receives.
        parts: in the order in which they lie, that of the structure's own keys.

    Raises:
        ConfigurationError: for a structure with a part of another kind, or with none.
    """

    def __init__(self, structure: spaces.Space[Any]) -> None:
        self.structure = structure
        self.parts: list[ActionPart] = []
        _lay_out(structure, "", self.parts)
        require(len(self.parts) > 0, f"The action space {structure} has no parts: nothing to do.")
        bounds = [_flat_bounds(part.space) for part in self.parts]
        low, high = (np.concatenate(side).astype(np.float32) for side in zip(*bounds, strict=True))
        super().__init__(low, high, dtype=np.float32)

    __hash__ = None  # type: ignore[assignment]  # as of any Box, which compares its bounds

    def flatten(self, action: Any) -> np.ndarray:
        """Return an action of the structure flat, float32 [A]."""
        flat = np.empty(self.shape, np.float32)
        leaves = _leaves(self.structure, action)
        for (_, space, start, stop), value in zip(self.parts, leaves, strict=True):
            flat[start:stop] = np.ravel(as_policy_counts(np.asarray(value), first_choice(space)))
        return flat

    def unflatten(self, flat: np.ndarray) -> Any:
        """Return flat actions [*batch, A] in the structure of the env, in dtypes of its spaces."""
        return self._build(lambda part: _array(part.space, flat[..., part.start : part.stop]))

    def tensors(self, flat: Tensor) -> Any:
        """Return flat actions [N, A] in the structure, with tensors [N, ...] as its parts.

        Categories are int64, counted as the space does.
        """

        def of_part(part: ActionPart) -> Tensor:
            # By `shape`: `len` would write a number of rows into a graph that is traced.
            value = flat[:, part.start : part.stop]
            value = value.reshape(flat.shape[0], *(part.space.shape or ()))
            if not part.counts:
                return value
            first = torch.as_tensor(first_choice(part.space).tolist(), device=flat.device)
            return value.round().long() + first

        return self._build(of_part)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> np.ndarray:
        """Return a flat action, drawn by the structure."""
        return self.flatten(self.structure.sample())

    def seed(self, seed: Any = None) -> Any:
        """Seed the draws of the structure."""
        return self.structure.seed(seed)

    def __eq__(self, other: object) -> bool:
        """Tell whether the other has the same structure."""
        return isinstance(other, StructuredActions) and self.structure == other.structure

    def __repr__(self) -> str:
        """Name the structure, which is what a message is about."""
        return f"StructuredActions({self.structure})"

    def _build(self, value_of: Callable[[ActionPart], Any]) -> Any:
        parts = iter(self.parts)

        def build(space: spaces.Space[Any]) -> Any:
            if isinstance(space, spaces.Dict):
                return {key: build(child) for key, child in space.items()}
            if isinstance(space, spaces.Tuple):
                return tuple(build(child) for child in space)
            return value_of(next(parts))

        return build(self.structure)


def flat_actions(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space in which actions are learnt: a structure's flat form, others as they are."""
    if isinstance(space, spaces.Dict | spaces.Tuple | spaces.MultiBinary):
        return StructuredActions(space)
    return space


def choices_of(space: spaces.Space[Any]) -> list[int]:
    """Return how many categories each choice of an action has, in order; none where all are Box."""
    if isinstance(space, StructuredActions):
        return [count for part in space.parts for count in part.counts]
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.flat]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    return []


def first_choice(space: spaces.Space[Any]) -> np.ndarray:
    """Return the number that the env gives to the first of its choices, [] or [*A]; 0 of others.

    Policies, rollouts and replays count choices from 0, also for such an env. `as_policy_counts`
    and `as_env_counts` are the only places that convert.
    """
    return np.asarray(getattr(space, "start", 0))


def as_policy_counts(action: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return actions [..., *A] with choices counted from 0, in the same dtype.

    Args:
        action: [..., *A], as the env counts.
        first: [] or [*A], of `first_choice`.
    """
    return (action - first).astype(action.dtype) if first.any() else action


def as_env_counts(action: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return actions [..., *A] with choices counted as the env counts, in the same dtype.

    Args:
        action: [..., *A], counted from 0.
        first: [] or [*A], of `first_choice`.
    """
    return (action + first).astype(action.dtype) if first.any() else action


def categories_of(space: spaces.Space[Any], action: Tensor) -> Tensor:
    """Return the categories [..., D] of the choices in actions [..., *A], in order, from 0."""
    if isinstance(space, StructuredActions):
        chosen = [action[..., part.start : part.stop] for part in space.parts if part.counts]
        return torch.cat(chosen, -1).round().long()
    return action.reshape(*action.shape[: action.dim() - len(space.shape or ())], -1)


class FlatAction(gymnasium.Wrapper):
    """An env that takes flat actions, and steps the env inside by their structure.

    `GymnasiumEnv` puts it around an env of structured actions by itself, after all of its
    `wrappers`. Name it among them where one that follows wants flat actions: an `Intervention`.

    Args:
        env: of a Dict, Tuple or MultiBinary action space; another is taken as it is.

    Raises:
        ConfigurationError: for a structure with a part of another kind.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_space = flat_actions(env.action_space)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step by a flat action [A]; what the env says it did instead comes back flat too."""
        space = self.action_space
        if not isinstance(space, StructuredActions) or space == self.env.action_space:
            return self.env.step(action)
        *result, info = self.env.step(space.unflatten(action))
        if "executed_action" in info:
            info = {**info, "executed_action": space.flatten(info["executed_action"])}
        return *result, info


def _lay_out(space: spaces.Space[Any], name: str, parts: list[ActionPart]) -> None:
    """Add the parts of a space to those that lie before it."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        for key, child in children:
            _lay_out(child, f"{name}.{key}" if name else str(key), parts)
        return
    counts = choices_of(space)
    continuous = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    if not (counts or continuous) or isinstance(space, StructuredActions):
        raise ConfigurationError(
            f"The action's part '{name or 'action'}' is {space}, which no policy can choose: its "
            "parts may be Box of floats, Discrete, MultiDiscrete and MultiBinary, or Dict and "
            "Tuple of them. Wrap the env so that it takes one of these "
            "(gymnasium.wrappers.TransformAction)."
        )
    require(
        max(counts, default=0) <= LARGEST_COUNT,
        f"The action's part '{name or 'action'}' has {max(counts, default=0):,} categories, more "
        f"than the {LARGEST_COUNT:,} that float32 can count: choose in two steps, by a "
        "MultiDiscrete.",
    )
    start = parts[-1].stop if parts else 0
    size = int(np.prod(space.shape or ()))
    parts.append(ActionPart(name or "action", space, start, start + size))


def _flat_bounds(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    counts = choices_of(space)
    if counts:
        return np.zeros(len(counts)), np.array(counts) - 1.0
    assert isinstance(space, spaces.Box)
    return space.low.ravel(), space.high.ravel()


def _leaves(space: spaces.Space[Any], action: Any) -> list[Any]:
    """Return the values of an action's parts, in the order of the space."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, child in space.items() for leaf in _leaves(child, action[key])]
    if isinstance(space, spaces.Tuple):
        pairs = zip(space, action, strict=True)
        return [leaf for child, one in pairs for leaf in _leaves(child, one)]
    return [action]


def _array(space: spaces.Space[Any], flat: np.ndarray) -> Any:
    """Return a part of flat actions [*batch, A] as its space has it."""
    shape = space.shape or ()
    shaped = flat.reshape((*flat.shape[:-1], *shape))
    if isinstance(space, spaces.Box):
        # In its own precision: a bound of float64 may lie within the float32 next to it.
        return shaped.astype(space.dtype).clip(space.low, space.high)
    most = np.array(choices_of(space)).reshape(shape) - 1
    category = as_env_counts(np.rint(shaped).clip(0, most), first_choice(space))
    return category.astype(space.dtype)[()]  # a number is one, and no array without dimensions
