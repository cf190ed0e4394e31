"""Replay buffer: a ring of transitions, sampled uniformly.

The ring has one slot per step of the N envs and stores each observation once: the next observation
of a step is in the next slot. At the end of an episode or a stream, the next slot belongs to
something else, and the true next observation is stored aside. In flat columns, row `slot * N + env`
is one step of one env.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers.base import Replay
from lightning_rl.buffers.columns import (
    Column,
    Place,
    available_bytes,
    bytes_of,
    leaves_of_space,
    reserve,
)
from lightning_rl.buffers.replay_files import (
    CURE,
    Part,
    ReplayLog,
    parts_of,
    read_part,
    write_part,
)
from lightning_rl.rollout.contract import (
    INFO,
    FieldSpec,
    final_observations,
    tree_of_leaves,
    validate,
)
from lightning_rl.rollout.goals import GoalFunction
from lightning_rl.rollout.sequences import Sequences, with_sequences
from lightning_rl.system.errors import ConfigurationError, check_range, require

GATHER_BYTES = 2**22
"""Bytes gathered together for minibatches."""

PART_BYTES = 2**26
"""Maximum bytes of a file: the content is copied before it is saved."""

SMALL_PART_BYTES, MOST_PARTS = 2**18, 4096
"""A last file smaller than both limits is rewritten, together with the steps after it.

The limits are SMALL_PART_BYTES and a MOST_PARTS-th of the ring.
"""

ASIDE: Column = ("aside",)
"""Number of a step's next observation in the aside storage; -1 if it is in the next slot."""

ASIDE_CELLS: Column = ("aside", "cells")
"""In a file: the steps (slot * N + env) whose next observations are stored aside."""

FIRST_ASIDE = 64
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
"""Columns that only some rollouts have."""

STATE: Column = ("state",)
"""The policy's state before a step, if rollouts have it."""

DONE: Column = ("done",)
"""Stored with the state: whether an episode ended with the step."""

JOINS: Column = ("joins",)
"""Stored with the state: whether the step continues the previous slot's stream of episodes."""


_Specs = dict[Column, FieldSpec]


class ReplayBuffer(Replay):
    """A ring of the last transitions, sampled uniformly with replacement.

    Every step can be sampled, also the last one before the end of an episode, a reset, a dropped
    rollout or the end of the ring: it bootstraps from its true next observation.

    Args:
        observation_space, action_space, num_envs, device, seed, directory, goals: see `Replay`.
        capacity: maximum number of transitions, over all N envs of this process; new ones replace
            the oldest.
        storage: `cpu`, process memory, which grows as the replay fills; `device`, the learner's
            device; or `disk`, a temporary file in the run directory. Images stay uint8. A million
            transitions of HalfCheetah-v5 need 96 MiB, 100,000 images of 64×64×3 need 1.2 GiB.

    Raises:
        ConfigurationError: if a number is out of range, a space cannot be stored, or memory or disk
            do not suffice.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        directory: Path = Path(),
        goals: GoalFunction | None = None,
        capacity: int = 1_000_000,
        storage: Place = "cpu",
    ) -> None:
        check_range("data.replay.capacity", capacity, minimum=1)
        require(
            capacity >= num_envs,
            f"data.replay.capacity is {capacity}, and one step of the envs is {num_envs} "
            "transitions: set it to at least data.num_envs, and much larger than a minibatch.",
        )
        self.capacity = capacity
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._place: Place = storage
        # Samples are gathered where the ring is; only minibatches move to the learner.
        self._home = self.device if storage == "device" else torch.device("cpu")
        self._directory = directory
        self._observation = leaves_of_space("observation", observation_space)
        self._action = leaves_of_space("action", action_space)
        # Two envs; an episode of env 0 ends with step 1, the rollout of env 1 is cut after step 2:
        #
        #   slot     0      1      2      3     ...   S - 1    S
        #   env 0   o[0]   o[1] | p[0]   p[1]   ...          (spare)
        #   env 1   q[0]   q[1]   q[2] | r[0]   ...
        #   row     0, 1   2, 3   4, 5   6, 7           slot * N + env
        #
        # q[1] follows q[0] in the next slot. What follows o[1] and q[2] (at |) is stored aside, by
        # the number in column ASIDE. A slot is overwritten S + 1 steps later.
        self._slots = capacity // num_envs
        self._rows = (self._slots + 1) * num_envs  # one more slot for the last next observation
        self._row_bytes = bytes_of(self._specs())
        self._check_room()
        self._ring: dict[Column, Tensor] = {}  # [rows, ...]; allocated by the first rollout
        self._by_slot: dict[Column, Tensor] = {}  # the same, [slots + 1, N, ...]
        self._aside = _Aside(self._observation, num_envs, self._reserve)
        self._begin = 0  # first slot ever stored
        self._end = 0  # slot of the next step, counted from the start
        self._generator = torch.Generator(self._home).manual_seed(seed)
        self._offsets: Tensor | None = None  # rows that can be sampled, if there is padding
        self._last_break = 0  # last slot with a break of the stream in any env
        self._beginnings: dict[int, Tensor] = {}  # first rows of sequences, by length
        self._logs: dict[Path, ReplayLog] = {}

    def _specs(self, of_a_rollout: Mapping[Column, FieldSpec] | None = None) -> _Specs:
        added = PLAIN if of_a_rollout is None else of_a_rollout
        fixed: _Specs = {("terminated",): ((), torch.bool), ASIDE: ((), torch.int32)}
        return {**self._observation, **self._action, **fixed, **added}

    def _check_room(self) -> None:
        needed = self._rows * self._row_bytes
        free = available_bytes(self._place, self._home, self._directory)
        if free is None or needed <= free:
            return
        fits = max(0, free // self._row_bytes - self.num_envs)
        locations = {"cpu": "of memory", "device": f"on {self._home}", "disk": "on the disk"}
        other = "" if self._place == "disk" else ", or set data.replay.storage to disk"
        raise ConfigurationError(
            f"data.replay.capacity of {self.capacity:,} needs {needed:,} bytes "
            f"{locations[self._place]} ({self._row_bytes:,} for each transition), and {free:,} "
            f"are free. Lower data.replay.capacity, to {fits:,} at most{other}."
        )

    def _reserve(self, specs: _Specs, rows: int) -> dict[Column, Tensor]:
        try:
            return reserve(specs, rows, self._place, self._home, self._directory)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise ConfigurationError(
                f"data.replay.capacity of {self.capacity:,} needs {rows * bytes_of(specs):,} bytes "
                f"in one piece, and their allocation failed: {error}. Lower data.replay.capacity, "
                "or set data.replay.storage to another place."
            ) from error

    def _allocate(self, specs: _Specs) -> None:
        self._ring = self._reserve(specs, self._rows)
        sizes = (self._slots + 1, self.num_envs)
        self._by_slot = {name: column.unflatten(0, sizes) for name, column in self._ring.items()}
        if bytes_of(specs) > self._row_bytes:  # a state makes rows several times longer
            self._row_bytes = bytes_of(specs)
            self._check_room()

    @property
    def _oldest(self) -> int:
        return max(self._begin, self._end - self._slots)

    def __len__(self) -> int:
        offsets = self._drawable()
        return (self._end - self._oldest) * self.num_envs if offsets is None else len(offsets)

    # --- what comes in ---

    def extend(self, rollout: TensorDict) -> None:
        """Copy a rollout [N, T+1] into the ring, or only its last steps if it is longer.

        Raises:
            ConfigurationError: if a restored ring holds other entries of infos.
        """
        if not self._ring:
            validate(rollout)
            self._allocate(self._specs(_specs_of(rollout)))
        infos = {column for column in self._ring if column[0].startswith(INFO)}
        require(
            infos == _infos_of(rollout).keys(),
            f"The restored replay holds {', '.join(c for (c,) in sorted(infos)) or 'no entry'} of "
            "the infos, but data.extra_fields differs: resume with the same fields, or start with "
            "an empty replay: --restore_replay false.",
        )
        steps = rollout.batch_size[1] - 1
        num_skipped = max(0, steps - self._slots)  # these would be overwritten immediately
        first = self._end + num_skipped
        if num_skipped == 0:
            # Now, because slot 0 of the rollout overwrites the last step's next observation.
            self._end_streams(rollout)
        for column in self._ring:
            if column not in (ASIDE, JOINS):
                # The bootstrap slot, of which only observations matter, is copied too: excluding it
                # takes as long as the copy.
                values = _values(rollout, column).transpose(0, 1)
                self._write(column, values[num_skipped:] if num_skipped else values, first)
        for part, _, _ in self._places(ASIDE, first, steps - num_skipped):
            part.fill_(-1)  # the ring's previous steps may have had numbers
        if STATE in self._ring:
            self._join(rollout, first, steps - num_skipped)
        self._end += steps
        self._keep_ends(rollout, num_skipped, first)  # after `_end`, by which `put` drops old steps
        self._offsets = None
        self._beginnings.clear()

    def _write(self, name: Column, values: Tensor, first: int) -> None:
        places = self._places(name, first, len(values))
        for part, start, stop in places:
            part.copy_(values if len(places) == 1 else values[start:stop])

    def _places(self, name: Column, first: int, count: int) -> list[tuple[Tensor, int, int]]:
        """Return one or two parts of a column for a range of slots, with the range of each part."""
        column, start, slots = self._by_slot[name], first % (self._slots + 1), self._slots + 1
        if start + count <= slots:
            return [(column.narrow(0, start, count), 0, count)]
        room = slots - start
        return [(column[start:], 0, room), (column[: count - room], room, count)]

    def _end_streams(self, rollout: TensorDict) -> None:
        """Store the last steps' next observations in envs that the rollout does not continue."""
        if self._end == self._oldest:
            return
        continues = rollout.get("continues", None)
        if continues is not None:
            continues = continues[:, 0].to(self._home)
            if continues.all():
                return
        last_slot, next_slot = ((self._end + i) % (self._slots + 1) for i in (-1, 0))
        cut = self._by_slot[ASIDE][last_slot] < 0  # after the end of an episode it is aside already
        if continues is not None:
            cut &= ~continues
        if ("padding",) in self._ring:
            cut &= ~self._by_slot["padding",][last_slot]  # a padded step is never drawn
        envs = cut.nonzero().flatten()
        observations = {name: self._by_slot[name][next_slot, envs] for name in self._observation}
        self._keep_aside((self._end - 1) * self.num_envs + envs, observations)

    def _join(self, rollout: TensorDict, first: int, steps: int) -> None:
        """Write whether the slots from `first` on continue the stream."""
        for part, _, _ in self._places(JOINS, first, steps):
            part.fill_(True)
        joins = rollout.get("continues", rollout["done"] & False)[:, 0]
        self._by_slot[JOINS][first % (self._slots + 1)] = joins.to(self._home)
        if not joins.all():
            self._last_break = first

    def _keep_ends(self, rollout: TensorDict, num_skipped: int, first: int) -> None:
        """Store the next observations of steps that end an episode or precede padding."""
        done = rollout.get("done")
        if not done.any() and ("padding",) not in self._ring:
            return
        steps = rollout.batch_size[1] - 1
        ends = done = done[:, num_skipped:steps].transpose(0, 1)
        if ("padding",) in self._ring:
            padding = rollout.get("padding")[:, num_skipped:steps].transpose(0, 1)
            ends = ends.clone()
            # A sum of rewards must not run into padding, and a step with a number ends a sum.
            ends[:-1] |= padding[1:]
            ends &= ~padding
        slots, envs = ends.nonzero(as_tuple=True)  # ordered by slot, as `_Aside.between` requires
        indices, names = slots + num_skipped, self._observation
        is_done = done[slots, envs]
        if is_done.all():
            observations = _finals(rollout, envs, indices, names)
        else:  # the others precede padding: their next observation is in the next slot
            observations = {name: _at(rollout, name)[envs, indices + 1] for name in names}
            for name, final in _finals(rollout, envs[is_done], indices[is_done], names).items():
                observations[name][is_done] = final
        self._keep_aside((first + slots) * self.num_envs + envs, observations)

    def _keep_aside(self, cells: Tensor, observations: Mapping[Column, Tensor]) -> None:
        """Store the next observations of steps [M], given as slot * N + env and ordered by slot."""
        cells = cells.to(self._home)  # a rollout may be on another device
        observations = {name: leaf.to(self._home) for name, leaf in observations.items()}
        numbers = self._aside.put(cells, observations, self._oldest)
        self._ring[ASIDE][cells % self._rows] = numbers

    # --- minibatches ---

    def batches(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        self._check_drawing(n_steps)
        size = (count * batch_size,)
        indices = torch.randint(len(self), size, generator=self._generator, device=self._home)
        return self._minibatches(indices, batch_size, n_steps, gamma)

    def _minibatches(
        self, indices: Tensor, batch_size: int, n_steps: int, gamma: float
    ) -> Iterator[TensorDict]:
        end = self._end
        # Small minibatches are gathered together, because each call has a cost. Factor 2: a sample
        # has two observations, a row has one.
        together = max(1, GATHER_BYTES // (2 * self._row_bytes * batch_size))
        for group in _cut(indices, together * batch_size):
            fields = self._samples(group, n_steps, gamma)
            if self.device != self._home:
                fields = {name: field.to(self.device) for name, field in fields.items()}
            parts = [_cut(field, batch_size) for field in fields.values()]
            for values in zip(*parts, strict=True):
                yield _as_tensordict(dict(zip(fields, values, strict=True)), batch_size)
                self._check_undisturbed(end)

    def _check_drawing(self, n_steps: int) -> None:
        if len(self) == 0:
            raise RuntimeError("The replay is empty: nothing can be drawn. Call extend() first.")
        check_range("n_steps", n_steps, minimum=1)

    # Called when the caller wants the next minibatch, and may have extended the replay before.
    def _check_undisturbed(self, end: int) -> None:
        if self._end != end:
            raise RuntimeError(
                "The replay was extended while minibatches were drawn from it, which may have "
                "overwritten samples. Use all minibatches of batches() before the next extend()."
            )

    def _samples(self, indices: Tensor, n_steps: int, gamma: float) -> dict[Column, Tensor]:
        offsets = self._drawable()
        distances = indices if offsets is None else offsets[indices]
        return self._fields(self._row(distances), distances, n_steps, gamma)[0]

    def _row(self, distances: Tensor) -> Tensor:
        """Return the rows at these distances [M] from the oldest row."""
        return (distances + self._oldest * self.num_envs % self._rows).remainder_(self._rows)

    def _fields(
        self, rows: Tensor, distances: Tensor, n_steps: int, gamma: float
    ) -> tuple[dict[Column, Tensor], Tensor]:
        """Gather samples [M] from `rows` [M], at these `distances` [M] from the oldest row.

        Also return the row [M] of the last summed reward of each.
        """
        sums, discount, last = self._sums(rows, distances, n_steps, gamma)
        next_rows = (last + self.num_envs).remainder_(self._rows)
        numbers = self._ring[ASIDE].index_select(0, last)
        from_aside = (numbers >= 0).nonzero().flatten()
        fields: dict[Column, Tensor] = {}
        for name in self._observation:
            fields[name] = self._ring[name].index_select(0, rows)
        for name in self._action:
            fields[name] = self._ring[name].index_select(0, rows)
        fields |= sums
        for name in self._observation:
            values = self._ring[name].index_select(0, next_rows)
            # The next slot of these rows belongs to another episode.
            if len(from_aside):
                values[from_aside] = self._aside.get(name, numbers[from_aside])
            fields["next_observation", *name[1:]] = values
        fields["discount",] = discount
        for name in self._ring:
            if name == ("intervened",) or name[0].startswith(INFO):
                fields[name] = self._ring[name].index_select(0, rows)
        return fields, last

    # --- sequences ---

    def sequences(
        self,
        count: int,
        num_sequences: int,
        length: int,
        *,
        burn_in: int = 0,
        n_steps: int = 1,
        gamma: float = 0.99,
    ) -> Iterator[TensorDict]:
        self._check_drawing(n_steps)
        require(
            STATE in self._ring,
            "Sequences need a policy with a memory, but the rollouts in the replay have no state.",
        )
        beginnings = self._beginnings_of(length)
        # The last L - 1 slots are too near to the end of the ring.
        choices = max(0, self._end - self._oldest - length + 1) * self.num_envs
        choices = choices if beginnings is None else len(beginnings)
        if choices == 0:
            raise RuntimeError(
                f"The replay holds no {length} consecutive steps of one env: lower "
                "model.sequence_length, or raise data.replay.capacity."
            )
        size = (count, num_sequences)
        indices = torch.randint(choices, size, generator=self._generator, device=self._home)
        distances = indices if beginnings is None else beginnings[indices]
        return self._minibatches_of_sequences(distances, length, burn_in, n_steps, gamma)

    def _minibatches_of_sequences(
        self, beginnings: Tensor, length: int, burn_in: int, n_steps: int, gamma: float
    ) -> Iterator[TensorDict]:
        end = self._end
        for distances in beginnings.unbind(0):
            fields, last = self._samples_of_sequences(distances, length, n_steps, gamma)
            unrolled, first = self._steps(distances, burn_in, length + n_steps - 1)
            steps = _as_tensordict(unrolled, *first.shape[:1], unrolled["starts",].shape[1])
            # Stored with older weights; the burn-in steps bring it closer to the current ones.
            state = self._ring[STATE].index_select(0, first)
            sequences = Sequences(
                steps.to(self.device),
                state.to(self.device),
                burn_in,
                counted=None,
                ahead=n_steps - 1,
                last=last.to(self.device),
            )
            minibatch = _as_tensordict(fields, len(last)).to(self.device)
            yield with_sequences(minibatch, sequences)
            self._check_undisturbed(end)

    def _beginnings_of(self, length: int) -> Tensor | None:
        """Return the rows where unbroken sequences may begin, by distance from the oldest row.

        None for all rows. The end of an episode is no break: the next slot continues with a zero
        state.
        """
        if self._last_break <= self._oldest:  # a break at the oldest slot lies before it
            return None
        if length not in self._beginnings:
            slots = torch.arange(self._oldest, self._end, device=self._home) % (self._slots + 1)
            breaks = (~self._by_slot[JOINS][slots]).cumsum(0)
            # Of the slots t to t + L - 1, only the first may be a break.
            unbroken = breaks[length - 1 :] == breaks[: max(0, len(slots) - length + 1)]
            self._beginnings[length] = unbroken.flatten().nonzero().flatten()
        return self._beginnings[length]

    def _samples_of_sequences(
        self, distances: Tensor, length: int, n_steps: int, gamma: float
    ) -> tuple[dict[Column, Tensor], Tensor]:
        steps = torch.arange(length, device=self._home)
        step_distances = (distances[:, None] + steps * self.num_envs).flatten()
        rows = self._row(step_distances)
        fields, last = self._fields(rows, step_distances, n_steps, gamma)
        extra_steps = (last - rows).remainder_(self._rows) // self.num_envs
        unrolled = length + n_steps - 1
        first = torch.arange(len(distances), device=self._home)[:, None] * unrolled
        return fields, (first + steps).flatten() + extra_steps  # where each sum of rewards ends

    def _steps(
        self, distances: Tensor, burn_in: int, length: int
    ) -> tuple[dict[Column, Tensor], Tensor]:
        """Gather the steps [S, C + L, ...] to run a policy through, and their first rows [S].

        At the beginning of the ring or of a stream, copies of the first real step replace missing
        burn-in steps.
        """
        slots, envs = distances // self.num_envs, distances % self.num_envs
        stored_slots = self._end - self._oldest
        burn_in_slots = slots[:, None] - torch.arange(burn_in - 1, -1, -1, device=self._home)
        rows = self._row(burn_in_slots.clamp(min=0) * self.num_envs + envs[:, None])
        continues = self._ring[JOINS][rows] & (burn_in_slots > 0)  # from the previous slot
        # Cumulative from the sequence backwards: before a break, no step is real.
        real = continues.flip(1).cumprod(1).flip(1).bool()
        first = slots - real.sum(1)
        unrolled_slots = slots[:, None] + torch.arange(-burn_in, length, device=self._home)
        # Copies of the newest step stand for later ones; no sum reaches them.
        unrolled_slots = unrolled_slots.clamp(max=stored_slots - 1).maximum(first[:, None])
        rows = self._row(unrolled_slots * self.num_envs + envs[:, None])
        previous = (rows - self.num_envs).remainder_(self._rows)
        # The first step starts from its stored state, which is zero at the start of an episode.
        starts = self._ring[DONE][previous] & (unrolled_slots > first[:, None])
        fields: dict[Column, Tensor] = {name: self._ring[name][rows] for name in self._observation}
        fields["starts",] = starts
        if burn_in > 0:
            fields["real",] = torch.cat([real, real.new_ones(len(slots), length)], 1)
        return fields, rows[:, 0]

    def _sums(
        self, rows: Tensor, distances: Tensor, n_steps: int, gamma: float, goal: Any = None
    ) -> tuple[dict[Column, Tensor], Tensor, Tensor]:
        """Return discounted sums of up to n rewards [M] and penalties [M] from `rows` [M] on.

        Also return the discounts after them [M], and the last rows [M]. `goal`: see `_earned`.
        """
        stored_rows = (self._end - self._oldest) * self.num_envs
        sums, discount, terminated = self._earned(rows, gamma, goal)
        last = rows
        for step in range(1, n_steps):
            # A sum that has ended stays ended: its `last` row no longer changes.
            continues = ~terminated & (self._ring[ASIDE].index_select(0, last) < 0)
            continues &= distances + step * self.num_envs < stored_rows
            next_rows = (last + self.num_envs).remainder_(self._rows)
            last = torch.where(continues, next_rows, last)
            next_sums, factor, terminated = self._earned(last, gamma, goal)
            for name, total in sums.items():
                sums[name] = torch.where(continues, total + discount * next_sums[name], total)
            discount = torch.where(continues, discount * factor, discount)
        return sums, discount * ~terminated, last

    def _earned(
        self, rows: Tensor, gamma: float, goal: Any = None
    ) -> tuple[dict[Column, Tensor], Any, Tensor]:
        """Return rewards and penalties of steps [M], the discount after them, and whether they end.

        `goal` [M, ...]: for other goals than the steps' own (`HindsightReplay`).
        """
        ends = self._ring["terminated",].index_select(0, rows)
        if ("steps",) not in self._ring:
            names = [name for name in (("reward",), ("penalty",)) if name in self._ring]
            return {name: self._ring[name].index_select(0, rows) for name in names}, gamma, ends
        rewards = self._ring["step_reward",].index_select(0, rows)
        weights = gamma ** torch.arange(rewards.shape[-1], device=rewards.device)
        steps = self._ring["steps",].index_select(0, rows)
        return {("reward",): (rewards * weights).sum(-1)}, gamma**steps, ends

    def _drawable(self) -> Tensor | None:
        """Return the rows without padding, as distances from the oldest row; None for all rows."""
        if ("padding",) not in self._ring:
            return None
        if self._offsets is None:
            count = (self._end - self._oldest) * self.num_envs
            rows = torch.arange(count, device=self._home) + self._oldest * self.num_envs
            padding = self._ring["padding",][rows % self._rows]
            self._offsets = (~padding).nonzero().flatten()
        return self._offsets

    def earned(self) -> tuple[Tensor, Tensor]:
        """Return the stored rewards [M], env by env, and which ones end a fragment, [M] bool.

        See `streams` for the fragments.
        """
        if self._end == self._oldest:
            return torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        slots = torch.arange(self._oldest, self._end, device=self._home) % (self._slots + 1)
        names = ("reward", "terminated", "padding")
        fields = {n: self._by_slot[n,][slots].t() for n in names if (n,) in self._ring}
        ends = fields["terminated"] | (self._by_slot[ASIDE][slots].t() >= 0)
        ends[:, -1] = True  # the newest step: its continuation is not stored yet
        counted = ~fields["padding"] if "padding" in fields else torch.ones_like(ends)
        return fields["reward"][counted], ends[counted]

    def streams(self) -> Iterator[dict[str, Any]]:
        """Yield all stored steps, env by env, in fragments of L consecutive steps.

        A fragment has `observation` [L+1, ...], a tensor or nested dicts, including the true
        observation after the last step; and `action`, `reward`, `terminated` and, if rollouts have
        them, `intervened` and `penalty`, [L, ...].

        Raises:
            ConfigurationError: if actions are chunks.
        """
        require(
            ("steps",) not in self._ring,
            "The replay holds chunks of actions, but single actions were requested: collect "
            "without ActionChunk.",
        )
        names = [*self._action, ("reward",), ("terminated",), ("intervened",), ("penalty",)]
        slots = torch.arange(self._oldest, self._end, device=self._home) % (self._slots + 1)
        for env in range(self.num_envs if self._ring else 0):
            numbers = self._by_slot[ASIDE][slots, env]
            padding = self._by_slot.get(("padding",))
            counted = torch.ones_like(slots) if padding is None else ~padding[slots, env]
            first = 0
            for last in range(len(slots)):
                if not counted[last]:
                    first = last + 1
                elif numbers[last] >= 0 or last + 1 == len(slots):
                    steps = slots[first : last + 1]
                    fields = {n: self._by_slot[n][steps, env] for n in names if n in self._by_slot}
                    fields |= self._observations(steps, env, int(numbers[last]))
                    yield tree_of_leaves({name: field.cpu() for name, field in fields.items()})
                    first = last + 1

    def _observations(self, slots: Tensor, env: int, number: int) -> dict[Column, Tensor]:
        next_slot = (slots[-1:] + 1) % (self._slots + 1)
        observations = {}
        for name in self._observation:
            column = self._by_slot[name]
            next_observation = column[next_slot, env]
            if number >= 0:
                next_observation = self._aside.get(name, torch.tensor([number], device=self._home))
            observations[name] = torch.cat((column[slots, env], next_observation))
        return observations

    # --- checkpoints ---

    def state_dict(self, folder: Path) -> dict[str, Any]:
        next_slot = self._end % (self._slots + 1)
        observations = self._observation if self._ring else {}
        return {
            "num_envs": self.num_envs,
            "begin": self._oldest,
            "end": self._end,
            # The next observation of the newest step lies in a slot that no file holds.
            "following": {n: self._by_slot[n][next_slot].cpu().clone() for n in observations},
            "generator": self._generator.get_state(),
            "files": self._save(folder.absolute()),
        }

    def _save(self, folder: Path) -> list[str]:
        """Write the steps that no file in the folder holds; return the names of all its files."""
        log = self._logs.setdefault(folder, ReplayLog())
        log.forget_before(self._oldest, folder)
        if log.parts and log.parts[-1].last < self._end:
            # Otherwise each checkpoint of a slow run would leave one more small file.
            share = self._rows * self._row_bytes // MOST_PARTS
            if log.parts[-1].size < max(SMALL_PART_BYTES, share):
                log.reopen()
        first = max(log.end, self._oldest)
        slots = max(1, PART_BYTES // (self._row_bytes * self.num_envs))
        for start in range(first, self._end, slots):
            stop = min(start + slots, self._end)
            tensors = {n: self._read(n, start, stop) for n in self._ring if n != ASIDE}
            numbers = self._aside.between(log.aside_end, self._oldest, stop)
            tensors |= self._aside.saved(numbers)
            part = write_part(folder, start, stop, tensors)
            log.parts.append(part)
            log.aside_begin, log.aside_end = log.aside_end, numbers.stop
        return [part.name for part in log.parts]

    def _read(self, name: Column, first: int, stop: int) -> Tensor:
        parts = [part for part, _, _ in self._places(name, first, stop - first)]
        return torch.cat(parts).cpu()

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        require(
            "num_envs" in state,
            f"The checkpoint's replay is of another kind than data.replay. {CURE}",
        )
        require(
            state["num_envs"] == self.num_envs,
            f"The checkpoint's replay has {state['num_envs']} envs, but data.num_envs is "
            f"{self.num_envs}. Resume with --data.num_envs {state['num_envs']}, or start with an "
            "empty replay: --restore_replay false.",
        )
        self._restore_generator(state["generator"])
        parts = parts_of(state)
        begin, end = int(state["begin"]), int(state["end"])
        require(
            (parts[0].first <= begin and parts[-1].last == end) if parts else begin == end,
            f"The files that the checkpoint names do not hold its replay, slots {begin} to {end}. "
            f"{CURE}",
        )
        self._begin = self._end = max(begin, end - self._slots)  # a smaller ring: the newest steps
        log = self._logs[folder.absolute()] = ReplayLog()
        for part in parts:
            if part.last > self._begin:
                content = read_part(folder, part)
                self._take(part, content)
                size = sum(tensor.nbytes for tensor in content.values())
                # The next checkpoint in this folder lists the file again, and writes newer steps
                # only.
                log.parts.append(part._replace(size=size))
                log.aside_begin, log.aside_end = log.aside_end, self._aside.end
        self._find_last_break()
        if parts:
            following, next_slot = state["following"], end % (self._slots + 1)
            for name, (shape, dtype) in self._observation.items():
                self._check("the checkpoint", name, following, (self.num_envs, *shape), dtype)
                self._by_slot[name][next_slot].copy_(following[name])

    def _find_last_break(self) -> None:
        if STATE in self._ring:
            slots = torch.arange(self._oldest, self._end, device=self._home)
            joins = self._by_slot[JOINS][slots % (self._slots + 1)].all(1)
            breaks = slots[~joins]
            self._last_break = int(breaks[-1]) if len(breaks) else 0

    def _restore_generator(self, state: Tensor) -> None:
        try:
            self._generator.set_state(state.cpu())
        except RuntimeError:
            rank_zero_warn(
                "The checkpoint's replay sampled on another device than this replay, "
                f"{self._home}: its random stream starts fresh, and the resumed run will differ "
                "from an uninterrupted one."
            )

    def _take(self, part: Part, content: dict[Column, Tensor]) -> None:
        specs = self._specs(self._added_by(part, content))
        if not self._ring:
            self._allocate(specs)
        first = max(part.first, self._end)  # the first file may begin before the oldest step
        size = (part.last - part.first, self.num_envs)
        for name, (shape, dtype) in specs.items():
            if name != ASIDE:
                self._check(part.name, name, content, (*size, *shape), dtype)
                self._write(name, content[name][first - part.first :], first)
        for place, _, _ in self._places(ASIDE, first, part.last - first):
            place.fill_(-1)
        self._end = part.last
        cells = content.get(ASIDE_CELLS, torch.empty(0))
        self._check(part.name, ASIDE_CELLS, content, (len(cells),), torch.int64)
        slots = cells // self.num_envs
        # A damaged order would let `_Aside.between` drop the wrong observations.
        in_order = bool((slots[1:] >= slots[:-1]).all())
        in_range = bool(((slots >= part.first - 1) & (slots < part.last)).all())
        require(
            in_order and in_range,
            f"{part.name} holds next observations of steps that it lacks. {CURE}",
        )
        is_stored = slots >= self._begin
        observations: dict[Column, Tensor] = {}
        for name, (shape, dtype) in self._observation.items():
            self._check(part.name, (*ASIDE, *name), content, (len(cells), *shape), dtype)
            observations[name] = content[*ASIDE, *name][is_stored]
        self._keep_aside(cells[is_stored], observations)

    def _added_by(self, part: Part, content: Mapping[Column, Tensor]) -> _Specs:
        if ("steps",) not in content:
            added: _Specs = dict(PLAIN)
        else:
            rewards = content.get(("step_reward",), torch.empty(0, 0, 0))
            chunk = rewards.shape[-1]
            added = {("step_reward",): ((chunk,), torch.float32), ("steps",): ((), torch.int32)}
        if STATE in content:
            added |= _of_a_state(content[STATE])
        added |= _infos_of(content)
        return added | {name: spec for name, spec in OPTIONAL.items() if name in content}

    def _check(
        self,
        source: str,
        name: Column,
        content: Mapping[Column, Tensor],
        size: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        tensor = content.get(name)
        actual = "missing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
        require(
            tensor is not None and tensor.shape == size and tensor.dtype == dtype,
            f"The checkpoint's replay does not fit this run: {'.'.join(name)} in {source} is "
            f"{actual}, but the spaces of data.env require {dtype} of shape {list(size)}. {CURE}",
        )


_Reserve = Callable[[_Specs, int], dict[Column, Tensor]]


class _Aside:
    """Next observations that are in no slot, numbered in the order of their steps.

    They have a ring of their own, which doubles when it is full of observations still in use.
    """

    def __init__(self, specs: _Specs, num_envs: int, reserve: _Reserve) -> None:
        self._specs, self._num_envs, self._reserve = specs, num_envs, reserve
        self._room = 0
        self._columns: dict[Column, Tensor] = {}
        self._cells = torch.empty(0, dtype=torch.int64)  # on the CPU: the step of each
        self._begin = 0
        self.end = 0

    def put(self, cells: Tensor, observations: Mapping[Column, Tensor], oldest: int) -> Tensor:
        """Store the next observations of steps (`cells` [M]); return their stored numbers [M].

        Observations of steps before the slot `oldest` may be dropped.
        """
        count = len(cells)
        if self.end + count - self._begin > self._room:
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
        self._begin = self.between(self._begin, oldest, oldest).stop
        numbers = torch.arange(self._begin, self.end)
        room = max(FIRST_ASIDE, self._room)
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
        begin = max(begin, self._begin)
        numbers = torch.arange(begin, self.end)
        slots = self._cells[numbers % max(1, self._room)] // self._num_envs
        first, last = torch.searchsorted(slots, torch.tensor([oldest, stop])).tolist()
        return range(begin + first, begin + last)

    def saved(self, numbers: range) -> dict[Column, Tensor]:
        """Return the content of a file for these numbers, as copies on the CPU."""
        places = torch.arange(numbers.start, numbers.stop) % max(1, self._room)
        content = {ASIDE_CELLS: self._cells[places]}
        for name, (shape, dtype) in self._specs.items():
            column = self._columns.get(name, torch.empty(0, *shape, dtype=dtype))
            content[*ASIDE, *name] = column[places.to(column.device)].cpu()
        return content


def _specs_of(rollout: TensorDict) -> _Specs:
    if "executed" in rollout.keys():
        chunk = rollout["executed"].shape[-1]
        specs: _Specs = {("step_reward",): ((chunk,), torch.float32), ("steps",): ((), torch.int32)}
    else:
        specs = dict(PLAIN)
    if STATE[0] in rollout.keys():
        specs |= _of_a_state(rollout["state"])
    specs |= _infos_of(rollout)
    return specs | {name: spec for name, spec in OPTIONAL.items() if name[0] in rollout.keys()}


def _infos_of(fields: Any) -> _Specs:
    """Return the columns of the env's infos in a rollout [N, T+1], or in the content of a file."""
    names = {key if isinstance(key, tuple) else (key,): key for key in fields.keys()}
    infos = {n: fields[key] for n, key in names.items() if n[0].startswith(INFO)}
    return {name: (tuple(value.shape[2:]), value.dtype) for name, value in infos.items()}


def _of_a_state(state: Tensor) -> _Specs:
    flag: FieldSpec = ((), torch.bool)
    return {STATE: (tuple(state.shape[2:]), state.dtype), DONE: flag, JOINS: flag}


def _values(rollout: TensorDict, column: Column) -> Tensor:
    if column == ("steps",):
        return rollout.get("executed").sum(-1)  # type: ignore[no-any-return]  # a tensor
    if column == ("action",) and "executed_action" in rollout.keys():
        column = ("executed_action",)
    return _at(rollout, column)


def _cut(values: Tensor, size: int) -> Sequence[Tensor]:
    return (values,) if len(values) <= size else values.split(size)


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


def _as_tensordict(fields: Mapping[Column, Tensor], *size: int) -> TensorDict:
    return TensorDict(tree_of_leaves(fields), size)
