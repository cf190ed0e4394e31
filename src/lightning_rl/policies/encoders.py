"""Turn observations into features: what the heads of a policy read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.policies.normalization import ObservationNormalizer
from lightning_rl.policies.perceptron import (
    ACTIVATIONS,
    flat_observation_size,
    flatten_observation,
    mlp,
)


class Encoder(nn.Module, ABC):
    """Makes features of observations; a policy trains it with the heads that read them.

    The first argument of a subclass's constructor is `observation_space`, of one env; the policy
    fills it in. Name the class in the config: `encoder: {class_path: my_module.MyEncoder}`.

    Args:
        observation_space: of one env.

    Attributes:
        size: D, how many features an observation has.
    """

    size: int

    def __init__(self, observation_space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.observation_space = observation_space

    @abstractmethod
    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        """Return the features [*batch, D] of observations [*batch, ...], of any number of dims."""

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        """Move the running statistics of the inputs, if there are any, by observations [M, ...]."""


EncoderFactory = Callable[[gymnasium.Space[Any]], Encoder]
"""Makes an encoder for the space of an observation.

In YAML `{class_path: NatureCNN, init_args: {size: 256}}`.
"""


class PerceptronEncoder(Encoder):
    """Read numbers: flat, normalised where wanted, through the hidden layers of a perceptron.

    Args:
        observation_space: Box (flat or matrix), MultiBinary, or a Dict of them.
        hidden_sizes: units of its layers; none for the numbers themselves.
        activation: after each layer: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalize: scale the numbers by their running mean and variance, clipped to ±10.

    Raises:
        ConfigurationError: for an unknown activation, or a space that a perceptron cannot take.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (),
        activation: str = "relu",
        normalize: bool = False,
    ) -> None:
        super().__init__(observation_space)
        size = flat_observation_size(observation_space)
        self.normalizer = ObservationNormalizer(size) if normalize else None
        self.layers = nn.Sequential()
        if len(hidden_sizes) > 0:
            *hidden, last = hidden_sizes
            self.layers = mlp(size, hidden, last, activation=activation, output_gain=2**0.5)
            self.layers.append(ACTIVATIONS[activation]())
        self.size = hidden_sizes[-1] if len(hidden_sizes) > 0 else size

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        flat = flatten_observation(observation, _batch_dims(observation, self.observation_space))
        if self.normalizer is not None:
            flat = self.normalizer(flat)
        return self.layers(flat)  # type: ignore[no-any-return]  # nn.Module

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        if self.normalizer is not None:
            self.normalizer.update(flatten_observation(observation))


def _batch_dims(observation: Tensor | TensorDict, space: gymnasium.Space[Any]) -> int:
    """Return how many dimensions of an observation [*batch, ...] are those of the batch."""
    if isinstance(observation, Tensor):
        return observation.dim() - len(space.shape or ())
    return len(observation.batch_size)
