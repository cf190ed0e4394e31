"""An env: batched, in torch."""

from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import TorchEnv


class Reach(TorchEnv):
    """Move a point on a line to a goal."""

    start_size = 2

    def __init__(self, num_envs: int, max_episode_steps: int = 20, device: str = "cpu") -> None:
        observations = gymnasium.spaces.Box(-4, 4, (2,))
        actions = gymnasium.spaces.Box(-1, 1, (1,))
        super().__init__(num_envs, observations, actions, max_episode_steps, device)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        start = uniform * 4 - 2
        return TensorDict({"position": start[:, :1], "goal": start[:, 1:]}, [len(start)])

    def observe(self, state: TensorDict) -> Tensor:
        return torch.cat([state["position"], state["goal"]], -1)

    def transition(
        self, state: TensorDict, action: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        push = 0.05 * (self.uniform(1) - 0.5)
        position = (state["position"] + 0.2 * action.clamp(-1, 1) + push).clamp(-4, 4)
        distance = (position - state["goal"]).abs().squeeze(-1)
        success = distance < 0.1
        following = TensorDict({"position": position, "goal": state["goal"]}, state.batch_size)
        return following, -distance, success, {"success": success}
