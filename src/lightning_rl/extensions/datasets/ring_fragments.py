"""Read the transitions of a replay in the order in which they were collected."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_rl import ReplayBuffer
from lightning_rl.extend.errors import require
from lightning_rl.extend.rollout import tree_of_leaves


def fragment_rewards(replay: ReplayBuffer) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stored rewards [M], env by env, and which ones end a fragment, [M] bool.

    The third are the terminations among them, [M] bool. See `fragments` for the fragments.
    """
    ring = replay.ring
    if ring.end == ring.oldest:
        none = torch.zeros(0, dtype=torch.bool)
        return torch.zeros(0), none, none
    slots = ring.stored_slots()
    names = ("reward", "terminated", "padding")
    fields = {n: ring.by_slot[n,][slots].t() for n in names if (n,) in ring.columns}
    ends = fields["terminated"] | ring.ends(slots).t()
    ends[:, -1] = True  # the newest step: its continuation is not stored yet
    counted = ~fields["padding"] if "padding" in fields else torch.ones_like(ends)
    return fields["reward"][counted], ends[counted], fields["terminated"][counted]


def fragments(replay: ReplayBuffer) -> Iterator[dict[str, Any]]:
    """Yield all stored steps, env by env, in fragments of L consecutive steps.

    A fragment has `observation` [L+1, ...], a tensor or nested dicts, including the true
    observation after the last step; and `action`, `reward`, `terminated` and, if rollouts have
    them, `intervened` and `penalty`, [L, ...].

    Raises:
        ConfigurationError: if actions are chunks.
    """
    ring = replay.ring
    require(
        ("steps",) not in ring.columns,
        "The replay holds chunks of actions, but single actions were requested: collect "
        "without ActionChunk.",
    )
    names = [*ring.action, ("reward",), ("terminated",), ("intervened",), ("penalty",)]
    slots = ring.stored_slots()
    for env in range(replay.num_envs if ring.columns else 0):
        ends = ring.ends(slots)[:, env]
        padding = ring.by_slot.get(("padding",))
        counted = torch.ones_like(slots) if padding is None else ~padding[slots, env]
        first = 0
        for last in range(len(slots)):
            if not counted[last]:
                first = last + 1
            elif ends[last] or last + 1 == len(slots):
                steps = slots[first : last + 1]
                fields = {n: ring.by_slot[n][steps, env] for n in names if n in ring.by_slot}
                fields |= _observations(replay, steps, env)
                yield tree_of_leaves({name: field.cpu() for name, field in fields.items()})
                first = last + 1


def _observations(replay: ReplayBuffer, slots: Tensor, env: int) -> dict[tuple[str, ...], Tensor]:
    ring = replay.ring
    last = ring.after(slots[-1:] * ring.num_envs + env, ring.observation)
    return {n: torch.cat((ring.by_slot[n][slots, env], value)) for n, value in last.items()}
