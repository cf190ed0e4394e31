"""Build multi-layer perceptrons and the flat inputs that they take."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.errors import ConfigurationError, closest, require

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def mlp(
    input_size: int,
    hidden_sizes: Sequence[int],
    output_size: int,
    *,
    activation: str = "tanh",
    output_gain: float = 1.0,
) -> nn.Sequential:
    """Build a perceptron with orthogonal weights and zero biases.

    The gain is sqrt(2), and `output_gain` for the last layer.

    Source: Andrychowicz et al. 2021, "What Matters in On-Policy Reinforcement Learning", section
    3.2.

    Raises:
        ConfigurationError: for an unknown activation or a layer size below 1.
    """
    require(
        activation in ACTIVATIONS,
        f"Unknown activation '{activation}'; allowed: "
        f"{', '.join(ACTIVATIONS)}{closest(activation, ACTIVATIONS)}.",
    )
    sizes = [input_size, *hidden_sizes, output_size]
    require(
        all(size >= 1 for size in sizes),
        f"Layer sizes must be at least 1, got hidden_sizes={list(hidden_sizes)}.",
    )
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes[:-1]):
        layers += [_linear(before, after, math.sqrt(2)), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, _linear(sizes[-2], sizes[-1], output_gain))


def _linear(input_size: int, output_size: int, gain: float) -> nn.Linear:
    layer = nn.Linear(input_size, output_size)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def flat_observation_size(space: gymnasium.Space[Any]) -> int:
    """Return how many numbers `flatten_observation` makes of one observation.

    Raises:
        ConfigurationError: for a space that a perceptron cannot take.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        require(len(space) > 0, "The observation space is an empty Dict.")
        return sum(flat_observation_size(child) for child in space.values())
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary):
        require(
            len(space.shape) < 3,
            f"Observation space {space} looks like an image: a perceptron cannot take it. Use a "
            "policy of your own with "
            "a vision network (a subclass of lightning_rl.Policy), or a state observation.",
        )
        return math.prod(space.shape)
    raise ConfigurationError(
        f"Observation space {space} is not supported: use Box, MultiBinary, or a Dict of them. For "
        "a Discrete or "
        "Tuple space add `wrappers: [gymnasium.wrappers.FlattenObservation]` to the env."
    )


def flatten_observation(observation: Tensor | TensorDict, batch_dims: int = 1) -> Tensor:
    """Concatenate a tensor or a tree of tensors, keys in sorted order, to float32 [..., D]."""
    if isinstance(observation, Tensor):
        if observation.dim() == batch_dims + 1 and observation.dtype == torch.float32:
            return observation
        return observation.reshape(*observation.shape[:batch_dims], -1).to(torch.float32)
    return torch.cat(
        [flatten_observation(observation[key], batch_dims) for key in sorted(observation.keys())],
        dim=-1,
    )
