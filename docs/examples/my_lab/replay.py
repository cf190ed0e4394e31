"""A replay: a ring of single transitions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict

from lightning_rl import Replay
from lightning_rl.extend.rollout import flat_transitions, next_observations

FIELDS = ("observation", "action", "reward", "terminated")


class Ring(Replay):
    """Keep the newest transitions, and sample them uniformly; see `Replay` for the arguments."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str,
        seed: int,
        capacity: int = 1_000,
        **places: Any,
    ) -> None:
        self.capacity, self.count = capacity, 0
        self.generator = torch.Generator(device).manual_seed(seed)
        self.storage: TensorDict | None = None  # made of the first rollout

    def __len__(self) -> int:
        return min(self.count, self.capacity)

    def extend(self, rollout: TensorDict) -> None:
        fresh = flat_transitions(rollout, FIELDS)
        fresh["next"] = next_observations(rollout).transpose(0, 1).flatten(0, 1)
        if self.storage is None:
            self.storage = fresh.new_zeros(torch.Size([self.capacity]))
        slots = torch.arange(self.count, self.count + len(fresh)) % self.capacity
        self.storage[slots] = fresh
        self.count += len(fresh)

    def batches(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        assert self.storage is not None
        for slots in torch.randint(len(self), (count, batch_size), generator=self.generator):
            batch = self.storage[slots]
            batch["discount"] = gamma * (1 - batch.pop("terminated").float())
            yield batch.rename_key_("next", "next_observation")

    def state_dict(self, folder: Path) -> dict[str, Any]:
        state = {"count": self.count, "generator": self.generator.get_state()}
        return state | ({} if self.storage is None else {"storage": self.storage.to_dict()})

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        self.count = state["count"]
        self.generator.set_state(state["generator"])
        self.storage = TensorDict(state["storage"], [self.capacity])
