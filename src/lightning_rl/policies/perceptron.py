"""Make perceptrons, and the flat observations that they read."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

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
"""By the names that settings give them."""


Normalization = Literal["none", "layer", "rms"]
"""Of hidden units, before the activation: LayerNorm (Ba et al. 2016), RMSNorm, or none."""


def mlp(
    input_size: int,
    hidden_sizes: Sequence[int],
    output_size: int,
    *,
    activation: str = "tanh",
    output_gain: float = 1.0,
    normalization: Normalization = "none",
) -> nn.Sequential:
    """Build a perceptron with orthogonal weights and zero biases.

    The gain is sqrt(2), and `output_gain` for the last layer.

    Source: Andrychowicz et al. 2021, "What Matters in On-Policy Reinforcement Learning", section
    3.2.

    Raises:
        ConfigurationError: for an unknown activation or a layer size below 1.
    """
    check_activation(activation)
    sizes = [input_size, *hidden_sizes, output_size]
    require(
        all(size >= 1 for size in sizes),
        f"Layer sizes must be at least 1, got hidden_sizes={list(hidden_sizes)}.",
    )
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes[:-1]):
        layers.append(_linear(before, after, math.sqrt(2)))
        if normalization != "none":
            layers.append(nn.LayerNorm(after) if normalization == "layer" else nn.RMSNorm(after))
        layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers, _linear(sizes[-2], sizes[-1], output_gain))


def check_activation(activation: str) -> None:
    """Refuse an unknown activation.

    Raises:
        ConfigurationError: naming those that there are.
    """
    require(
        activation in ACTIVATIONS,
        f"Unknown activation '{activation}'; allowed: "
        f"{', '.join(ACTIVATIONS)}{closest(activation, ACTIVATIONS)}.",
    )


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
            f"Observation space {space} looks like an image: a perceptron cannot take it. Give the "
            "policy an encoder (policy.init_args.encoder: {class_path: NatureCNN}; for a Dict with "
            "pictures DictEncoder), or observe a state.",
        )
        return math.prod(space.shape)
    raise ConfigurationError(
        f"Observation space {space} is not supported: use Box, MultiBinary, or a Dict of them. For "
        "a Discrete or "
        "Tuple space add `wrappers: [gymnasium.wrappers.FlattenObservation]` to the env."
    )


def flatten_observation(
    observation: Tensor | TensorDict, batch_dims: int = 1, keys: Sequence[str] | None = None
) -> Tensor:
    """Concatenate a tensor or a tree of tensors, keys in sorted order, to float32 [..., D].

    Args:
        observation: [*batch, ...], or a tree of such.
        batch_dims: how many dimensions the batch has.
        keys: of the tree, those that count; None for all.
    """
    if isinstance(observation, Tensor):
        return observation.reshape(*observation.shape[:batch_dims], -1).to(torch.float32)
    return torch.cat(
        [
            flatten_observation(observation[key], batch_dims)
            for key in sorted(observation.keys() if keys is None else keys)
        ],
        dim=-1,
    )


NO_INPUT = ("action_mask",)
"""Keys of an observation that no network reads unless it is asked to: they say what is allowed."""


def read_keys(
    space: gymnasium.Space[Any], chosen: Sequence[str] | None, setting: str
) -> tuple[str, ...] | None:
    """Return which keys of a Dict observation a network reads; None where there are no keys.

    Args:
        space: of one observation.
        chosen: what was asked for; None for all but `NO_INPUT`.
        setting: what asked, for the message: `actor_keys`.

    Raises:
        ConfigurationError: for a key that is not there, none at all, or keys where the observation
            has none.
    """
    if not isinstance(space, gymnasium.spaces.Dict):
        require(
            chosen is None,
            f"{setting}={list(chosen or ())} chooses among the keys of a Dict observation, and the "
            f"observation space is {space}. Leave {setting} out.",
        )
        return None
    known = sorted(space.keys())
    keys = [key for key in known if key not in NO_INPUT] if chosen is None else sorted(set(chosen))
    unknown = [key for key in keys if key not in known]
    names = ", ".join(known)
    require(
        not unknown,
        f"{setting} names '{', '.join(unknown)}', and the observation has the keys {names}"
        f"{closest(unknown[0], known) if unknown else ''}.",
    )
    require(
        len(keys) > 0,
        f"The network would read no key of the observation, which has {names or 'none'}: name "
        f"those it reads in {setting}. (An action_mask is no input unless it is named there.)",
    )
    return tuple(keys)


def read_space(space: gymnasium.Space[Any], keys: Sequence[str] | None) -> gymnasium.Space[Any]:
    """Return the space of what a network reads of an observation: see `read_keys`."""
    if keys is None or not isinstance(space, gymnasium.spaces.Dict):
        return space
    return gymnasium.spaces.Dict({key: space[key] for key in keys})
