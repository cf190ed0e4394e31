"""Replay buffer: a ring of transitions, sampled uniformly."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers.base import Replay
from lightning_rl.buffers.columns import Column, Place
from lightning_rl.buffers.replay_sequences import SequenceSampler
from lightning_rl.buffers.ring_files import RingFiles
from lightning_rl.buffers.transition_ring import FINAL, OPTIONAL, TransitionRing, added_specs
from lightning_rl.rollout.contract import INFO, tree_of_leaves, validate
from lightning_rl.rollout.goals import GoalFunction
from lightning_rl.system.errors import check_range, require

GATHER_BYTES = 2**22
"""Bytes gathered together for minibatches."""


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
        ConfigurationError: if a setting is out of range, a space cannot be stored, or memory or
            disk do not suffice.
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
        allowed = get_args(Place)  # only the command line checks the type
        require(storage in allowed, f"data.replay.storage={storage!r} is none of {allowed}.")
        self.capacity = capacity
        self.num_envs = num_envs
        self.device = torch.device(device)
        spaces = observation_space, action_space
        self.ring = TransitionRing(*spaces, num_envs, capacity, storage, self.device, directory)
        # Samples are gathered where the ring is; only minibatches move to the learner.
        self._generator = torch.Generator(self.ring.device).manual_seed(seed)
        self._sequences = SequenceSampler(self.ring, self._generator, self.device)
        self._files = RingFiles(self.ring, self._generator)
        self._offsets: Tensor | None = None  # rows that can be sampled, if there is padding

    def __len__(self) -> int:
        offsets = self._drawable()
        stored_rows = (self.ring.end - self.ring.oldest) * self.num_envs
        return stored_rows if offsets is None else len(offsets)

    def extend(self, rollout: TensorDict) -> None:
        """Copy a rollout [N, T+1] into the ring, or only its last steps if it is longer.

        Raises:
            ConfigurationError: the rollout has not N rows, or a restored ring holds other fields.
        """
        require(
            len(rollout) == self.num_envs,
            f"The replay holds data.num_envs={self.num_envs} rows, a rollout has {len(rollout)}. "
            "A dataset is for IQL, AWAC, FQL or QC, or the demonstrations of a MixedReplay.",
        )
        if not self.ring.columns:
            validate(rollout)
        added = added_specs(rollout)
        columns = self.ring.added or added
        restored, collected = (
            ", ".join(sorted(f"{n[0]} {[*specs[n][0]]}" for n in specs.keys() - OPTIONAL.keys()))
            or "no further fields"
            for specs in (columns, added)
        )
        require(
            restored == collected,
            f"The steps of the restored replay hold {restored}, but this run collects {collected}. "
            "Resume with the same env, policy and data.extra_fields, or --restore_replay false.",
        )
        # Penalties, help and padding may begin or end with a resume.
        missing, done = columns.keys() - added.keys(), rollout["done"]
        zeros = {name: torch.zeros_like(done, dtype=columns[name][1]) for name in missing}
        self.ring.extend(rollout.copy().update(zeros) if zeros else rollout)
        self._offsets = None

    def batches(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        return self._drawn(count, batch_size, n_steps, gamma, False)

    def chunks(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        return self._drawn(count, batch_size, n_steps, gamma, True)

    def _drawn(
        self, count: int, batch_size: int, n_steps: int, gamma: float, chunks: bool
    ) -> Iterator[TensorDict]:
        self._check_drawing(n_steps)
        size = (count * batch_size,)
        indices = torch.randint(len(self), size, generator=self._generator, device=self.ring.device)
        return self._undisturbed(self._minibatches(indices, batch_size, n_steps, gamma, chunks))

    def _minibatches(
        self, indices: Tensor, batch_size: int, n_steps: int, gamma: float, chunks: bool
    ) -> Iterator[TensorDict]:
        ring = self.ring
        # Small minibatches are gathered together, because each call has a cost. Factor 2: a sample
        # has two observations, a row has one.
        together = max(1, GATHER_BYTES // (2 * ring.row_bytes * batch_size))
        for group in _cut(indices, together * batch_size):
            fields = self.samples(group, n_steps, gamma, chunks)
            if self.device != ring.device:
                fields = {name: field.to(self.device) for name, field in fields.items()}
            parts = [_cut(field, batch_size) for field in fields.values()]
            for values in zip(*parts, strict=True):
                yield _as_tensordict(dict(zip(fields, values, strict=True)), batch_size)

    def _check_drawing(self, n_steps: int) -> None:
        if len(self) == 0:
            raise RuntimeError("The replay is empty: nothing can be drawn. Call extend() first.")
        check_range("n_steps", n_steps, minimum=1)

    def _undisturbed(self, minibatches: Iterator[TensorDict]) -> Iterator[TensorDict]:
        end = self.ring.end
        for minibatch in minibatches:
            yield minibatch
            if self.ring.end != end:
                raise RuntimeError(
                    "The replay was extended while minibatches were drawn from it, which may have "
                    "overwritten samples. Use all minibatches of batches() before the next "
                    "extend()."
                )

    def samples(
        self, indices: Tensor, n_steps: int, gamma: float, chunks: bool = False
    ) -> dict[Column, Tensor]:
        """Gather samples [M], given as `indices` [M] of all that can be drawn."""
        offsets = self._drawable()
        distances = indices if offsets is None else offsets[indices]
        rows = self.ring.row(distances)
        fields, last = self._fields(rows, distances, n_steps, gamma)
        return fields | self.actions(rows, last, n_steps) if chunks else fields

    def actions(self, rows: Tensor, last: Tensor, n_steps: int) -> dict[Column, Tensor]:
        """Gather `action` [M, n, *A] and `executed` [M, n] of `rows` [M] to `last` [M]."""
        ring = self.ring
        steps = torch.arange(n_steps, device=ring.device)
        later = ((last - rows).remainder_(ring.rows) // self.num_envs)[:, None]
        places = (rows[:, None] + steps.minimum(later) * self.num_envs).remainder_(ring.rows)
        actions = {name: ring.columns[name][places] for name in ring.action}
        return {**actions, ("executed",): steps <= later}

    def _fields(
        self, rows: Tensor, distances: Tensor, n_steps: int, gamma: float
    ) -> tuple[dict[Column, Tensor], Tensor]:
        """Gather samples [M] from `rows` [M], at these `distances` [M] from the oldest row.

        Also return the row [M] of the last summed reward of each.
        """
        ring = self.ring
        sums, discount, last = self.sums(rows, distances, n_steps, gamma)
        fields: dict[Column, Tensor] = {}
        for name in (*ring.observation, *ring.action):
            fields[name] = ring.columns[name].index_select(0, rows)
        fields |= sums
        for name, values in ring.after(last, ring.observation).items():
            fields["next_observation", *name[1:]] = values
        fields["discount",] = discount
        for name in ring.columns:
            if name == ("intervened",) or name[0].startswith(INFO):
                fields[name] = ring.columns[name].index_select(0, rows)
        return fields, last

    def sums(
        self, rows: Tensor, distances: Tensor, n_steps: int, gamma: float, goal: Any = None
    ) -> tuple[dict[Column, Tensor], Tensor, Tensor]:
        """Return discounted sums of up to n rewards [M] and penalties [M] from `rows` [M] on.

        Also return the discounts after them [M], and the last rows [M]. `goal`: see `step_rewards`.
        """
        ring = self.ring
        stored_rows = (ring.end - ring.oldest) * self.num_envs
        sums, discount, terminated = self.step_rewards(rows, gamma, goal)
        last = rows
        for step in range(1, n_steps):
            # A sum that has ended stays ended: its `last` row no longer changes.
            continues = ~terminated & (ring.columns[FINAL].index_select(0, last) < 0)
            continues &= distances + step * self.num_envs < stored_rows
            next_rows = (last + self.num_envs).remainder_(ring.rows)
            last = torch.where(continues, next_rows, last)
            next_sums, factor, terminated = self.step_rewards(last, gamma, goal)
            for name, total in sums.items():
                sums[name] = torch.where(continues, total + discount * next_sums[name], total)
            discount = torch.where(continues, discount * factor, discount)
        return sums, discount * ~terminated, last

    def step_rewards(
        self, rows: Tensor, gamma: float, goal: Any = None
    ) -> tuple[dict[Column, Tensor], Any, Tensor]:
        """Return rewards and penalties of steps [M], the discount after them, and whether they end.

        `goal` [M, ...]: for other goals than the steps' own (`HindsightReplay`).
        """
        ring = self.ring
        ends = ring.columns["terminated",].index_select(0, rows)
        if ("steps",) not in ring.columns:
            names = [name for name in (("reward",), ("penalty",)) if name in ring.columns]
            return {name: ring.columns[name].index_select(0, rows) for name in names}, gamma, ends
        rewards = ring.columns["step_reward",].index_select(0, rows)
        weights = gamma ** torch.arange(rewards.shape[-1], device=rewards.device)
        steps = ring.columns["steps",].index_select(0, rows)
        return {("reward",): (rewards * weights).sum(-1)}, gamma**steps, ends

    def _drawable(self) -> Tensor | None:
        """Return the rows without padding, as distances from the oldest row; None for all rows."""
        ring = self.ring
        if ("padding",) not in ring.columns:
            return None
        if self._offsets is None:
            count = (ring.end - ring.oldest) * self.num_envs
            rows = torch.arange(count, device=ring.device) + ring.oldest * self.num_envs
            padding = ring.columns["padding",][rows % ring.rows]
            self._offsets = (~padding).nonzero().flatten()
        return self._offsets

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

        def gather(rows: Tensor, distances: Tensor) -> tuple[TensorDict, Tensor]:
            fields, last = self._fields(rows, distances, n_steps, gamma)
            return _as_tensordict(fields, len(rows)), last

        return self._undisturbed(
            self._sequences.draw(count, num_sequences, length, burn_in, n_steps, gather)
        )

    # --- checkpoints ---

    def state_dict(self, folder: Path) -> dict[str, Any]:
        return self._files.state_dict(folder)

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        self._files.load_state_dict(state, folder)


def _cut(values: Tensor, size: int) -> Sequence[Tensor]:
    return (values,) if len(values) <= size else values.split(size)


def _as_tensordict(fields: Mapping[Column, Tensor], *size: int) -> TensorDict:
    return TensorDict(tree_of_leaves(fields), size)
