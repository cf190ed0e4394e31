"""A ring of transitions: one slot per step of the N envs, each observation stored once.

The next observation of a step is in the next slot. At the end of an episode or a stream, the next
slot belongs to something else, and the true next observation is stored aside. In flat columns, row
`slot * N + env` is one step of one env.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers.columns import (
    Column,
    Place,
    available_bytes,
    bytes_of,
    leaves_of_space,
    reserve,
)
from lightning_rl.rollout.contract import INFO, FieldSpec, final_observations
from lightning_rl.system.errors import ConfigurationError

FINAL: Column = ("aside",)
"""Number of a step's next observation in the aside storage; -1 if it is in the next slot."""

FINAL_CELLS: Column = ("aside", "cells")
"""In a file: the steps (slot * N + env) whose next observations are stored aside."""

INITIAL_FINALS = 64
"""Initial capacity of the aside storage; a power of two, because it doubles."""

LARGEST_NUMBER = 2**31 - 1
"""Numbers of the aside storage wrap after this one; it is a multiple of any capacity, minus 1."""

PLAIN: dict[Column, FieldSpec] = {("reward",): ((), torch.float32)}
"""Columns in addition to the spaces' columns, if actions are not chunks."""

OPTIONAL: dict[Column, FieldSpec] = {
    ("intervened",): ((), torch.bool),
    ("penalty",): ((), torch.float32),
    ("padding",): ((), torch.bool),
}
"""Columns that only some rollouts have; zero for the others."""

STATE: Column = ("state",)
"""The policy's state before a step, if rollouts have it."""

DONE: Column = ("done",)
"""Stored with the state: whether an episode ended with the step."""

CONTINUES: Column = ("joins",)
"""Stored with the state: whether the step continues the previous slot's stream of episodes."""

Specs = dict[Column, FieldSpec]
"""Shape of one step of one env, and dtype, of each column."""


class TransitionRing:
    """The storage of a `ReplayBuffer`.

    Args:
        observation_space, action_space, num_envs, directory: see `Replay`.
        capacity: maximum number of transitions, over all N envs.
        place: where the columns are stored.
        device: the learner's device.

    Attributes:
        columns: [rows, ...] by name, allocated by the first rollout that has them.
        by_slot: the same columns, [slots + 1, N, ...].
        added: shapes and dtypes of the columns that the rollouts have added.
        final_observations: next observations that are in no slot.
        observation, action: shapes and dtypes of the columns of the spaces.
        first_slot: first slot ever stored, counted from the start of the run.
        end: slot of the next step.
        last_break: last slot with a break of the stream in any env.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        capacity: int,
        place: Place,
        device: torch.device,
        directory: Path,
    ) -> None:
        self.num_envs, self._capacity = num_envs, capacity
        self._place, self._directory = place, directory
        self.device = device if place == "device" else torch.device("cpu")
        self.observation = leaves_of_space("observation", observation_space)
        self.action = leaves_of_space("action", action_space)
        # Two envs; an episode of env 0 ends with step 1, the rollout of env 1 is cut after step 2:
        #
        #   slot     0      1      2      3     ...   S - 1    S
        #   env 0   o[0]   o[1] | p[0]   p[1]   ...          (spare)
        #   env 1   q[0]   q[1]   q[2] | r[0]   ...
        #   row     0, 1   2, 3   4, 5   6, 7           slot * N + env
        #
        # q[1] follows q[0] in the next slot. What follows o[1] and q[2] (at |) is stored aside, by
        # the number in column FINAL. A slot is overwritten S + 1 steps later.
        self.slots = capacity // num_envs
        self.rows = (self.slots + 1) * num_envs  # one more slot for the last next observation
        self.row_bytes = bytes_of(self.specs(PLAIN))
        self._check_room()
        self.added: Specs = {}
        self.columns: dict[Column, Tensor] = {}
        self.by_slot: dict[Column, Tensor] = {}
        self.final_observations = _FinalObservations(self.observation, num_envs, self._reserve)
        self.first_slot = self.end = self.last_break = 0

    def specs(self, added: Specs) -> Specs:
        """Return the columns of the spaces, and those `added` by the rollouts."""
        fixed: Specs = {("terminated",): ((), torch.bool), FINAL: ((), torch.int32)}
        return {**self.observation, **self.action, **fixed, **added}

    def _check_room(self) -> None:
        needed = self.rows * self.row_bytes
        free = available_bytes(self._place, self.device, self._directory)
        if free is None or needed <= free:
            return
        fits = max(0, free // self.row_bytes - self.num_envs)
        locations = {"cpu": "of memory", "device": f"on {self.device}", "disk": "on the disk"}
        other = "" if self._place == "disk" else ", or set data.replay.storage to disk"
        raise ConfigurationError(
            f"data.replay.capacity of {self._capacity:,} needs {needed:,} bytes "
            f"{locations[self._place]} ({self.row_bytes:,} for each transition), and {free:,} "
            f"are free. Lower data.replay.capacity, to {fits:,} at most{other}."
        )

    def _reserve(self, specs: Specs, rows: int) -> dict[Column, Tensor]:
        try:
            return reserve(specs, rows, self._place, self.device, self._directory)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise ConfigurationError(
                f"data.replay.capacity of {self._capacity:,} needs {rows * bytes_of(specs):,} "
                f"bytes in one piece, and their allocation failed: {error}. Lower "
                "data.replay.capacity, or set data.replay.storage to another place."
            ) from error

    def allocate(self, added: Specs) -> None:
        """Allocate the columns that are not there yet, with those that the rollouts have added."""
        specs = self.specs(added)
        missing = {name: spec for name, spec in specs.items() if name not in self.columns}
        if not missing:
            return
        self.added = self.added | added
        self.columns |= self._reserve(missing, self.rows)
        sizes = (self.slots + 1, self.num_envs)
        self.by_slot = {name: column.unflatten(0, sizes) for name, column in self.columns.items()}
        if bytes_of(specs) > self.row_bytes:  # a state makes rows several times longer
            self.row_bytes = bytes_of(specs)
            self._check_room()

    @property
    def oldest(self) -> int:
        """The first slot that is still stored."""
        return max(self.first_slot, self.end - self.slots)

    def stored_slots(self) -> Tensor:
        """Return the places [S] of the stored slots in `by_slot`, the oldest first."""
        return torch.arange(self.oldest, self.end, device=self.device) % (self.slots + 1)

    def row(self, distances: Tensor) -> Tensor:
        """Return the rows at these distances [M] from the oldest row."""
        return (distances + self.oldest * self.num_envs % self.rows).remainder_(self.rows)

    def after(self, rows: Tensor, names: Iterable[Column]) -> dict[Column, Tensor]:
        """Return the observations [M, ...] after the steps in `rows` [M], by column."""
        next_rows = (rows + self.num_envs).remainder_(self.rows)
        numbers = self.columns[FINAL].index_select(0, rows)
        from_aside = (numbers >= 0).nonzero().flatten()
        observations = {name: self.columns[name].index_select(0, next_rows) for name in names}
        if len(from_aside):  # the next slot of these rows belongs to another episode
            for name, values in observations.items():
                values[from_aside] = self.final_observations.get(name, numbers[from_aside])
        return observations

    def ends(self, slots: Tensor) -> Tensor:
        """Return where the next slot does not continue, [S, N] bool, of slots [S] in `by_slot`."""
        return self.by_slot[FINAL][slots] >= 0

    def extend(self, rollout: TensorDict) -> None:
        """Copy a rollout [N, T+1], or only its last steps if it is longer than the ring."""
        self.allocate(added_specs(rollout))
        steps = rollout.batch_size[1] - 1
        num_skipped = max(0, steps - self.slots)  # these would be overwritten immediately
        first = self.end + num_skipped
        if num_skipped == 0:
            # Now, because slot 0 of the rollout overwrites the last step's next observation.
            self._store_cuts(rollout)
        for column in self.columns:
            if column not in (FINAL, CONTINUES):
                # The bootstrap slot, of which only observations matter, is copied too: excluding it
                # takes as long as the copy.
                values = _values(rollout, column).transpose(0, 1)
                self.write(column, values[num_skipped:] if num_skipped else values, first)
        for part, _, _ in self.places(FINAL, first, steps - num_skipped):
            part.fill_(-1)  # the ring's previous steps may have had numbers
        if STATE in self.columns:
            self._write_continues(rollout, first, steps - num_skipped)
        self.end += steps
        self._store_ends(rollout, num_skipped, first)  # after `end`, by which `put` drops old steps

    def write(self, name: Column, values: Tensor, first: int) -> None:
        """Write values [T, N, ...] of a column into the slots from `first` on."""
        places = self.places(name, first, len(values))
        for part, start, stop in places:
            part.copy_(values if len(places) == 1 else values[start:stop])

    def places(self, name: Column, first: int, count: int) -> list[tuple[Tensor, int, int]]:
        """Return one or two parts of a column for a range of slots, with the range of each part."""
        column, start, slots = self.by_slot[name], first % (self.slots + 1), self.slots + 1
        if start + count <= slots:
            return [(column.narrow(0, start, count), 0, count)]
        room = slots - start
        return [(column[start:], 0, room), (column[: count - room], room, count)]

    def _store_cuts(self, rollout: TensorDict) -> None:
        """Store the last steps' next observations in envs that the rollout does not continue."""
        if self.end == self.oldest:
            return
        continues = rollout.get("continues", None)
        if continues is not None:
            continues = continues[:, 0].to(self.device)
            if continues.all():
                return
        last_slot, next_slot = ((self.end + i) % (self.slots + 1) for i in (-1, 0))
        cut = self.by_slot[FINAL][last_slot] < 0  # after the end of an episode it is aside already
        if continues is not None:
            cut &= ~continues
        if ("padding",) in self.columns:
            cut &= ~self.by_slot["padding",][last_slot]  # a padded step is never drawn
        envs = cut.nonzero().flatten()
        observations = {name: self.by_slot[name][next_slot, envs] for name in self.observation}
        self.store_finals((self.end - 1) * self.num_envs + envs, observations)

    def _write_continues(self, rollout: TensorDict, first: int, steps: int) -> None:
        """Write whether the slots from `first` on continue the stream."""
        for part, _, _ in self.places(CONTINUES, first, steps):
            part.fill_(True)
        joins = rollout.get("continues", rollout["done"] & False)[:, 0]
        self.by_slot[CONTINUES][first % (self.slots + 1)] = joins.to(self.device)
        if not joins.all():
            self.last_break = first

    def _store_ends(self, rollout: TensorDict, num_skipped: int, first: int) -> None:
        """Store the next observations of steps that end an episode or precede padding."""
        done = rollout.get("done")
        if not done.any() and ("padding",) not in self.columns:
            return
        steps = rollout.batch_size[1] - 1
        ends = done = done[:, num_skipped:steps].transpose(0, 1)
        if ("padding",) in self.columns:
            padding = rollout.get("padding")[:, num_skipped:steps].transpose(0, 1)
            ends = ends.clone()
            # A sum of rewards must not run into padding, and a step with a number ends a sum.
            ends[:-1] |= padding[1:]
            ends &= ~padding
        # Ordered by slot, as `_FinalObservations.between` requires.
        slots, envs = ends.nonzero(as_tuple=True)
        indices, names = slots + num_skipped, self.observation
        is_done = done[slots, envs]
        if is_done.all():
            observations = _finals(rollout, envs, indices, names)
        else:  # the others precede padding: their next observation is in the next slot
            observations = {name: _at(rollout, name)[envs, indices + 1] for name in names}
            for name, final in _finals(rollout, envs[is_done], indices[is_done], names).items():
                observations[name][is_done] = final
        self.store_finals((first + slots) * self.num_envs + envs, observations)

    def store_finals(self, cells: Tensor, observations: Mapping[Column, Tensor]) -> None:
        """Store the next observations of steps [M], given as slot * N + env and ordered by slot."""
        cells = cells.to(self.device)  # a rollout may be on another device
        observations = {name: leaf.to(self.device) for name, leaf in observations.items()}
        numbers = self.final_observations.put(cells, observations, self.oldest)
        self.columns[FINAL][cells % self.rows] = numbers


_Reserve = Callable[[Specs, int], dict[Column, Tensor]]


class _FinalObservations:
    """Next observations that are in no slot, numbered in the order of their steps.

    They have a ring of their own, which doubles when it is full of observations still in use.
    """

    def __init__(self, specs: Specs, num_envs: int, reserve: _Reserve) -> None:
        self._specs, self._num_envs, self._reserve = specs, num_envs, reserve
        self._room = 0
        self._columns: dict[Column, Tensor] = {}
        self._cells = torch.empty(0, dtype=torch.int64)  # on the CPU: the step of each
        self._first = 0
        self.end = 0

    def put(self, cells: Tensor, observations: Mapping[Column, Tensor], oldest: int) -> Tensor:
        """Store the next observations of steps (`cells` [M]); return their stored numbers [M].

        Observations of steps before the slot `oldest` may be dropped.
        """
        count = len(cells)
        if self.end + count - self._first > self._room:
            self._make_room(count, oldest)
        numbers = torch.arange(self.end, self.end + count)
        places = numbers % max(1, self._room)
        self._cells[places] = cells.cpu()
        for name, column in self._columns.items():
            column[places.to(column.device)] = observations[name]
        self.end += count
        return (numbers & LARGEST_NUMBER).to(cells.device, torch.int32)

    def get(self, name: Column, numbers: Tensor) -> Tensor:
        """Return the observations [M, ...] with these stored numbers."""
        # The room is a power of two: a number that has wrapped still finds its place.
        return self._columns[name].index_select(0, numbers & (self._room - 1))

    def _make_room(self, count: int, oldest: int) -> None:
        """Drop observations of steps no longer stored; double the ring if that frees too little."""
        self._first = self.between(self._first, oldest, oldest).stop
        numbers = torch.arange(self._first, self.end)
        room = max(INITIAL_FINALS, self._room)
        # Fill at most three quarters, so that the next rollouts find room without another search.
        while 3 * room < 4 * (len(numbers) + count):
            room *= 2
        if room == self._room:
            return
        columns, cells = self._reserve(self._specs, room), torch.empty(room, dtype=torch.int64)
        if self._room:
            # A number's place depends on the room.
            cells[numbers % room] = self._cells[numbers % self._room]
            for name, column in columns.items():
                places = numbers.to(column.device)
                column[places % room] = self._columns[name][places % self._room]
        self._columns, self._cells, self._room = columns, cells, room

    def between(self, begin: int, oldest: int, stop: int) -> range:
        """Return the numbers, from `begin` on, for steps in the slots `oldest` to `stop` - 1."""
        begin = max(begin, self._first)
        slots = self._cells_of(range(begin, self.end)) // self._num_envs
        first, last = torch.searchsorted(slots, torch.tensor([oldest, stop])).tolist()
        return range(begin + first, begin + last)

    def cells(self, oldest: int) -> Tensor:
        """Return the steps [M] (slot * N + env) from slot `oldest` on, ordered by slot."""
        cells = self._cells_of(range(self._first, self.end))
        return cells[cells // self._num_envs >= oldest]

    def _cells_of(self, numbers: range) -> Tensor:
        return self._cells[torch.arange(numbers.start, numbers.stop) % max(1, self._room)]

    def saved(self, numbers: range) -> dict[Column, Tensor]:
        """Return the content of a file for these numbers, as copies on the CPU."""
        places = torch.arange(numbers.start, numbers.stop) % max(1, self._room)
        content = {FINAL_CELLS: self._cells_of(numbers)}
        for name, (shape, dtype) in self._specs.items():
            column = self._columns.get(name, torch.empty(0, *shape, dtype=dtype))
            content[*FINAL, *name] = column[places.to(column.device)].cpu()
        return content


def added_specs(fields: Any) -> Specs:
    """Return the columns besides the spaces' of a rollout [N, T+1], or of the content of a file."""
    values = {key if isinstance(key, tuple) else (key,): fields[key] for key in fields.keys()}
    rewards, state = values.get(("step_reward",)), values.get(STATE)
    specs = dict(PLAIN)
    if rewards is not None:  # of chunks
        chunk = rewards.shape[-1]
        specs = {("step_reward",): ((chunk,), torch.float32), ("steps",): ((), torch.int32)}
    if state is not None:
        specs |= dict.fromkeys((DONE, CONTINUES), ((), torch.bool))
        specs[STATE] = (tuple(state.shape[2:]), state.dtype)
    infos = {name: value for name, value in values.items() if name[0].startswith(INFO)}
    specs |= {name: (tuple(value.shape[2:]), value.dtype) for name, value in infos.items()}
    return specs | {name: spec for name, spec in OPTIONAL.items() if name in values}


def _values(rollout: TensorDict, column: Column) -> Tensor:
    if column == ("steps",):
        return rollout.get("executed").sum(-1)  # type: ignore[no-any-return]  # a tensor
    if column == ("action",) and "executed_action" in rollout.keys():
        column = ("executed_action",)
    return _at(rollout, column)


def _at(fields: Any, name: Column) -> Tensor:
    value = fields
    for key in name:
        value = value.get(key)
    return value  # type: ignore[no-any-return]  # a leaf


def _finals(
    rollout: TensorDict, envs: Tensor, steps: Tensor, names: Mapping[Column, Any]
) -> dict[Column, Tensor]:
    finals = {"observation": final_observations(rollout, envs, steps)}
    return {name: _at(finals, name) for name in names}
