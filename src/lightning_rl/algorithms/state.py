"""Save and take up what training needs beside weights and optimizer, some of it rank by rank."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rl import ranks
from lightning_rl.algorithms.update import NonFiniteGuard
from lightning_rl.checkpoint_format import DESCRIPTION_KEY, SPACES_KEY
from lightning_rl.policies import Policy, RewardNormalizer
from lightning_rl.policies.description import describe
from lightning_rl.policies.spaces import spaces_of

RankState = dict[str, Tensor | None]
"""What one rank has of its own: random streams, and the discounted return under way of its envs."""


class Stateful(Protocol):
    """What of an algorithm is saved here."""

    policy: Policy
    env_steps: int
    optimizer_steps: int
    guard: NonFiniteGuard
    generator: torch.Generator
    reward_normalizer: RewardNormalizer | None


def training_state(module: Stateful) -> dict[str, Any]:
    """Return counters, which are the same on all ranks, and what each rank has of its own.

    And what the weights do not tell of the policy, its spaces among it.
    """
    normalizer = module.reward_normalizer
    own: RankState = {
        "shuffle": module.generator.get_state(),
        "torch": torch.get_rng_state(),
        "carry": None if normalizer is None else normalizer.carry,
    }
    return {
        DESCRIPTION_KEY: describe(module.policy),
        SPACES_KEY: spaces_of(module.policy),
        "env_steps": module.env_steps,
        "optimizer_steps": module.optimizer_steps,
        "guard": module.guard.state_dict(),
        "ranks": ranks.gather_over_ranks(own),
    }


def load_counters(module: Stateful, saved: dict[str, Any]) -> list[RankState]:
    """Take up the counters; return the rest, which waits until training starts."""
    module.env_steps = saved["env_steps"]
    module.optimizer_steps = saved["optimizer_steps"]
    module.guard.load_state_dict(saved["guard"])
    states: list[RankState] = saved["ranks"]
    return states


def load_rank_state(module: Stateful, states: Sequence[RankState]) -> None:
    """Take up what was this rank's; begin anew where there were more ranks, or fewer."""
    normalizer = module.reward_normalizer
    if len(states) != ranks.world_size():
        rank_zero_warn(
            f"The checkpoint is one of {len(states)} processes, and this run has "
            f"{ranks.world_size()}: weights, optimizer, counters and normalisers go on, random "
            "streams and episodes begin anew."
        )
        if normalizer is not None:
            normalizer.carry = None
        return
    own = states[ranks.rank()]
    assert own["shuffle"] is not None
    assert own["torch"] is not None
    module.generator.set_state(own["shuffle"].cpu())
    torch.set_rng_state(own["torch"].cpu())
    if normalizer is not None:
        normalizer.carry = own["carry"]
