"""Build perceptrons, and flatten the observations that they read."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.rollout.masks import MASK
from lightning_rl.system.errors import ConfigurationError, closest, require

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
"""By their names in settings."""


Normalization = Literal["none", "layer", "rms"]
"""Normalization of hidden units before the activation: LayerNorm (Ba et al. 2016) or RMSNorm."""


class RMSNorm(nn.RMSNorm):
    """RMS norm that reads bfloat16 next to its float32 weights, of which torch's own warns."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


NORMALIZATIONS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm}
"""By their names in settings."""

Network = Literal["perceptron", "residual"]
"""Plain hidden layers, or residual blocks."""

Initialization = Literal["orthogonal", "fan_in"]
"""Initialization of weights.

Orthogonal weights with zero biases (Andrychowicz et al. 2021, "What Matters in On-Policy
Reinforcement Learning", section 3.2); or weights and biases uniform within ±1/sqrt(n) for n inputs
(Lillicrap et al. 2016, "Continuous Control with Deep Reinforcement Learning", section 7).
"""

EXPANSION = 4
"""Inner units of a residual block per input."""


MOST_WEIGHTS = 10**9
"""Maximum weights of one network, 4 GB."""


def check_weights_fit(sizes: Sequence[int], copies: int = 1) -> None:
    """Refuse `copies` networks of layers with more than `MOST_WEIGHTS` weights.

    Raises:
        ConfigurationError: with the sizes.
    """
    count = copies * sum(inputs * outputs for inputs, outputs in pairwise(sizes))
    times = f", {copies:,} times," if copies != 1 else ""
    # Before torch allocates them: too large a size gives a message instead of a full memory.
    require(
        count <= MOST_WEIGHTS,
        f"Layers of the sizes {list(sizes)[:6]}{times} have {count:,} weights, but at most "
        f"{MOST_WEIGHTS:,} are allowed. Set smaller sizes (hidden_sizes, num_critics, ...).",
    )


def mlp(
    input_size: int,
    hidden_sizes: Sequence[int],
    output_size: int,
    *,
    activation: str = "tanh",
    output_gain: float = 1.0,
    normalization: Normalization = "none",
    network: Network = "perceptron",
    initialization: Initialization = "orthogonal",
) -> nn.Sequential:
    """Build a perceptron, or a residual network.

    The gain of orthogonal weights is sqrt(2), and `output_gain` for the last layer.

    A residual network: linear layer, one `ResidualBlock` per hidden size (all equal),
    normalization, last layer. Source: Lee et al. 2025, "SimBa" (initial weights differ).

    Raises:
        ConfigurationError: for an unknown activation, or unsupported layer sizes.
    """
    check_activation(activation)
    sizes = [input_size, *hidden_sizes, output_size]
    require(
        all(size >= 1 for size in sizes),
        f"Layer sizes must be at least 1, got hidden_sizes={list(hidden_sizes)}.",
    )
    check_weights_fit(layer_sizes(input_size, hidden_sizes, output_size, network))
    layers: list[nn.Module] = []
    if network == "residual":
        check_residual(hidden_sizes, "hidden_sizes")
        # Blocks keep the size; a linear layer at either end changes it.
        layers.append(linear(input_size, hidden_sizes[0], 1.0, initialization))
        layers += [
            ResidualBlock(size, activation, normalization, initialization) for size in hidden_sizes
        ]
        # Each block normalizes its input: the output of the last block is not normalized yet.
        layers += _normalizing(hidden_sizes[0], normalization)
    else:
        for inputs, outputs in pairwise(sizes[:-1]):
            layers.append(linear(inputs, outputs, math.sqrt(2), initialization))
            layers += _normalizing(outputs, normalization)
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers, linear(sizes[-2], sizes[-1], output_gain, initialization))


def layer_sizes(
    input_size: int, hidden_sizes: Sequence[int], output_size: int, network: Network
) -> list[int]:
    """Return the sizes of all layers, including those inside residual blocks."""
    if network == "residual":
        hidden_sizes = [width for size in hidden_sizes for width in (size, EXPANSION * size, size)]
    return [input_size, *hidden_sizes, output_size]


class ResidualBlock(nn.Module):
    """An inverted bottleneck with a skip connection: x + W2 activation(W1 normalized(x)).

    For x of `size` H, it has `EXPANSION` * H inner units.
    """

    def __init__(
        self,
        size: int,
        activation: str,
        normalization: Normalization,
        initialization: Initialization = "orthogonal",
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_normalizing(size, normalization),
            linear(size, EXPANSION * size, math.sqrt(2), initialization),
            ACTIVATIONS[activation](),
            linear(EXPANSION * size, size, 1.0, initialization),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]  # nn.Module


def check_residual(hidden_sizes: Sequence[int], setting: str) -> None:
    """Refuse hidden sizes that a residual network cannot have.

    Raises:
        ConfigurationError: for no hidden sizes, or different sizes.
    """
    require(
        # No sizes at all make an empty set, which is refused, too.
        len(set(hidden_sizes)) == 1,
        "network: residual has one block per hidden size, and all must be equal, such as [256, "
        f"256]; got {setting}={list(hidden_sizes)}.",
    )


def _normalizing(size: int, normalization: Normalization) -> list[nn.Module]:
    return [] if normalization == "none" else [NORMALIZATIONS[normalization](size)]


def check_activation(activation: str, setting: str = "activation") -> None:
    """Refuse an unknown activation; `setting` is its name in the message.

    Raises:
        ConfigurationError: with the known activations.
    """
    require(
        activation in ACTIVATIONS,
        f"Unknown {setting} '{activation}'; allowed: "
        f"{', '.join(ACTIVATIONS)}{closest(activation, ACTIVATIONS)}.",
    )


def linear(
    input_size: int, output_size: int, gain: float, initialization: Initialization
) -> nn.Linear:
    """Return an initialized layer; `gain` only applies to orthogonal weights."""
    check_weights_fit((input_size, output_size))
    layer = nn.Linear(input_size, output_size)
    # `nn.Linear` initializes weights and biases as `fan_in` does.
    if initialization == "orthogonal":
        orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


def orthogonal_(weight: Tensor, gain: float = 1.0) -> None:
    """Fill a weight [O, ...] with orthogonal rows or columns, the same for any `num_threads`."""
    # LAPACK adds in another order for each number of threads, and `RLTrainer` sets the number only
    # after `rl-cli` has built the policy. One thread, because several would wait for ever in the
    # fork of a process that has already used them, such as a worker's or a trial's.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        nn.init.orthogonal_(weight, gain)
    finally:
        torch.set_num_threads(threads)


def flat_observation_size(space: gymnasium.Space[Any]) -> int:
    """Return the length of a flattened observation.

    Raises:
        ConfigurationError: for a space that a perceptron cannot read.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        require(len(space) > 0, "The observation space is an empty Dict.")
        return sum(flat_observation_size(child) for child in space.values())
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary):
        require(
            len(space.shape) < 3,
            f"Observation space {space} looks like an image: a perceptron cannot read it. Give the "
            f"policy an encoder (policy.init_args.encoder: {{class_path: NatureCNN}}; for a Dict "
            "with pictures DictEncoder; floats need bounds within -1 and 1, of a term clip: [0.0, "
            "1.0]), or observe a state.",
        )
        return math.prod(space.shape)
    raise ConfigurationError(
        f"Observation space {space} is not supported: use Box, MultiBinary, or a Dict of them. For "
        "a Discrete or MultiDiscrete space set policy.encoder: OneHot; for a Tuple space add "
        "`wrappers: [gymnasium.wrappers.FlattenObservation]` to the env."
    )


def flatten_observation(
    observation: Tensor | TensorDict, batch_dims: int = 1, keys: Sequence[str] | None = None
) -> Tensor:
    """Concatenate a tensor or a tree of tensors, keys in sorted order, to float32 [..., D].

    Args:
        observation: [*batch, ...], or a tree of tensors.
        batch_dims: number of batch dimensions.
        keys: the keys of the tree to use; None for all.
    """
    if isinstance(observation, Tensor):
        # A scalar observation, of shape [*batch], becomes one column.
        flat = observation[..., None] if observation.dim() == batch_dims else observation
        return flat.flatten(batch_dims).to(torch.float32)
    return torch.cat(
        [
            flatten_observation(observation[key], batch_dims)
            # Sorted, because TensorDicts keep the order of insertion.
            for key in sorted(observation.keys() if keys is None else keys)
        ],
        dim=-1,
    )


NO_INPUT = (MASK,)
"""Keys of an observation that networks read only if a setting names them."""


def read_keys(
    space: gymnasium.Space[Any],
    subset: Sequence[str] | None,
    setting: str,
    ignored: Sequence[str] = (),
) -> tuple[str, ...] | None:
    """Return the keys of a Dict observation that a network reads; None for other observations.

    Args:
        space: space of one observation.
        subset: the keys in the setting; None for all but `NO_INPUT`.
        setting: name of the setting, for the message: `actor_keys`.
        ignored: keys that no network of the policy reads.

    Raises:
        ConfigurationError: for unknown or ignored keys, no keys, or an observation without keys.
    """
    if not isinstance(space, gymnasium.spaces.Dict):
        require(
            subset is None,
            f"{setting}={list(subset or ())} chooses among the keys of a Dict observation, but the "
            f"observation space is {space}. Remove {setting}.",
        )
        return None
    names = sorted(space.keys())
    unread = (*NO_INPUT, *ignored)
    keys = [key for key in names if key not in unread] if subset is None else sorted(set(subset))
    unknown = [key for key in keys if key not in names]
    listed = ", ".join(names)
    require(
        not unknown,
        f"{setting} names '{', '.join(unknown)}', but the observation has the keys "
        f"{listed}{closest(unknown[0], names) if unknown else ''}.",
    )
    conflicts = [key for key in keys if key in ignored]
    require(
        not conflicts,
        f"{setting} and ignore_keys both name {', '.join(conflicts)}: remove it from one of them.",
    )
    require(
        len(keys) > 0,
        f"The network would read no key of the observation, which has {listed or 'none'}: list the "
        f"network's keys in {setting}. (An action_mask is an input only if {setting} lists it.)",
    )
    return tuple(keys)


def read_space(space: gymnasium.Space[Any], keys: Sequence[str] | None) -> gymnasium.Space[Any]:
    """Return the part of an observation space with the keys from `read_keys`."""
    if keys is None or not isinstance(space, gymnasium.spaces.Dict):
        return space
    return gymnasium.spaces.Dict({key: space[key] for key in keys})
