"""Draw sequences of consecutive steps from a ring, for policies with a memory."""

from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers.columns import Column
from lightning_rl.buffers.transition_ring import CONTINUES, DONE, STATE, TransitionRing
from lightning_rl.rollout.contract import tree_of_leaves
from lightning_rl.rollout.sequences import Sequences, with_sequences
from lightning_rl.system.errors import require

Gather = Callable[[Tensor, Tensor], tuple[TensorDict, Tensor]]
"""Returns the samples [M] at rows [M] and distances [M] from the oldest row, and where they end."""


class SequenceSampler:
    """Draws minibatches of sequences, see `Replay.sequences`.

    Args:
        ring: the stored transitions.
        generator: draws the starts; the replay saves it.
        device: the learner's device.
    """

    def __init__(
        self, ring: TransitionRing, generator: torch.Generator, device: torch.device
    ) -> None:
        self._ring, self._generator, self._device = ring, generator, device
        self._sequence_starts: dict[int, Tensor] = {}  # first rows of sequences, by length
        self._known_end = 0  # the ring's end for which these hold

    def draw(
        self,
        count: int,
        num_sequences: int,
        length: int,
        burn_in: int,
        n_steps: int,
        gather: Gather,
    ) -> Iterator[TensorDict]:
        """Draw minibatches; the arguments are those of `Replay.sequences`, but for `gather`.

        Raises:
            ConfigurationError: if the rollouts have no state.
            RuntimeError: if there is no sequence.
        """
        ring = self._ring
        require(
            STATE in ring.columns,
            "Sequences need a policy with a memory, but the rollouts in the replay have no state.",
        )
        starts = self._sequence_starts_of(length)
        # The last L - 1 slots are too near to the end of the ring.
        choices = max(0, ring.end - ring.oldest - length + 1) * ring.num_envs
        choices = choices if starts is None else len(starts)
        if choices == 0:
            raise RuntimeError(
                f"The replay holds no {length} consecutive steps of one env: lower "
                "model.sequence_length, or raise data.replay.capacity."
            )
        size = (count, num_sequences)
        indices = torch.randint(choices, size, generator=self._generator, device=ring.device)
        distances = indices if starts is None else starts[indices]
        return self._minibatches(distances, length, burn_in, n_steps, gather)

    def _minibatches(
        self, starts: Tensor, length: int, burn_in: int, n_steps: int, gather: Gather
    ) -> Iterator[TensorDict]:
        ring, unrolled = self._ring, length + n_steps - 1
        steps = torch.arange(length, device=ring.device)
        for distances in starts.unbind(0):
            step_distances = (distances[:, None] + steps * ring.num_envs).flatten()
            rows = ring.row(step_distances)
            minibatch, last = gather(rows, step_distances)
            extra_steps = (last - rows).remainder_(ring.rows) // ring.num_envs
            starts = torch.arange(len(distances), device=ring.device)[:, None] * unrolled
            fields, first = self._steps(distances, burn_in, unrolled)
            size = (len(first), fields["starts",].shape[1])
            # Stored with older weights; the burn-in steps bring it closer to the current ones.
            state = ring.columns[STATE].index_select(0, first)
            sequences = Sequences(
                TensorDict(tree_of_leaves(fields), size).to(self._device),
                state.to(self._device),
                burn_in,
                counted=None,
                ahead=n_steps - 1,
                # Where each sum of rewards ends.
                last=((starts + steps).flatten() + extra_steps).to(self._device),
            )
            yield with_sequences(minibatch.to(self._device), sequences)

    def _sequence_starts_of(self, length: int) -> Tensor | None:
        """Return the rows where unbroken sequences may begin, by distance from the oldest row.

        None for all rows. The end of an episode is no break: the next slot continues with a zero
        state.
        """
        if self._ring.last_break <= self._ring.oldest:  # a break at the oldest slot lies before it
            return None
        if self._known_end != self._ring.end:
            self._sequence_starts.clear()
            self._known_end = self._ring.end
        if length not in self._sequence_starts:
            slots = self._ring.stored_slots()
            breaks = (~self._ring.by_slot[CONTINUES][slots]).cumsum(0)
            # Of the slots t to t + L - 1, only the first may be a break.
            unbroken = breaks[length - 1 :] == breaks[: max(0, len(slots) - length + 1)]
            self._sequence_starts[length] = unbroken.flatten().nonzero().flatten()
        return self._sequence_starts[length]

    def _steps(
        self, distances: Tensor, burn_in: int, length: int
    ) -> tuple[dict[Column, Tensor], Tensor]:
        """Gather the steps [S, C + L, ...] to run a policy through, and their first rows [S].

        At the beginning of the ring or of a stream, copies of the first real step replace missing
        burn-in steps.
        """
        ring = self._ring
        slots, envs = distances // ring.num_envs, distances % ring.num_envs
        stored_slots = ring.end - ring.oldest
        burn_in_slots = slots[:, None] - torch.arange(burn_in - 1, -1, -1, device=ring.device)
        rows = ring.row(burn_in_slots.clamp(min=0) * ring.num_envs + envs[:, None])
        continues = ring.columns[CONTINUES][rows] & (burn_in_slots > 0)  # from the previous slot
        # Cumulative from the sequence backwards: before a break, no step is real.
        real = continues.flip(1).cumprod(1).flip(1).bool()
        first = slots - real.sum(1)
        unrolled_slots = slots[:, None] + torch.arange(-burn_in, length, device=ring.device)
        # Copies of the newest step stand for later ones; no sum reaches them.
        unrolled_slots = unrolled_slots.clamp(max=stored_slots - 1).maximum(first[:, None])
        rows = ring.row(unrolled_slots * ring.num_envs + envs[:, None])
        previous = (rows - ring.num_envs).remainder_(ring.rows)
        # The first step starts from its stored state, which is zero at the start of an episode.
        starts = ring.columns[DONE][previous] & (unrolled_slots > first[:, None])
        fields: dict[Column, Tensor] = {name: ring.columns[name][rows] for name in ring.observation}
        fields["starts",] = starts
        if burn_in > 0:
            fields["real",] = torch.cat([real, real.new_ones(len(slots), length)], 1)
        return fields, rows[:, 0]
