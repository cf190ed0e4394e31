"""Allocate the segments of a ring in one storage; copy rollouts, also for files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import torch
from tensordict import TensorDict

from lightning_rl.rollout.allocation import allocate_final_storage, allocate_rollout
from lightning_rl.rollout.contract import (
    FieldSpec,
    FinalObservations,
    clear_bootstrap_slot,
    copy_tree,
    final_storage,
    first_steps,
    map_tree,
    step_views,
    time_major,
)


@dataclass(frozen=True, eq=False)
class Segment:
    """T+1 slots of a ring: `rollout` [N, T+1], time-major in memory, and `steps`, views [N]."""

    index: int
    rollout: TensorDict
    steps: list[TensorDict]

    def sent(self, num_steps: int) -> dict[str, Any]:
        """Return the first steps and their bootstrap slot, for `receive` in another process."""
        clear_bootstrap_slot(self.steps[num_steps])
        rollout = first_steps(self.rollout, num_steps)
        # Time-major, as in memory, because non-contiguous arrays are copied twice.
        fields: dict[str, Any] = time_major(rollout.exclude("final_observation")).to_dict()
        return fields | {"final_observation": final_storage(rollout).in_use()}

    def receive(self, fields: dict[str, Any]) -> TensorDict:
        """Copy what `sent` has returned into the segment; return it as a view [N, T'+1].

        Raises:
            ValueError: if it does not fit.
        """
        finals = fields.pop("final_observation")
        fields = map_tree(lambda leaf: leaf.transpose(0, 1), fields)
        source = rollout_from(fields | {"final_observation": finals})
        check_fits(self, source)
        rollout = first_steps(self.rollout, source.batch_size[1] - 1)
        copy_rollout(rollout, source)
        return rollout


class Window(NamedTuple):
    """The first T' steps of a segment and their bootstrap slot."""

    segment: Segment
    num_steps: int
    notes: dict[str, Any]

    def rollout(self) -> TensorDict:
        """Return the window as a view [N, T'+1] in a new TensorDict."""
        return first_steps(self.segment.rollout, self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the window for a checkpoint."""
        return {"fields": rollout_state(self.rollout()), "notes": self.notes}


def saved_rollout(state: dict[str, Any]) -> TensorDict:
    """Return the rollout [N, T'+1] of a saved window."""
    return rollout_from(state["fields"])


def allocate_segments(
    count: int,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    num_envs: int,
    num_steps: int,
    *,
    extra_fields: Mapping[str, FieldSpec] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Segment, ...]:
    """Allocate `count` segments in one zeroed storage; see `allocate_rollout`."""
    slots = num_steps + 1
    # One allocation, of which the segments are slices.
    ring = allocate_rollout(
        observation_space,
        action_space,
        num_envs,
        count * slots - 1,  # allocate_rollout adds the bootstrap slot of the last segment
        extra_fields=extra_fields,
        device=device,
    )
    # Time-major in memory, so a range of slots is contiguous.
    rollouts = [ring[:, i * slots : (i + 1) * slots] for i in range(count)]
    for rollout in rollouts:
        allocate_final_storage(rollout, observation_space)  # slices share the ring's object
    return tuple(Segment(i, rollout, step_views(rollout)) for i, rollout in enumerate(rollouts))


def check_fits(segment: Segment, rollout: TensorDict) -> None:
    """Check that a rollout [N, S+1] fits into a segment [N, T+1], with S <= T.

    Raises:
        ValueError: naming the difference.
    """
    # Checked field by field: a copy between other shapes might broadcast silently.
    envs, slots = segment.rollout.batch_size
    if rollout.batch_size[0] != envs or rollout.batch_size[1] > slots:
        raise ValueError(
            f"{rollout.batch_size[0]} envs and {rollout.batch_size[1] - 1} steps do not fit into "
            f"segments of {envs} envs and {slots - 1} steps; num_envs and the steps per rollout "
            "must match the buffer."
        )
    expected, actual = _layout(segment.rollout), _layout(rollout)
    for key in expected | actual:  # a missing field and a surplus one
        if actual.get(key) != expected.get(key):
            raise ValueError(
                f"its field '{key}' is {actual.get(key, 'missing')}, the buffer's is "
                f"{expected.get(key, 'missing')}; allocate both for the same spaces and "
                "extra_fields."
            )


def _layout(data: TensorDict) -> dict[str, tuple[list[int], torch.dtype]]:
    fields = data.exclude("final_observation").flatten_keys(".").items()
    layout = {key: (list(value.shape[2:]), value.dtype) for key, value in fields}
    return layout | final_storage(data).layout()  # by leaf: the number of rows varies


def rollout_state(rollout: TensorDict) -> dict[str, Any]:
    """Return a copy of a rollout [N, T+1] as dicts of tensors, for a file without pickles."""
    # Without the object that the rollout holds, which a file without pickles cannot store.
    fields: dict[str, Any] = rollout.exclude("final_observation").clone().to_dict()
    device = rollout["final_index"].device
    # Only the rows in use: the allocated ones may be many times as many.
    finals = map_tree(lambda leaf: leaf.to(device, copy=True), final_storage(rollout).in_use())
    return fields | {"final_observation": finals}


def rollout_from(state: Mapping[str, Any]) -> TensorDict:
    """Return the rollout [N, T+1] of a `rollout_state`."""
    fields = {key: value for key, value in state.items() if key != "final_observation"}
    rollout = TensorDict(fields, fields["reward"].shape)
    rollout.set_non_tensor("final_observation", FinalObservations(state["final_observation"]))
    return rollout


def copy_rollout(target: TensorDict, source: TensorDict) -> None:
    """Copy a rollout [N, T+1] into the storage of another one [N, T+1] with the same fields."""
    copy_tree(target.exclude("final_observation"), source)
    storage, source_storage = final_storage(target), final_storage(source)
    storage.clear()
    # Both number their rows from 1, so the copied `final_index` stays right.
    storage.add(source_storage.count)
    copy_tree(storage.in_use(), source_storage.in_use())
