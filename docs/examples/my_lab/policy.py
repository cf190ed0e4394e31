"""A policy: a categorical distribution over discrete actions."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import Policy
from lightning_rl.extend.policies import noise_for


class Categorical(Policy):
    """Two networks of one hidden layer: logits of the actions, and the value."""

    def __init__(
        self,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Discrete,
        width: int = 64,
    ) -> None:
        super().__init__(observation_space, action_space)
        size, self.choices = observation_space.shape[0], int(action_space.n)
        self.actor = nn.Sequential(
            nn.Linear(size, width), nn.Tanh(), nn.Linear(width, self.choices)
        )
        self.critic = nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, 1))

    def draw_noise(self, batch: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Draw Gumbel noise [*batch, choices]: the largest sum with the logits is a sample."""
        exponential = torch.empty(*batch, self.choices, device=next(self.parameters()).device)
        return -exponential.exponential_(generator=generator).log()

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: Any = None
    ) -> TensorDict:
        log_probs = self.actor(td["observation"]).log_softmax(-1)
        noise = noise_for(self, td, deterministic, generator)
        action = (log_probs if noise is None else log_probs + noise).argmax(-1)
        log_prob = log_probs.gather(-1, action[:, None]).squeeze(-1)
        return td.update({"action": action, "sample_log_prob": log_prob})

    def get_value(self, td: TensorDict) -> TensorDict:
        return td.set("value", self.critic(td["observation"]).squeeze(-1))

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        log_probs = self.actor(td["observation"]).log_softmax(-1)
        log_prob = log_probs.gather(-1, td["action"][:, None]).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        value = self.critic(td["observation"]).squeeze(-1)
        fields = {"sample_log_prob": log_prob, "entropy": entropy, "value": value}
        return TensorDict(fields, td.batch_size)
