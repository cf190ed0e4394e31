"""Sources of minibatches, and sequences of a rollout for a policy with a memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.policies import Policy
from lightning_rl.rollout.contract import flat_transitions
from lightning_rl.rollout.sequences import Sequences, with_sequences

SequenceLength = int | Literal["rollout"] | None
"""The setting `sequence_length`."""

SEQUENCE_LENGTH = 32
"""Default steps of truncated backpropagation through time."""


def steps_of(length: SequenceLength, num_steps: int) -> int:
    """Return the steps L of a sequence, for a rollout of T = `num_steps` steps."""
    if length == "rollout":
        return num_steps
    return min(SEQUENCE_LENGTH if length is None else length, num_steps)


def most_minibatches(
    policy: Policy, num_envs: int, num_steps: int, batch_size: int, length: SequenceLength
) -> int:
    """Return the number of minibatches of a pass over a rollout [N, T+1] without masked steps."""
    if not policy.evaluates_sequences:
        return -(-num_envs * num_steps // batch_size)
    steps = steps_of(length, num_steps)
    return -(-num_envs * -(-num_steps // steps) // max(1, batch_size // steps))


class Sampler(ABC):
    """A source of minibatches: units, each of one or several samples.

    Attributes:
        flat: [M], the transitions of this rank, with the fields of the samples.
        varies: whether ranks may have different numbers of units.
    """

    flat: TensorDict
    varies: bool

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of units."""

    @abstractmethod
    def units_per_minibatch(self, batch_size: int) -> int:
        """Return the number of units in a minibatch of `batch_size` samples, at least one."""

    @abstractmethod
    def samples(self, units: Tensor) -> Tensor:
        """Return the indices [M] of the samples in units [U], in order."""

    @abstractmethod
    def minibatches(
        self, parts: Sequence[Tensor], fields: Mapping[str, Tensor] | None = None
    ) -> Iterator[TensorDict]:
        """Yield a minibatch [M] for each group of units in `parts`, with the fields `drawn`."""


class SequenceSampler(Sampler):
    """A rollout cut into sequences of L steps, for a policy with a memory; each sequence is a unit.

    The T steps of an env become ceil(T / L) sequences. If L does not divide T, the last sequence
    overlaps the previous one, and shared steps count once.

    Args:
        rollout: [N, T+1], with `state`.
        keys: the fields of the samples.
        mask: [N, T], true for steps to train on; None for all. The policy runs through masked steps
            too.
        length: L; see `steps_of`.
        burn_in: C, steps before each sequence in which the policy recomputes its state from a
            stored state; fewer at the start of the rollout.
    """

    def __init__(
        self,
        rollout: TensorDict,
        keys: Sequence[str],
        mask: Tensor | None = None,
        length: SequenceLength = None,
        burn_in: int = 0,
    ) -> None:
        # Only the first step of a sequence needs the state.
        of_samples = [key for key in keys if key != "state"]
        self.flat, self.varies = flat_transitions(rollout, of_samples), mask is not None
        envs, slots = rollout.batch_size
        done: Tensor = rollout["done"][:, :-1]
        starts = torch.zeros_like(done)
        starts[:, 1:] = done[:, :-1]  # first step: the stored state is zero
        self._steps = flat_transitions(rollout, ["observation"])
        self._steps["starts"] = starts.t().flatten()
        self._state = flat_transitions(rollout, ["state"])["state"]
        self._length, self._burn_in = steps_of(length, slots - 1), burn_in
        steps, real, counted = self._cut_row(slots - 1, done.device)
        # From [K, ...] of one env to [K*N, ...] of all, as indices of time-major flat transitions.
        rows = torch.arange(envs, device=done.device).view(1, envs, 1)
        self._index = (steps[:, None] * envs + rows).flatten(0, 1)
        self._real = real.repeat_interleave(envs, 0)
        self._counted = counted.repeat_interleave(envs, 0)
        if mask is not None:
            self._counted &= mask.t().flatten()[self._index[:, burn_in:]]
            has_counted = self._counted.any(1)  # drop sequences without counted steps
            self._index, self._real = self._index[has_counted], self._real[has_counted]
            self._counted = self._counted[has_counted]
        self._all_count = bool(self._counted.all())

    def _cut_row(self, num_steps: int, device: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return each sequence's steps [K, C+L], and masks of burn-in and of counted steps."""
        length = self._length
        begins = torch.arange(0, num_steps, length, device=device)[:, None]
        first = begins.clamp(max=num_steps - length)
        steps = first + torch.arange(-self._burn_in, length, device=device)
        counted = steps[:, self._burn_in :] >= begins
        return steps.clamp(min=0), steps[:, : self._burn_in] >= 0, counted

    def __len__(self) -> int:
        return len(self._index)

    def units_per_minibatch(self, batch_size: int) -> int:
        return max(1, batch_size // self._length)

    def samples(self, units: Tensor) -> Tensor:
        index = self._index[units, self._burn_in :]
        return index.flatten() if self._all_count else index[self._counted[units]]

    def minibatches(
        self, parts: Sequence[Tensor], fields: Mapping[str, Tensor] | None = None
    ) -> Iterator[TensorDict]:
        done = 0
        for units in parts:
            minibatch = self.flat[self.samples(units)]
            for key, value in (fields or {}).items():
                minibatch[key] = value[done : done + len(minibatch)]
            done += len(minibatch)
            yield with_sequences(minibatch, self._sequences(units))

    def _sequences(self, units: Tensor) -> Sequences:
        index = self._index[units]
        steps = self._steps[index.flatten()].view(*index.shape)
        if self._burn_in > 0:
            real = self._real.new_ones(index.shape)
            real[:, : self._burn_in] = self._real[units]
            steps["real"] = real
        places = None
        if not self._all_count:
            places = self._counted[units].flatten().nonzero().squeeze(1)
        state = self._state.index_select(0, index[:, 0])
        return Sequences(steps, state, self._burn_in, places)
