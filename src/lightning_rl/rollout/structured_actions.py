"""Store actions of several parts as flat vectors, and restore the env's structure."""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.system.errors import ConfigurationError, require

LARGEST_COUNT = 2**24
"""Largest integer below which float32 represents all integers."""


class ActionPart(NamedTuple):
    """A part of an action, and its range `start` to `stop` in the flat action.

    `name` is the dotted path of keys, `space` a Box of floats or a space of choices.
    """

    name: str
    space: spaces.Space[Any]
    start: int
    stop: int

    @property
    def counts(self) -> list[int]:
        """Number of categories of each of its choices; empty for a Box."""
        return choices_of(self.space)


class StructuredActions(spaces.Box):
    """Flat form of actions of several parts: a Box [A] of float32 that knows their structure.

    Policies, rollouts, replays and datasets use flat actions; the env receives actions of
    `structure`. A Box is stored unchanged; a choice is stored as its category from 0, and other
    values are rounded to a category.

    Args:
        structure: Box of floats, Discrete, MultiDiscrete, MultiBinary, or a nested Dict or Tuple of
            them.

    Attributes:
        structure: the env's action space.
        parts: the parts, in the order of the structure's keys.
        exact_bounds: low and high [A], before they are rounded to float32.

    Raises:
        ConfigurationError: if the structure has no parts, or a part of another kind.
    """

    def __init__(self, structure: spaces.Space[Any]) -> None:
        self.structure = structure
        self.parts: list[ActionPart] = []
        _lay_out(structure, "", self.parts)
        require(len(self.parts) > 0, f"The action space {structure} has no parts.")
        bounds = [_flat_bounds(part.space) for part in self.parts]
        self.exact_bounds = [np.concatenate(side) for side in zip(*bounds, strict=True)]
        low, high = (side.astype(np.float32) for side in self.exact_bounds)
        super().__init__(low, high, dtype=np.float32)

    __hash__ = None  # type: ignore[assignment]  # like Box, which compares bounds

    def flatten(self, action: Any) -> np.ndarray:
        """Return the flat form, float32 [A], of an action of the structure."""
        flat = np.empty(self.shape, np.float32)
        leaves = _leaves(self.structure, action)
        for (_, space, start, stop), value in zip(self.parts, leaves, strict=True):
            flat[start:stop] = np.ravel(as_policy_counts(np.asarray(value), first_choice(space)))
        return flat

    def unflatten(self, flat: np.ndarray) -> Any:
        """Return flat actions [*batch, A] in the env's structure, with the dtypes of its spaces."""
        return self._build(lambda part: _array(part.space, flat[..., part.start : part.stop]))

    def tensors(self, flat: Tensor) -> Any:
        """Return flat actions [N, A] in the structure, as tensors [N, ...]; categories as int64."""

        def of_part(part: ActionPart) -> Tensor:
            # Use `shape`: `len` would fix the number of rows in a traced graph.
            value = flat[:, part.start : part.stop]
            value = value.reshape(flat.shape[0], *(part.space.shape or ()))
            if not part.counts:
                return value
            offset = torch.as_tensor(first_choice(part.space).tolist(), device=flat.device)
            return value.round().long() + offset

        return self._build(of_part)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> np.ndarray:
        return self.flatten(self.structure.sample())

    def seed(self, seed: Any = None) -> Any:
        return self.structure.seed(seed)

    def __eq__(self, other: object) -> bool:
        # Equal Dicts may differ in the order of their keys, but then flat actions differ, too.
        return (
            isinstance(other, StructuredActions)
            and self.structure == other.structure
            and self.parts == other.parts
        )

    def __repr__(self) -> str:
        return f"StructuredActions({self.structure})"

    def _build(self, value_of: Callable[[ActionPart], Any]) -> Any:
        # `build` visits the leaves in the order in which `_lay_out` has listed them.
        parts = iter(self.parts)

        def build(space: spaces.Space[Any]) -> Any:
            if isinstance(space, spaces.Dict):
                return {key: build(child) for key, child in space.items()}
            if isinstance(space, spaces.Tuple):
                return tuple(build(child) for child in space)
            return value_of(next(parts))

        return build(self.structure)


def flat_actions(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the flat form of a structured action space; other spaces unchanged."""
    # Policies know Box, Discrete and MultiDiscrete; MultiBinary becomes choices of two.
    if isinstance(space, spaces.Dict | spaces.Tuple | spaces.MultiBinary):
        return StructuredActions(space)
    return space


def choices_of(space: spaces.Space[Any]) -> list[int]:
    """Return the number of categories of each choice of an action, in order; empty for a Box."""
    if isinstance(space, StructuredActions):
        return [count for part in space.parts for count in part.counts]
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.flat]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))  # 0 and 1
    return []


def first_choice(space: spaces.Space[Any]) -> np.ndarray:
    """Return the env's number for the first category of its choices, [] or [*A]; 0 for a Box.

    Policies, rollouts and replays count from 0. Only `as_policy_counts`, `as_env_counts` and, for
    tensors, `as_env_action` convert.
    """
    return np.asarray(getattr(space, "start", 0))


def as_policy_counts(action: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Convert the env's choices to choices from 0; [..., *A], same dtype; `first` [] or [*A]."""
    return (action - first).astype(action.dtype) if first.any() else action


def as_env_counts(action: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Convert choices from 0 to the env's choices; [..., *A], same dtype; `first` [] or [*A]."""
    return (action + first).astype(action.dtype) if first.any() else action


def differs_in_env(space: spaces.Space[Any]) -> bool:
    """Return whether an env of a space takes other actions than policies give: `as_env_action`."""
    return isinstance(space, StructuredActions) or bool(first_choice(space).any())


def as_env_action(space: spaces.Space[Any], action: Tensor) -> Any:
    """Convert flat actions [N, *A], with choices from 0, to the env's: its parts, its choices."""
    if isinstance(space, StructuredActions):
        return space.tensors(action)
    return action + torch.as_tensor(first_choice(space).tolist(), device=action.device)


def categories_of(space: spaces.Space[Any], action: Tensor) -> Tensor:
    """Return the categories [..., D] of all choices in actions [..., *A], in order, from 0."""
    if isinstance(space, StructuredActions):
        columns = [action[..., part.start : part.stop] for part in space.parts if part.counts]
        return torch.cat(columns, -1).round().long()
    return action.reshape(*action.shape[: action.dim() - len(space.shape or ())], -1)


def with_categories(space: spaces.Space[Any], action: Tensor, categories: Tensor) -> Tensor:
    """Return actions [..., *A] with the categories [..., D] of all choices, in order, from 0."""
    if not isinstance(space, StructuredActions):
        return categories.view_as(action).to(action)
    columns = [i for part in space.parts if part.counts for i in range(part.start, part.stop)]
    place = torch.tensor(columns, device=action.device)  # `index_copy` is not in place
    return action.index_copy(-1, place, categories.to(action))


class FlatAction(gymnasium.Wrapper):
    """Wrap an env with structured actions, so that it takes flat actions.

    `GymnasiumEnv` adds this wrapper after its `wrappers`; list it there if a later wrapper, such as
    an `Intervention`, needs flat actions.

    Args:
        env: env with a Dict, Tuple or MultiBinary action space; other spaces are not changed.

    Raises:
        ConfigurationError: if the structure has a part of another kind.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_space = flat_actions(env.action_space)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        space = self.action_space
        # Nothing to split, or the env takes flat actions itself.
        if not isinstance(space, StructuredActions) or space == self.env.action_space:
            return self.env.step(action)
        *result, info = self.env.step(space.unflatten(action))
        if "executed_action" in info:
            # Rollouts store executed actions like those of the policy: flat.
            info = {**info, "executed_action": space.flatten(info["executed_action"])}
        return *result, info


def _lay_out(space: spaces.Space[Any], name: str, parts: list[ActionPart]) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        for key, child in children:
            _lay_out(child, f"{name}.{key}" if name else str(key), parts)
        return
    counts = choices_of(space)
    continuous = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    if not (counts or continuous) or isinstance(space, StructuredActions):
        raise ConfigurationError(
            f"The action's part '{name or 'action'}' is {space}, which is not supported: use Box "
            "of floats, Discrete, MultiDiscrete and MultiBinary, or Dict and Tuple of them. "
            "Convert the actions in a wrapper (gymnasium.wrappers.TransformAction)."
        )
    require(
        max(counts, default=0) <= LARGEST_COUNT,
        f"The action's part '{name or 'action'}' has {max(counts, default=0):,} categories, but "
        f"float32 represents only {LARGEST_COUNT:,}: split the choice into a MultiDiscrete.",
    )
    start = parts[-1].stop if parts else 0  # parts follow one another without gaps
    size = int(np.prod(space.shape or ()))
    parts.append(ActionPart(name or "action", space, start, start + size))


def _flat_bounds(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    counts = choices_of(space)
    if counts:
        return np.zeros(len(counts)), np.array(counts) - 1.0
    assert isinstance(space, spaces.Box)
    return space.low.ravel(), space.high.ravel()


def _leaves(space: spaces.Space[Any], action: Any) -> list[Any]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, child in space.items() for leaf in _leaves(child, action[key])]
    if isinstance(space, spaces.Tuple):
        pairs = zip(space, action, strict=True)
        return [leaf for child, part in pairs for leaf in _leaves(child, part)]
    return [action]


def _array(space: spaces.Space[Any], flat: np.ndarray) -> Any:
    shape = space.shape or ()
    shaped = flat.reshape((*flat.shape[:-1], *shape))
    if isinstance(space, spaces.Box):
        # Clip in the space's precision: float32 rounding may exceed a float64 bound.
        return shaped.astype(space.dtype).clip(space.low, space.high)
    last_category = np.array(choices_of(space)).reshape(shape) - 1
    category = as_env_counts(np.rint(shaped).clip(0, last_category), first_choice(space))
    return category.astype(space.dtype)[()]  # a number, not a 0-d array
