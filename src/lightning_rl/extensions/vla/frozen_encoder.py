"""An encoder with the weights of a file, which are not trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gymnasium
import torch
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Encoder
from lightning_rl.extend.errors import require
from lightning_rl.extensions.vla.weight_files import compared, weights_at


class FrozenEncoder(Encoder):
    """An encoder with fixed weights from a local file, in eval mode; see `EncodedObservations`.

    Args:
        observation_space: observation space of one env.
        encoder: makes the encoder that gets the weights.
        weights: a state dict (`torch.save`, safetensors) or a checkpoint; no code in it runs.
        prefix: prefix of the names in the file, such as `policy.encoder.` in a checkpoint.

    Raises:
        ConfigurationError: if the file cannot be read, or has other weights.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        encoder: Callable[[gymnasium.Space[Any]], Encoder],
        weights: str | Path,
        prefix: str = "",
    ) -> None:
        super().__init__(observation_space)
        with torch.random.fork_rng(devices=[]):  # the random weights are replaced
            self.inner = encoder(observation_space)
        self.size = self.inner.size
        state = {
            name.removeprefix(prefix): value
            for name, value in weights_at(str(weights), "FrozenEncoder.weights").items()
            if name.startswith(prefix)
        }
        report = compared(self.inner.state_dict(), state)
        require(
            not any(report),
            f"FrozenEncoder: the weights of {weights} do not fit a {type(self.inner).__name__} "
            f"with these settings: {report}. Give `encoder` the settings of the trained encoder, "
            "and set `prefix` to the prefix of the names.",
        )
        self.inner.load_state_dict(state)
        self.inner.requires_grad_(False)
        self.inner.eval()
        rank_zero_info(
            f"{type(self.inner).__name__} is frozen, with the weights of {weights}: "
            f"{sum(p.numel() for p in self.inner.parameters()):,} parameters that are not trained."
        )

    def train(self, mode: bool = True) -> "FrozenEncoder":
        # Frozen weights stay in eval mode when the policy trains.
        return super().train(False)

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        with torch.no_grad():
            return cast(Tensor, self.inner(observation))
