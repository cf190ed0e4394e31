"""An encoder with a parameter and running statistics."""

import gymnasium
import torch
from torch import Tensor, nn

from lightning_rl import Encoder
from lightning_rl.extend import ranks


class Waves(Encoder):
    """Describe each number by sines and cosines of several frequencies, which are learnt."""

    largest: Tensor

    def __init__(self, observation_space: gymnasium.spaces.Box, frequencies: int = 4) -> None:
        super().__init__(observation_space)
        self.frequencies = nn.Parameter(2.0 ** torch.arange(frequencies) / 4)
        self.register_buffer("largest", torch.ones(observation_space.shape))
        self.size = observation_space.shape[0] * 2 * frequencies

    def update_normalization(self, observation: Tensor) -> None:
        # Of all processes, so that they keep the same statistics.
        largest = torch.stack(ranks.gather_over_ranks(observation.abs().amax(0))).amax(0)
        self.largest.copy_(torch.maximum(self.largest, largest))

    def forward(self, observation: Tensor) -> Tensor:
        angles = ((observation / self.largest).unsqueeze(-1) * self.frequencies).flatten(-2)
        return torch.cat([angles.sin(), angles.cos()], -1)
