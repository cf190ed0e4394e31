"""Match numbers by their names: the joints of an arm in spaces, columns and settings."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl.system.errors import require

SHOWN = 8
"""Names of a space that messages show."""


class NamedBox(gymnasium.spaces.Box):
    """A Box with names for an axis, the last or the first; a Box without names may equal it."""

    def __init__(self, box: gymnasium.spaces.Box, names: Sequence[str], axis: int = -1) -> None:
        dtype: Any = box.dtype
        super().__init__(box.low, box.high, box.shape, dtype.type)
        self.names, self.axis = tuple(names), axis

    def __eq__(self, other: Any) -> bool:
        return super().__eq__(other) and names_of(other, self.axis) in ((), self.names)

    def __repr__(self) -> str:
        ellipsis = ", ..." if len(self.names) > SHOWN else ""
        return f"{super().__repr__()} of {', '.join(self.names[:SHOWN])}{ellipsis}"


def names_of(space: gymnasium.Space[Any] | None, axis: int = -1) -> tuple[str, ...]:
    """Return the names of a space's last axis (0: of the first, cameras); () without names."""
    return space.names if isinstance(space, NamedBox) and space.axis == axis else ()


def names_within(space: gymnasium.Space[Any], *path: str) -> dict[tuple[str, ...], Sequence[str]]:
    """Return the names of a space and of the spaces in a Dict, by their keys."""
    if not isinstance(space, gymnasium.spaces.Dict):
        return {path: names} if (names := names_of(space) or names_of(space, 0)) else {}
    parts = (names_within(part, *path, key) for key, part in space.items())
    return {key: names for part in parts for key, names in part.items()}


def names_in(entry: Any, size: int) -> tuple[str, ...]:
    """Return the names of `size` numbers in LeRobot's `names`; () if it has none.

    LeRobot writes a list, {"motors": list}, or {name: index}.
    """
    if isinstance(entry, Mapping):
        parts = list(entry.values())
        if all(isinstance(part, int) for part in parts):
            entry = sorted(entry, key=lambda name: entry[name])  # by index
        elif all(isinstance(part, list) for part in parts):
            entry = [name for part in parts for name in part]
    texts = isinstance(entry, list | tuple) and all(isinstance(name, str) for name in entry)
    return tuple(entry) if texts and len(set(entry)) == len(entry) == size else ()


def named(
    space: gymnasium.Space[Any], names: Iterable[str], axis: int = -1
) -> gymnasium.Space[Any]:
    """Return a Box with names, or the space unchanged if the axis has not one entry for each."""
    names = tuple(names)
    # A subclass of Box, such as StructuredActions, has its own meaning.
    if type(space) is not gymnasium.spaces.Box or not all(names):
        return space
    # Repeated names could not be matched.
    size = space.shape[axis] if space.shape else 0
    return NamedBox(space, names, axis) if len(set(names)) == len(names) == size else space


def by_name(setting: str, value: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return a setting {name: value} in the order of `names`, from one number or {name: value}.

    Raises:
        ConfigurationError: a name is missing or unknown, or the value is a list.
    """
    values = dict.fromkeys(names, value) if isinstance(value, int | float) else value
    require(
        isinstance(values, Mapping) and set(values) == set(names),
        f"{setting} is {value}, but goes by name: give {{name: value}} for each of "
        f"{', '.join(map(str, names)) or 'the (unknown) names'}, or one number.",
    )
    return {name: values[name] for name in names}


def order_of(
    recorded: Sequence[str], names: Sequence[str], column: str, place: str
) -> list[int] | None:
    """Return the index in a column of each of `names`; None if nothing has to be permuted.

    `recorded` are the names of the column; () if it has none. The message names the column and its
    place.

    Raises:
        ConfigurationError: the names differ.
    """
    if not recorded or not names or tuple(recorded) == tuple(names):
        return None
    lists = f"its {column} has {', '.join(recorded)}, and this env has {', '.join(names)}"
    require(
        set(recorded) == set(names),
        f"{place} has other names: {lists}. Use the env of the recording; if they name the same "
        "numbers, correct `names` in meta/info.json.",
    )
    rank_zero_warn(f"{place} has another order: {lists}. It is read in the order of the env.")
    return [list(recorded).index(name) for name in names]
