"""Encoders, which turn observations into features: pictures, numbers, choices."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.kwargs import ImpalaCNNKwargs, NatureCNNKwargs, SpatialSoftmaxCNNKwargs, Unpack
from lightning_rl.policies.networks.perceptron import (
    ACTIVATIONS,
    check_activation,
    check_weights_fit,
    flat_observation_size,
    flatten_observation,
    mlp,
    orthogonal_,
)
from lightning_rl.policies.normalization import ObservationNormalizer, RunningMoments
from lightning_rl.rollout.contract import leaves_by_path
from lightning_rl.system.errors import ConfigurationError, check_range, closest, require

ChannelNormalization = Literal["none", "group", "layer"]
"""Normalization of convolution channels before the activation, in groups, in one group, or none.

GroupNorm (Wu and He 2018) with groups of at least 8 channels. No BatchNorm: its outputs would
differ between acting and learning.
"""


class Encoder(nn.Module, ABC):
    """Base class of encoders, which a policy trains with its actor and critic.

    The first constructor argument of a subclass is `observation_space`, of one env. In the config:
    `encoder: {class_path: my_module.MyEncoder}`.

    Attributes:
        size: D, number of features.
    """

    size: int

    def __init__(self, observation_space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.observation_space = observation_space

    @abstractmethod
    def forward(self, observation: Tensor | TensorDict) -> Tensor: ...

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        """Update the running statistics of the inputs, if any, from observations [M, ...]."""


EncoderFactory = Callable[[gymnasium.Space[Any]], Encoder]
"""Makes an encoder for a space; in YAML `{class_path: NatureCNN, init_args: {size: 256}}`."""


def of_critic(make: EncoderFactory, space: gymnasium.Space[Any]) -> Encoder:
    """Make the critic's own encoder, for the observation space of the critic.

    Raises:
        ConfigurationError: if the encoder cannot read that space.
    """
    try:
        return make(space)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The critic's own encoder cannot read the critic's observation: {error} (Set "
            "critic_encoder to use another encoder than the actor's.)"
        ) from None


# --- numbers and choices ---


class PerceptronEncoder(Encoder):
    """Flatten the observation, normalize it (optional), and apply hidden layers (optional).

    Args:
        observation_space: Box (flat or matrix), MultiBinary, or a Dict of them.
        hidden_sizes: units of the layers. Default: no layers.
        activation: after each layer: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalize: scale the inputs by their running mean and variance, clipped to ±10.
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
        # An empty Sequential returns its input.
        self.layers = nn.Sequential()
        if len(hidden_sizes) > 0:
            *hidden, last = hidden_sizes
            gain = math.sqrt(2)
            self.layers = mlp(size, hidden, last, activation=activation, output_gain=gain)
            self.layers.append(ACTIVATIONS[activation]())
        self.size = hidden_sizes[-1] if len(hidden_sizes) > 0 else size

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        flat = flatten_observation(observation, _batch_dims(observation, self.observation_space))
        if self.normalizer is not None:
            flat = self.normalizer(flat)
        return cast(Tensor, self.layers(flat))

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        if self.normalizer is not None:
            self.normalizer.update(flatten_observation(observation))


class OneHot(Encoder):
    """One-hot encoding of a discrete observation, such as a goal.

    Raises:
        ConfigurationError: for a space that is neither Discrete nor MultiDiscrete.
    """

    offset: Tensor

    def __init__(self, observation_space: gymnasium.Space[Any]) -> None:
        super().__init__(observation_space)
        space = observation_space
        if isinstance(space, gymnasium.spaces.Discrete):
            sizes, start = [int(space.n)], [int(space.start)]
        elif isinstance(space, gymnasium.spaces.MultiDiscrete):
            sizes = [int(n) for n in space.nvec.flatten()]
            start = [int(n) for n in space.start.flatten()]
        else:
            raise ConfigurationError(
                f"OneHot reads a Discrete or MultiDiscrete observation, not {space}: use "
                "PerceptronEncoder for numbers, NatureCNN for a picture."
            )
        positions = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        # From a choice to its index in the one-hot vector.
        self.register_buffer("offset", positions - torch.tensor(start), persistent=False)
        self.size = sum(sizes)

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        batch_dims = _batch_dims(observation, self.observation_space)
        values = cast(Tensor, observation)
        batch = values.shape[:batch_dims]
        choices = values.reshape(-1, len(self.offset))
        # Each choice sets one entry, at its index in the whole vector.
        features = torch.zeros(choices.shape[0], self.size, device=choices.device)
        return features.scatter(1, choices + self.offset, 1.0).view(*batch, self.size)


# --- pictures ---


PICTURES_LOOKED_AT = 64
"""Maximum pictures of a rollout that update the running statistics of the channels."""

PIXEL_EPS = 1e-3
"""Added to the variance of a channel with pixels in [0, 1], so that nothing needs clipping."""


class PictureEncoder(Encoder):
    """Base class of convolutional encoders; prepares a picture for the network.

    Pictures are uint8, 0 to 255, or floats between -1 and 1. They stay uint8 in rollouts, replays
    and minibatches; the encoder divides by 255. Shapes: [H, W, C]; [C, H, W] if the first dimension
    is the smallest; [H, W]; a stack of K color pictures [K, H, W, C], or [K, C, H, W] if C is
    smaller than H and W, read as K * C channels.

    A subclass sets `size`, and `layers` for pictures [M, C, H, W] of `input_shape`.

    Args:
        observation_space: observation space of a picture.
        normalize: scale each channel by its running mean and variance over all pixels. Much faster
            learning if a bright background fills the picture.
        crop: (top, left, height, width) in pixels. Default: the whole picture.
        resize: (height, width) in pixels after cropping, antialiased. Default: no resizing.

    Attributes:
        input_shape: (C, H, W) of the input of `layers`.

    Raises:
        ConfigurationError: if the space is not a picture, or does not contain the crop.
    """

    layers: nn.Module
    scale: Tensor
    shift: Tensor

    @abstractmethod  # subclasses create layers
    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        normalize: bool = False,
        crop: tuple[int, int, int, int] | None = None,
        resize: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(observation_space)
        name = type(self).__name__
        if not is_picture(observation_space):
            cure = "use PerceptronEncoder for numbers, OneHot for a Discrete one"
            if isinstance(observation_space, gymnasium.spaces.Dict):
                cure = "use DictEncoder, which has an encoder for each key"
            elif 3 <= len(observation_space.shape or ()) <= 4:
                cure = "give the space bounds within -1 and 1 (a term: clip: [0.0, 1.0])"
            raise ConfigurationError(
                f"{name} reads one picture, a Box of uint8 [H, W, C], [H, W] or [K, H, W, C], or "
                f"of floats between -1 and 1, but the observation space is {observation_space}: "
                f"{cure}."
            )
        shape = cast(tuple[int, ...], observation_space.shape)
        # Axes in the order channels, height, width; a stack of color pictures has two of channels.
        self._axes = _channels_and_sides(shape)
        axes, top, left = self._axes, 0, 0
        channels = math.prod(shape[axis] for axis in axes[:-2])
        height, width = (shape[axis] for axis in axes[-2:])
        if crop is not None:
            top, left, rows, columns = crop
            require(
                min(top, left) >= 0
                and min(rows, columns) >= 1
                and top + rows <= height
                and left + columns <= width,
                f"{name}: crop={list(crop)} (top, left, height, width) is not within a picture of "
                f"{height}x{width} pixels.",
            )
            height, width = rows, columns
        self._window = (slice(top, top + height), slice(left, left + width))
        # Scale bytes to numbers from 0 to 1.
        self._unit = 1.0 / 255.0 if observation_space.dtype == "uint8" else 1.0
        self.normalizer = RunningMoments(channels) if normalize else None
        if normalize:
            # Use one factor and shift per pixel, in the memory layout of pictures, so that a
            # compiled graph can use vector instructions.
            like = torch.ones(height, width, channels).permute(2, 0, 1)
            self.register_buffer("scale", like * self._unit)
            self.register_buffer("shift", torch.zeros_like(like))
        self.crop, self.resize = crop, resize
        if resize is not None:
            check_range(f"{name}.resize", min(resize), minimum=1)
            height, width = resize
        self.input_shape = (channels, height, width)

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        picture = cast(Tensor, observation)
        batch = picture.shape[: picture.dim() - len(self._axes)]
        planes = self._planes(picture.reshape(-1, *picture.shape[len(batch) :]))
        # Pixels are bytes until here: rollouts and minibatches move a quarter of the memory.
        pixels = planes.float()
        if self.normalizer is not None:
            # One pass over the pixels: division by 255, mean and deviation together.
            pixels = torch.addcmul(self.shift, pixels, self.scale)
        elif self._unit != 1.0:
            pixels = pixels * self._unit
        if self.resize is not None:
            size = list(self.resize)
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        features: Tensor = self.layers(pixels)
        return features.view(*batch, self.size)

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        moments = self.normalizer
        if moments is None:
            return
        pictures = cast(Tensor, observation)
        # A few pictures, at regular intervals, have enough pixels.
        step = max(1, -(-len(pictures) // PICTURES_LOOKED_AT))
        sample = self._planes(pictures[::step])
        moments.update(sample.movedim(1, -1).flatten(0, -2).float() * self._unit)
        factor = (moments.var + PIXEL_EPS).rsqrt()
        self.scale.copy_((factor * self._unit)[:, None, None])
        self.shift.copy_((-moments.mean * factor)[:, None, None])

    def _convolutions(
        self,
        channels: Sequence[int],
        kernels: Sequence[int],
        strides: Sequence[int],
        activation: str,
        normalization: ChannelNormalization,
    ) -> tuple[list[nn.Module], list[int]]:
        name = type(self).__name__
        check_activation(activation)
        require(
            len(channels) == len(kernels) == len(strides) > 0,
            f"{name}: channels={list(channels)}, kernels={list(kernels)} and "
            f"strides={list(strides)} must have the same length, one entry per convolution.",
        )
        for of_what, numbers in (
            ("channels", channels),
            ("kernels", kernels),
            ("strides", strides),
        ):
            check_range(f"{name}.{of_what}", min(numbers), minimum=1)
        inputs, *sides = self.input_shape
        # Backwards from one pixel behind the last convolution, to the smallest possible picture.
        size = 1
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            size = (size - 1) * stride + kernel
        require(
            min(sides) >= size,
            f"{name}: a picture of {sides[0]}x{sides[1]} pixels is too small for "
            f"kernels={list(kernels)} and strides={list(strides)}, which need {size}x{size} at "
            f"least. Set smaller kernels or strides, or resize: [{size}, {size}], or use "
            "ImpalaCNN, which takes pictures of any size.",
        )
        layers: list[nn.Module] = []
        for outputs, kernel, stride in zip(channels, kernels, strides, strict=True):
            layers.append(_convolution(inputs, outputs, kernel, stride))
            layers += _channel_normalization(normalization, outputs)
            layers.append(ACTIVATIONS[activation]())
            sides = [(side - kernel) // stride + 1 for side in sides]
            inputs = outputs
        return layers, [inputs, *sides]

    def _planes(self, pictures: Tensor) -> Tensor:
        # Return a view: memory stays channels-last, the fastest layout for convolutions.
        planes = pictures.permute(0, *(axis + 1 for axis in self._axes))
        if len(self._axes) != 3:  # gray pictures, or a stack of color pictures
            planes = planes.reshape(planes.shape[0], -1, *planes.shape[-2:])
        rows, columns = self._window
        return planes[:, :, rows, columns]


def is_picture(space: gymnasium.Space[Any]) -> bool:
    """Return whether `PictureEncoder` reads a space."""
    if not isinstance(space, gymnasium.spaces.Box):
        return False
    if space.dtype == "uint8":
        return 2 <= len(space.shape) <= 4
    small = space.dtype.kind == "f" and bool((abs(space.low) <= 1).all() & (space.high <= 1).all())
    return small and 3 <= len(space.shape) <= 4


def picture_keys(space: gymnasium.Space[Any]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the axes of height and width of pictures in an observation space, by key path.

    Bytes with other bounds than 0 and 255 are symbols, such as the cells of a map.
    """
    parts = leaves_by_path(space).items()
    return {
        path: _channels_and_sides(box.shape)[-2:]
        for path, box in parts
        if is_picture(box) and (box.dtype != "uint8" or _is_bounded_as_pixels(box))
    }


def _is_bounded_as_pixels(space: gymnasium.spaces.Box) -> bool:
    return bool((space.low == 0).all() and (space.high == 255).all())


def _channels_and_sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:
        return (0, 1)
    if len(shape) == 4:  # a stack of pictures
        return (0, *(axis + 1 for axis in _channels_and_sides(shape[1:])))
    # A first dimension below the others means [C, H, W].
    return (0, 1, 2) if shape[0] < min(shape[1:]) else (2, 0, 1)


class NatureCNN(PictureEncoder):
    """Three convolutions and a linear layer.

    Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning", methods.
    Differs from the paper: orthogonal weights, with a gain of sqrt(2).

    Args:
        observation_space: observation space of a picture, see `PictureEncoder`.
        size: D, number of features.
        channels: channels of each convolution.
        kernels: kernels of each convolution, in pixels.
        strides: strides of each convolution, in pixels.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalization: normalization of the channels; unless `none`, also a LayerNorm of the
            features.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        size: int = 512,
        channels: Sequence[int] = (32, 64, 64),
        kernels: Sequence[int] = (8, 4, 3),
        strides: Sequence[int] = (4, 2, 1),
        activation: str = "relu",
        normalization: ChannelNormalization = "none",
        **kwargs: Unpack[NatureCNNKwargs],
    ) -> None:
        super().__init__(observation_space, **kwargs)
        check_range("NatureCNN.size", size, minimum=1)
        layers, numbers = self._convolutions(channels, kernels, strides, activation, normalization)
        layers += _to_features(math.prod(numbers), size, activation, normalization)
        self.layers = nn.Sequential(*layers)
        self.size = size


class SpatialSoftmaxCNN(PictureEncoder):
    """Convolutions with a spatial softmax: the features are points in the picture.

    A softmax over the pixels of each last channel gives a mean place, x and y from -1 (left, top)
    to 1. Tasks that depend on positions learn faster than with a linear layer (docs/pictures.md).
    The features do not contain appearance and number of objects.

    Source: Levine et al. 2016, "End-to-End Training of Deep Visuomotor Policies", section 5.1; Finn
    et al. 2016, equations 1 and 2. Differs: smaller convolutions, with orthogonal weights.

    Args:
        observation_space: observation space of a picture, see `PictureEncoder`.
        points: K, channels of the last 1x1 convolution; 2K features, (x, y) of each point.
        channels: channels of each earlier convolution.
        kernels: kernels of each convolution, in pixels.
        strides: strides of each convolution, in pixels. Large strides make the softmax coarse.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalization: normalization of the channels of each convolution.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        points: int = 32,
        channels: Sequence[int] = (16, 32),
        kernels: Sequence[int] = (5, 3),
        strides: Sequence[int] = (2, 1),
        activation: str = "relu",
        normalization: ChannelNormalization = "none",
        **kwargs: Unpack[SpatialSoftmaxCNNKwargs],
    ) -> None:
        super().__init__(observation_space, **kwargs)
        check_range("SpatialSoftmaxCNN.points", points, minimum=1)
        layers, numbers = self._convolutions(channels, kernels, strides, activation, normalization)
        inputs, *sides = numbers
        layers += [_convolution(inputs, points, 1, 1, gain=1.0), _SpatialSoftmax(*sides)]
        self.layers = nn.Sequential(*layers)
        self.size = 2 * points


class _SpatialSoftmax(nn.Module):
    """Map logits [M, K, H, W] to the mean places [M, 2K], (x, y) per channel."""

    places: Tensor

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        y, x = torch.meshgrid(_from_edge_to_edge(height), _from_edge_to_edge(width), indexing="ij")
        self.register_buffer("places", torch.stack((x, y), -1).reshape(-1, 2), persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        # The softmax is a distribution over the pixels of a channel; the product is its mean place.
        return (pictures.flatten(2).softmax(-1) @ self.places).flatten(1)


def _from_edge_to_edge(number: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, number) if number > 1 else torch.zeros(1)


class ImpalaCNN(PictureEncoder):
    """A residual network; each section has a convolution, a pooling, and two residual blocks.

    Source: Espeholt et al. 2018, "IMPALA", figure 3, the large architecture.

    Args:
        observation_space: observation space of a picture of any size, see `PictureEncoder`.
        size: D, number of features.
        channels: channels of each section; each section halves height and width.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalization: normalization of the residual blocks; unless `none`, also a LayerNorm of the
            features.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        size: int = 256,
        channels: Sequence[int] = (16, 32, 32),
        activation: str = "relu",
        normalization: ChannelNormalization = "none",
        **kwargs: Unpack[ImpalaCNNKwargs],
    ) -> None:
        super().__init__(observation_space, **kwargs)
        check_activation(activation)
        check_range("ImpalaCNN.channels", min(channels, default=0), minimum=1)
        check_range("ImpalaCNN.size", size, minimum=1)
        inputs, *sides = self.input_shape
        layers: list[nn.Module] = []
        for outputs in channels:
            layers.append(_convolution(inputs, outputs, 3, 1, padding=1))
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            layers += [_Residual(outputs, activation, normalization) for _ in range(2)]
            # The pooling, with stride 2 and padding 1, rounds half a side up.
            sides = [(side + 1) // 2 for side in sides]
            inputs = outputs
        layers.append(ACTIVATIONS[activation]())
        layers += _to_features(inputs * math.prod(sides), size, activation, normalization)
        self.layers = nn.Sequential(*layers)
        self.size = size


class _Residual(nn.Module):
    def __init__(self, channels: int, activation: str, normalization: ChannelNormalization) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += _channel_normalization(normalization, channels)
            layers.append(ACTIVATIONS[activation]())
            layers.append(_convolution(channels, channels, 3, 1, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, pictures: Tensor) -> Tensor:
        return pictures + cast(Tensor, self.layers(pictures))


def _convolution(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int,
    padding: int = 0,
    gain: float = math.sqrt(2),
) -> nn.Conv2d:
    check_weights_fit((inputs * kernel**2, outputs))
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    orthogonal_(layer.weight, gain)
    nn.init.zeros_(cast(Tensor, layer.bias))
    return layer


def _channel_normalization(kind: ChannelNormalization, channels: int) -> list[nn.Module]:
    if kind == "none":
        return []
    groups = 1
    if kind == "group":
        # The largest number of equal groups with at least 8 channels each.
        groups = max(g for g in range(1, max(1, channels // 8) + 1) if channels % g == 0)
    return [nn.GroupNorm(groups, channels)]


def _to_features(
    inputs: int, size: int, activation: str, normalization: ChannelNormalization
) -> list[nn.Module]:
    check_weights_fit((inputs, size))
    linear = nn.Linear(inputs, size)
    orthogonal_(linear.weight, math.sqrt(2))
    nn.init.zeros_(linear.bias)
    normalized = [nn.LayerNorm(size)] if normalization != "none" else []
    return [nn.Flatten(), linear, *normalized, ACTIVATIONS[activation]()]


# --- several keys ---


class DictEncoder(Encoder):
    """Encode each key of a Dict observation, and concatenate the features.

    Args:
        observation_space: a Dict.
        encoders: by key. Default: `NatureCNN`, `OneHot`, `DictEncoder`, or flat numbers.
        normalize: whether default encoders scale their input by its running mean and variance.

    Raises:
        ConfigurationError: for an unknown key, or a key that its encoder cannot read.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        encoders: Mapping[str, EncoderFactory] | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__(observation_space)
        if not isinstance(observation_space, gymnasium.spaces.Dict):
            raise ConfigurationError(
                "DictEncoder reads a Dict of observations, but the observation space is "
                f"{observation_space}: use an encoder for that space, such as NatureCNN for a "
                "picture."
            )
        factories = dict(encoders or {})
        keys = sorted(observation_space.keys())
        unknown = [key for key in factories if key not in keys]
        require(
            not unknown,
            f"DictEncoder.encoders names '{', '.join(unknown)}', but the observation has the keys "
            f"{', '.join(keys)}{closest(unknown[0], keys) if unknown else ''}.",
        )
        self.encoders = nn.ModuleDict()
        for key in keys:
            space = observation_space[key]
            make = factories.get(key) or _default_encoder(space, normalize)
            try:
                self.encoders[_module_name(key)] = make(space)
            except ConfigurationError as error:
                raise ConfigurationError(f"Encoder of the observation's '{key}': {error}") from None
        self.size = sum(encoder.size for encoder in self._children().values())

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        tree = cast(TensorDict, observation)
        return torch.cat([module(tree.get(key)) for key, module in self._children().items()], -1)

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        for key, encoder in self._children().items():
            encoder.update_normalization(cast(TensorDict, observation).get(key))

    def _children(self) -> dict[str, Encoder]:
        keys = sorted(cast(gymnasium.spaces.Dict, self.observation_space).keys())
        return {key: cast(Encoder, self.encoders[_module_name(key)]) for key in keys}


def _module_name(key: str) -> str:
    # `ModuleDict` refuses dots, and names of its own attributes such as `pop`.
    return f"{key}/" if hasattr(nn.ModuleDict, key) or key == "training" else key.replace(".", "/")


def _default_encoder(space: gymnasium.Space[Any], normalize: bool) -> EncoderFactory:
    if is_picture(space):
        return partial(NatureCNN, normalize=normalize)
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        return OneHot
    if isinstance(space, gymnasium.spaces.Dict):
        return partial(DictEncoder, normalize=normalize)
    return partial(PerceptronEncoder, normalize=normalize)


def _batch_dims(observation: Tensor | TensorDict, space: gymnasium.Space[Any]) -> int:
    if isinstance(observation, Tensor):
        return observation.dim() - len(space.shape or ())
    return len(observation.batch_size)
