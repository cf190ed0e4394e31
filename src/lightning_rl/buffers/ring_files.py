"""Save a ring of transitions in files next to the checkpoints, and restore it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.buffers.columns import Column
from lightning_rl.buffers.replay_files import CURE, Part, ReplayLog, parts_of, read_part, write_part
from lightning_rl.buffers.transition_ring import (
    CONTINUES,
    FINAL,
    FINAL_CELLS,
    STATE,
    TransitionRing,
    added_specs,
)
from lightning_rl.system.errors import require
from lightning_rl.system.streams import restore_generator

PART_BYTES = 2**26
"""Maximum bytes of a file: the content is copied before it is saved."""

SMALL_PART_BYTES, MOST_PARTS = 2**18, 4096
"""A last file smaller than both limits is rewritten, together with the steps after it.

The limits are SMALL_PART_BYTES and a MOST_PARTS-th of the ring.
"""


class RingFiles:
    """The files of a ring: each checkpoint writes the steps that no file of its folder holds.

    Args:
        ring: the stored transitions.
        generator: draws the samples; its state is saved, too.
    """

    def __init__(self, ring: TransitionRing, generator: torch.Generator) -> None:
        self._ring, self._generator = ring, generator
        self._logs: dict[Path, ReplayLog] = {}

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Write the files in `folder`; return their names, and what no file holds."""
        ring = self._ring
        next_slot = ring.end % (ring.slots + 1)
        observations = ring.observation if ring.columns else {}
        return {
            "num_envs": ring.num_envs,
            "begin": ring.oldest,
            "end": ring.end,
            # The next observation of the newest step lies in a slot that no file holds.
            "following": {n: ring.by_slot[n][next_slot].cpu().clone() for n in observations},
            "files": self._save(folder.absolute()),
            "generator": self._generator.get_state(),
        }

    def _save(self, folder: Path) -> list[str]:
        """Write the steps that no file in the folder holds; return the names of all its files."""
        ring = self._ring
        log = self._logs.setdefault(folder, ReplayLog())
        log.forget_before(ring.oldest, folder)
        if log.parts and log.parts[-1].last < ring.end:
            # Otherwise each checkpoint of a slow run would leave one more small file.
            share = ring.rows * ring.row_bytes // MOST_PARTS
            if log.parts[-1].size < max(SMALL_PART_BYTES, share):
                log.reopen()
        first = max(log.end, ring.oldest)
        slots = max(1, PART_BYTES // (ring.row_bytes * ring.num_envs))
        for start in range(first, ring.end, slots):
            stop = min(start + slots, ring.end)
            tensors = {n: self._read(n, start, stop) for n in ring.columns if n != FINAL}
            numbers = ring.final_observations.between(log.finals_end, ring.oldest, stop)
            tensors |= ring.final_observations.saved(numbers)
            part = write_part(folder, start, stop, tensors)
            log.parts.append(part)
            log.finals_begin, log.finals_end = log.finals_end, numbers.stop
        return [part.name for part in log.parts]

    def _read(self, name: Column, first: int, stop: int) -> Tensor:
        parts = [part for part, _, _ in self._ring.places(name, first, stop - first)]
        return torch.cat(parts).cpu()

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Restore what `state_dict` has returned into an empty ring.

        Raises:
            ConfigurationError: if the replay does not fit, or a file is missing or damaged.
        """
        ring = self._ring
        require(
            "num_envs" in state,
            f"The checkpoint's replay is of another kind than data.replay. {CURE}",
        )
        require(
            state["num_envs"] == ring.num_envs,
            f"The checkpoint's replay has {state['num_envs']} envs, but data.num_envs is "
            f"{ring.num_envs}. Resume with --data.num_envs {state['num_envs']}, or start with an "
            "empty replay: --restore_replay false.",
        )
        parts = parts_of(state)
        begin, end = int(state["begin"]), int(state["end"])
        require(
            (parts[0].first <= begin and parts[-1].last == end) if parts else begin == end,
            f"The files that the checkpoint names do not hold its replay, slots {begin} to {end}. "
            f"{CURE}",
        )
        # A smaller ring gets the newest steps.
        ring.first_slot = ring.end = max(begin, end - ring.slots)
        log = self._logs[folder.absolute()] = ReplayLog()
        for part in parts:
            if part.last > ring.first_slot:
                content = read_part(folder, part)
                self._restore_part(part, content)
                size = sum(tensor.nbytes for tensor in content.values())
                # The next checkpoint in this folder lists the file again, and writes newer steps
                # only.
                log.parts.append(part._replace(size=size))
                log.finals_begin, log.finals_end = log.finals_end, ring.final_observations.end
        self._find_last_break()
        restore_generator(self._generator, state["generator"], "minibatches of the replay")
        if parts:
            following, next_slot = state["following"], end % (ring.slots + 1)
            for name, (shape, dtype) in ring.observation.items():
                _check("the checkpoint", name, following, (ring.num_envs, *shape), dtype)
                ring.by_slot[name][next_slot].copy_(following[name])

    def _find_last_break(self) -> None:
        ring = self._ring
        if STATE in ring.columns:
            slots = torch.arange(ring.oldest, ring.end, device=ring.device)
            joins = ring.by_slot[CONTINUES][ring.stored_slots()].all(1)
            breaks = slots[~joins]
            ring.last_break = int(breaks[-1]) if len(breaks) else 0

    def _restore_part(self, part: Part, content: dict[Column, Tensor]) -> None:
        ring = self._ring
        added = added_specs(content)
        specs = ring.specs(added)
        ring.allocate(added)  # a later file may have further columns
        first = max(part.first, ring.end)  # the first file may begin before the oldest step
        size = (part.last - part.first, ring.num_envs)
        for name, (shape, dtype) in specs.items():
            if name != FINAL:
                _check(part.name, name, content, (*size, *shape), dtype)
                ring.write(name, content[name][first - part.first :], first)
        for place, _, _ in ring.places(FINAL, first, part.last - first):
            place.fill_(-1)
        ring.end = part.last
        cells = content.get(FINAL_CELLS, torch.empty(0))
        _check(part.name, FINAL_CELLS, content, (len(cells),), torch.int64)
        slots = cells // ring.num_envs
        # A damaged order would let `_FinalObservations.between` drop the wrong observations.
        in_order = bool((slots[1:] >= slots[:-1]).all())
        in_range = bool(((slots >= part.first - 1) & (slots < part.last)).all())
        require(
            in_order and in_range,
            f"{part.name} holds next observations of steps that it lacks. {CURE}",
        )
        is_stored = slots >= ring.first_slot
        observations: dict[Column, Tensor] = {}
        for name, (shape, dtype) in ring.observation.items():
            _check(part.name, (*FINAL, *name), content, (len(cells), *shape), dtype)
            observations[name] = content[*FINAL, *name][is_stored]
        ring.store_finals(cells[is_stored], observations)


def _check(
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
