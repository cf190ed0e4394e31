"""Hold the steps through which a recurrent policy comes to the samples of a minibatch.

A minibatch stays what it is without a memory: a TensorDict [M] of the samples that count. What
leads to them, steps that follow each other, lies beside them as `sequences`, one object, which only
`Policy.evaluate_actions` reads. A step that counts in no loss (one of a burn-in, one that somebody
took over, padding) is in the sequences, so that the state passes through it, and not among the
samples: no loss, average or KL can see it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor


class Sequences(NamedTuple):
    """The steps through which a recurrent policy comes to the samples [M] of a minibatch.

    Attributes:
        steps: [S, C + L + F], S sequences of C steps of burn-in, L of which samples are, and F that
            lead to what followed the samples: `observation`; `starts`, whether an episode begins
            with a step, before which the state is zero; and `real`, which is false of a step of
            burn-in that leaves the state as it is.
        state: [S, ...], before the first step of each.
        burn_in: C.
        counted: [M] int64, which of the S*L steps the samples are; None where all are, in order.
        ahead: F; of samples from a replay, as many as a target sums rewards over, less one.
        last: [M] int64, which of the S*(L+F) steps is the last that the reward of a sample is of,
            behind which its `next_observation` came; None where there is no such thing.
    """

    steps: TensorDict
    state: Tensor
    burn_in: int
    counted: Tensor | None
    ahead: int = 0
    last: Tensor | None = None

    @property
    def length(self) -> int:
        """L, the steps that gradients go through."""
        return int(self.steps.batch_size[1]) - self.burn_in - self.ahead

    def samples(self, outputs: Tensor) -> Tensor:
        """Return what was found at the samples, [M, ...], of what was found at the steps.

        Args:
            outputs: [S, L, ...].
        """
        flat = outputs.flatten(0, 1)
        return flat if self.counted is None else flat.index_select(0, self.counted)


def sequences_of(minibatch: TensorDict) -> Sequences | None:
    """Return the sequences of a minibatch [M]; None where it has none."""
    return minibatch["sequences"] if "sequences" in minibatch.keys() else None


def with_sequences(minibatch: TensorDict, sequences: Sequences) -> TensorDict:
    """Put sequences beside the samples [M] of a minibatch, and return it."""
    minibatch.set_non_tensor("sequences", sequences)
    return minibatch


def tensors_of(minibatch: TensorDict) -> list[Tensor]:
    """Return all tensors of a minibatch [M], those of its sequences included, for a graph."""
    tensors: list[Any] = list(minibatch.values(True, True))
    sequences = sequences_of(minibatch)
    if sequences is not None:
        tensors += [*sequences.steps.values(True, True), sequences.state]
        tensors += [one for one in (sequences.counted, sequences.last) if one is not None]
    return tensors


def with_tensors(minibatch: TensorDict, tensors: Sequence[Tensor]) -> TensorDict:
    """Return a minibatch [M] made like another, of the tensors that `tensors_of` would return."""
    given = iter(tensors)

    def like(data: TensorDict) -> TensorDict:
        keys = list(data.keys(include_nested=True, leaves_only=True))
        return TensorDict({key: next(given) for key in keys}, data.batch_size)

    rebuilt, sequences = like(minibatch), sequences_of(minibatch)
    if sequences is None:
        return rebuilt
    steps, state = like(sequences.steps), next(given)
    counted = None if sequences.counted is None else next(given)
    last = None if sequences.last is None else next(given)
    return with_sequences(
        rebuilt, sequences._replace(steps=steps, state=state, counted=counted, last=last)
    )


def split_sequences(minibatch: TensorDict, size: int) -> list[TensorDict]:
    """Split a minibatch [M] between sequences, into parts of about as many samples.

    Args:
        minibatch: [M], with sequences.
        size: most samples of a part, as far as one sequence has no more.
    """
    sequences = minibatch["sequences"]
    steps, state, _, counted, _, last = sequences
    together = max(1, size // sequences.length)
    cuts = range(0, len(steps), together)
    if counted is None:
        ends = [min(first + together, len(steps)) * sequences.length for first in cuts]
    else:
        borders = counted.new_tensor([(first + together) * sequences.length for first in cuts])
        ends = torch.searchsorted(counted, borders).tolist()
    parts, begin = [], 0
    samples = minibatch.exclude("sequences")
    for first, end in zip(cuts, ends, strict=True):
        own = slice(first, first + together)
        places = None if counted is None else counted[begin:end] - first * sequences.length
        unrolled = sequences.length + sequences.ahead
        behind = None if last is None else last[begin:end] - first * unrolled
        if end > begin:
            part = sequences._replace(
                steps=steps[own], state=state[own], counted=places, last=behind
            )
            parts.append(with_sequences(samples[begin:end], part))
        begin = end
    return parts
