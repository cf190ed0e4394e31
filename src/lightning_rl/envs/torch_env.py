"""Write a batched env in torch, on any device, by its three functions: start, observe, move."""

from abc import abstractmethod
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.vector_env import Observation, RestoreError, Seed, VectorEnv
from lightning_rl.errors import require


class TorchEnv(VectorEnv):
    """A batched env whose state is one TensorDict [N].

    Time limits, autoreset, seeds and saving are done here.

    Nothing in `step` waits for the device: finished envs are replaced by `torch.where`, and new
    starts are drawn for all N envs at every step, so the random stream does not depend on who
    finished.

    Args:
        num_envs: N.
        max_episode_steps: steps after which an episode is truncated.
        device: where the state lives.
    """

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        max_episode_steps: int,
        device: torch.device | str = "cpu",
    ) -> None:
        require(num_envs >= 1, f"num_envs must be at least 1, got {num_envs}.")
        require(
            max_episode_steps >= 1,
            f"max_episode_steps must be at least 1, got {max_episode_steps}.",
        )
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.max_episode_steps = max_episode_steps
        self.generator = torch.Generator(self.device)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.state = TensorDict({}, [num_envs], device=self.device)

    @abstractmethod
    def initial_state(self, count: int) -> TensorDict:
        """Draw `count` starts from `self.generator`: a TensorDict [count]."""

    @abstractmethod
    def observe(self, state: TensorDict) -> Observation:
        """Return the observation [N, ...] of a state [N]."""

    @abstractmethod
    def transition(
        self, state: TensorDict, action: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Move: return the next state [N], reward [N], terminated [N] bool, and info.

        Do not write into `state`.
        """

    def reset(
        self, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See `VectorEnv.reset`.

        A start depends on its env's seed alone; what follows draws from one generator.
        """
        if seed is None:
            self.state = self.initial_state(self.num_envs)
        else:
            seeds = (
                [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else list(seed)
            )
            require(
                len(seeds) == self.num_envs,
                f"Expected {self.num_envs} seeds, one per env, got {len(seeds)}.",
            )
            self.state = cast(TensorDict, torch.cat([self._seeded_start(s) for s in seeds]))
            # Apart from every start: seeded with one of them, the next reset would repeat it.
            onwards = np.random.SeedSequence([len(seeds), *seeds]).generate_state(1)[0]
            self.generator.manual_seed(int(onwards))
        self.elapsed.zero_()
        return self.observe(self.state), {}

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """See `VectorEnv.step`."""
        moved, reward, terminated, info = self.transition(self.state, action.to(self.device))
        self.elapsed += 1
        truncated = self.elapsed >= self.max_episode_steps
        done = terminated | truncated
        info["final_obs"] = self.observe(moved)
        self.state = _where(done, self.initial_state(self.num_envs), moved)
        self.elapsed = self.elapsed.masked_fill(done, 0)
        return self.observe(self.state), reward, terminated, truncated, info

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`."""
        return {
            "state": {key: value.clone() for key, value in self.state.items()},
            "elapsed": self.elapsed.clone(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """See `VectorEnv.load_state_dict`."""
        if len(state["elapsed"]) != self.num_envs:
            saved = len(state["elapsed"])
            raise RestoreError(f"the state was saved with {saved} envs, there are {self.num_envs}")
        self.state = TensorDict(state["state"], [self.num_envs], device=self.device).clone()
        self.elapsed = state["elapsed"].to(self.device, copy=True)
        self.generator.set_state(state["generator"].cpu())
        return self.observe(self.state)

    def _seeded_start(self, seed: int) -> TensorDict:
        self.generator.manual_seed(int(seed))
        return self.initial_state(1)


def _where(mask: Tensor, chosen: TensorDict, otherwise: TensorDict) -> TensorDict:
    """Take whole rows of one state or the other, by mask [N]."""

    def rows(key: str) -> Tensor:
        value = otherwise[key]
        return torch.where(mask.view(-1, *[1] * (value.dim() - 1)), chosen[key], value)

    return TensorDict(
        {key: rows(str(key)) for key in otherwise.keys()},
        otherwise.batch_size,
        device=otherwise.device,
    )
