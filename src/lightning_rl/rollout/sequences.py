"""The steps that a recurrent policy runs through to reach the samples of a minibatch.

A minibatch stays a TensorDict [M] of the samples that count. Its object `sequences`, which only
`Policy.evaluate_actions` reads, stores their consecutive steps. Steps that count in no loss
(burn-in, interventions, padding) are in the sequences, because the state passes through them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor


class Sequences(NamedTuple):
    """The steps that a recurrent policy runs through to reach the samples [M] of a minibatch.

    Attributes:
        steps: [S, C + L + F], S sequences of C burn-in steps, L steps with samples, and F steps
            after them. Fields: `observation`; `starts`, whether an episode begins with the step
            (its state is zero); `real`, false for a burn-in step that leaves the state unchanged.
        state: [S, ...], before the first step of each sequence.
        burn_in: C.
        counted: [M] int64, indices of the samples among the S*L steps; None for all, in order.
        ahead: F, for replay samples one less than the number of rewards in a target.
        last: [M] int64, index among the S*(L+F) steps of the last summed reward of a sample, before
            `next_observation`; None without summed rewards.
    """

    steps: TensorDict
    state: Tensor
    burn_in: int
    counted: Tensor | None
    ahead: int = 0
    last: Tensor | None = None

    @property
    def length(self) -> int:
        """L, the steps with gradients."""
        return int(self.steps.batch_size[1]) - self.burn_in - self.ahead

    def samples(self, outputs: Tensor) -> Tensor:
        """Select the outputs [M, ...] of the samples from the outputs [S, L, ...] of the steps."""
        flat = outputs.flatten(0, 1)
        return flat if self.counted is None else flat.index_select(0, self.counted)


def sequences_of(minibatch: TensorDict) -> Sequences | None:
    """Return the sequences of a minibatch [M], or None."""
    return minibatch["sequences"] if "sequences" in minibatch.keys() else None


def with_sequences(minibatch: TensorDict, sequences: Sequences) -> TensorDict:
    """Add sequences to a minibatch [M], and return it."""
    minibatch.set_non_tensor("sequences", sequences)
    return minibatch


def tensors_of(minibatch: TensorDict) -> list[Tensor]:
    """Return all tensors of a minibatch [M], including its sequences, for a CUDA graph."""
    tensors: list[Any] = list(minibatch.values(True, True))  # without `sequences`, no tensor
    sequences = sequences_of(minibatch)
    if sequences is not None:
        # The same order as in `with_tensors`.
        tensors += [*sequences.steps.values(True, True), sequences.state]
        tensors += [tensor for tensor in (sequences.counted, sequences.last) if tensor is not None]
    return tensors


def with_tensors(minibatch: TensorDict, tensors: Sequence[Tensor]) -> TensorDict:
    """Return a copy of a minibatch [M] with other tensors, ordered as in `tensors_of`."""
    source = iter(tensors)

    def like(data: TensorDict) -> TensorDict:
        keys = list(data.keys(include_nested=True, leaves_only=True))
        return TensorDict({key: next(source) for key in keys}, data.batch_size)

    rebuilt, sequences = like(minibatch), sequences_of(minibatch)
    if sequences is None:
        return rebuilt
    steps, state = like(sequences.steps), next(source)
    counted = None if sequences.counted is None else next(source)
    last = None if sequences.last is None else next(source)
    return with_sequences(
        rebuilt, sequences._replace(steps=steps, state=state, counted=counted, last=last)
    )


def split_sequences(minibatch: TensorDict, size: int) -> list[TensorDict]:
    """Split a minibatch [M] between sequences into parts of about `size` samples."""
    sequences = minibatch["sequences"]
    steps, state, _, counted, _, last = sequences
    together = max(1, size // sequences.length)  # sequences per part
    cuts = range(0, len(steps), together)
    if counted is None:
        ends = [min(first + together, len(steps)) * sequences.length for first in cuts]
    else:
        borders = counted.new_tensor([(first + together) * sequences.length for first in cuts])
        ends = torch.searchsorted(counted, borders).tolist()
    parts, begin = [], 0
    samples = minibatch.exclude("sequences")
    for first, end in zip(cuts, ends, strict=True):
        # Sequences stay whole; the indices of a part count from its own first step.
        rows = slice(first, first + together)
        indices = None if counted is None else counted[begin:end] - first * sequences.length
        unrolled = sequences.length + sequences.ahead
        last_indices = None if last is None else last[begin:end] - first * unrolled
        if end > begin:  # otherwise none of its steps counts
            part = sequences._replace(
                steps=steps[rows], state=state[rows], counted=indices, last=last_indices
            )
            parts.append(with_sequences(samples[begin:end], part))
        begin = end
    return parts
