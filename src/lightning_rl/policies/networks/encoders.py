"""Turn observations into features, which the heads of a policy read: pictures, numbers, choices."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import gymnasium
import torch
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.policies.networks.perceptron import (
    ACTIVATIONS,
    check_activation,
    check_weights_fit,
    flat_observation_size,
    flatten_observation,
    mlp,
)
from lightning_rl.policies.normalization import ObservationNormalizer, RunningMoments
from lightning_rl.policies.weights import compared, weights_at
from lightning_rl.system.errors import ConfigurationError, check_range, closest, require

ChannelNormalization = Literal["none", "group", "layer"]
"""Of a convolution's channels, before the activation: GroupNorm (Wu and He 2018) in groups of at
least 8 channels, one group of them all, or none. There is no BatchNorm: acting and learning would
see other numbers."""


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


def of_critic(make: EncoderFactory, space: gymnasium.Space[Any]) -> Encoder:
    """Return an encoder of the critic's own, for the space of what it reads.

    Raises:
        ConfigurationError: where it cannot take that, saying whose it is.
    """
    try:
        return make(space)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The critic's own encoder, of what it reads: {error} (critic_encoder names another "
            "one than the actor's.)"
        ) from None


# --- numbers and choices ---


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
    """Read a choice, such as a goal: one number for each that there is, 1 for the one it is.

    Args:
        observation_space: Discrete or MultiDiscrete.

    Raises:
        ConfigurationError: for another space.
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
                f"OneHot reads a Discrete or MultiDiscrete observation, not {space}: name another "
                "encoder, PerceptronEncoder for numbers, NatureCNN for a picture."
            )
        before = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        # From a choice to its place among all numbers of the one-hot vector.
        self.register_buffer("offset", before - torch.tensor(start), persistent=False)
        self.size = sum(sizes)

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        batch_dims = _batch_dims(observation, self.observation_space)
        chosen = cast(Tensor, observation)
        batch = chosen.shape[:batch_dims]
        choices = chosen.reshape(-1, len(self.offset))
        features = torch.zeros(choices.shape[0], self.size, device=choices.device)
        return features.scatter(1, choices + self.offset, 1.0).view(*batch, self.size)


# --- pictures ---


PICTURES_LOOKED_AT = 64
"""How many pictures of a rollout move the running statistics of their channels, at most."""

PIXEL_EPS = 1e-3
"""Is added to the variance of a channel, whose pixels lie in [0, 1]: one that hardly varies is not
blown up, so that nothing has to be clipped."""


class PictureEncoder(Encoder):
    """What convolutional encoders have in common: a picture's way into the network.

    A picture is uint8, 0 to 255, and is divided by 255 here, not before: it costs one byte a number
    in rollouts, replays and minibatches. Or it is of floats between -1 and 1, which are taken as
    they are. Its channels are its last dimension, [H, W, C], or the first one where that is the
    smallest, [C, H, W], as in a stack of grey pictures; [H, W] has one, and a stack of K coloured
    ones [K, H, W, C] has K * C.

    A subclass sets `layers`, of pictures [M, C, H, W] of `input_shape`, and `size`.

    Args:
        observation_space: of a picture.
        normalize: scale each channel by its running mean and variance over all pixels. Where most
            of a picture is one bright ground, a network that sees large numbers there learns many
            times slower.
        crop: the part to look at, (top, left, height, width) in pixels; all where not given.
        resize: (height, width) in pixels to scale that to, smoothly; as it is where not given.

    Attributes:
        input_shape: (C, H, W), of what the layers read.

    Raises:
        ConfigurationError: for what is no picture, and a crop that is not in it.
    """

    layers: nn.Module
    scale: Tensor
    shift: Tensor

    @abstractmethod  # a subclass has layers
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
            cure = (
                "use DictEncoder, which gives each key an encoder of its own"
                if isinstance(observation_space, gymnasium.spaces.Dict)
                else "use PerceptronEncoder for numbers, OneHot for a Discrete one"
            )
            raise ConfigurationError(
                f"{name} reads one picture, a Box of uint8 [H, W, C], [H, W] or [K, H, W, C], or "
                f"of floats between -1 and 1, and the observation space is {observation_space}: "
                f"{cure}."
            )
        shape = cast(tuple[int, ...], observation_space.shape)
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
        # Bytes become numbers from 0 to 1.
        self._unit = 1.0 / 255.0 if observation_space.dtype == "uint8" else 1.0
        self.normalizer = RunningMoments(channels) if normalize else None
        if normalize:
            # What a pixel is multiplied by, and what is added: for each pixel, and in the order in
            # which pictures lie in memory, or a compiled graph could not use vector instructions.
            like = torch.ones(height, width, channels).permute(2, 0, 1)
            self.register_buffer("scale", like * self._unit)
            self.register_buffer("shift", torch.zeros_like(like))
        self.crop, self.resize = crop, resize
        if resize is not None:
            check_range(f"{name}.resize", min(resize), least=1)
            height, width = resize
        self.input_shape = (channels, height, width)

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        picture = cast(Tensor, observation)
        batch = picture.shape[: picture.dim() - len(self._axes)]
        planes = self._planes(picture.reshape(-1, *picture.shape[len(batch) :]))
        scaled = planes.float()
        if self.normalizer is not None:
            scaled = torch.addcmul(self.shift, scaled, self.scale)
        elif self._unit != 1.0:
            scaled = scaled * self._unit
        if self.resize is not None:
            size = list(self.resize)
            scaled = F.interpolate(scaled, size, mode="bilinear", antialias=True)
        features: Tensor = self.layers(scaled)
        return features.view(*batch, self.size)

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        moments = self.normalizer
        if moments is None:
            return
        pictures = cast(Tensor, observation)
        # A few of them, at regular intervals, have pixels enough, and the rest would take time.
        every = max(1, -(-len(pictures) // PICTURES_LOOKED_AT))
        some = self._planes(pictures[::every])
        moments.update(some.movedim(1, -1).flatten(0, -2).float() * self._unit)
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
        """Return convolutions for the pictures, and the shape [C, H, W] of what they make of one.

        Raises:
            ConfigurationError: for a picture too small for them, and numbers that do not fit.
        """
        name = type(self).__name__
        check_activation(activation)
        require(
            len(channels) == len(kernels) == len(strides) > 0,
            f"{name}: channels={list(channels)}, kernels={list(kernels)} and "
            f"strides={list(strides)} have one entry for each convolution, so as many.",
        )
        for of_what, numbers in (
            ("channels", channels),
            ("kernels", kernels),
            ("strides", strides),
        ):
            check_range(f"{name}.{of_what}", min(numbers), least=1)
        before, *sides = self.input_shape
        least = 1
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            least = (least - 1) * stride + kernel
        require(
            min(sides) >= least,
            f"{name}: a picture of {sides[0]}x{sides[1]} pixels is too small for "
            f"kernels={list(kernels)} and strides={list(strides)}, which need {least}x{least} at "
            f"least. Set smaller kernels or strides, or resize: [{least}, {least}], or use "
            "ImpalaCNN, which takes pictures of any size.",
        )
        layers: list[nn.Module] = []
        for after, kernel, stride in zip(channels, kernels, strides, strict=True):
            layers.append(_convolution(before, after, kernel, stride))
            layers += _channel_normalization(normalization, after)
            layers.append(ACTIVATIONS[activation]())
            sides = [(side - kernel) // stride + 1 for side in sides]
            before = after
        return layers, [before, *sides]

    def _planes(self, pictures: Tensor) -> Tensor:
        """Return the part to look at of pictures [M, ...] as [M, C, H, W], in their dtype."""
        # A view: the numbers stay channels-last, which is how convolutions are fastest.
        planes = pictures.permute(0, *(axis + 1 for axis in self._axes))
        if len(self._axes) != 3:  # grey, or a stack of coloured ones
            planes = planes.reshape(planes.shape[0], -1, *planes.shape[-2:])
        rows, columns = self._window
        return planes[:, :, rows, columns]


def is_picture(space: gymnasium.Space[Any]) -> bool:
    """Tell whether a space is one of pictures: see `PictureEncoder`."""
    if not isinstance(space, gymnasium.spaces.Box):
        return False
    if space.dtype == "uint8":
        return 2 <= len(space.shape) <= 4
    small = space.dtype.kind == "f" and bool((abs(space.low) <= 1).all() & (space.high <= 1).all())
    return small and 3 <= len(space.shape) <= 4


def picture_keys(
    space: gymnasium.Space[Any], path: tuple[str, ...] = ()
) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return which of an observation's dimensions are height and width, by the keys to a picture.

    Args:
        space: of an observation; where that is a picture itself, no key leads to it.
        path: the keys that lead to the space.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        found: dict[tuple[str, ...], tuple[int, int]] = {}
        for key, child in space.items():
            found |= picture_keys(child, (*path, key))
        return found
    if not is_picture(space):
        return {}
    height, width = _channels_and_sides(cast(tuple[int, ...], space.shape))[-2:]
    return {path: (height, width)}


def _channels_and_sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a picture in the order of channels, height, width."""
    if len(shape) == 2:
        return (0, 1)
    if len(shape) == 4:  # a stack of pictures
        return (0, 3, 1, 2)
    return (0, 1, 2) if shape[0] < min(shape[1:]) else (2, 0, 1)


class NatureCNN(PictureEncoder):
    """Three convolutions and a linear layer.

    Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning", methods.
    Differs from the paper: orthogonal weights, with a gain of sqrt(2).

    Args:
        observation_space: of a picture, see `PictureEncoder`.
        size: D, features.
        channels: of each convolution.
        kernels: their sizes, in pixels.
        strides: their steps, in pixels.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalization: of the channels of each convolution, and, where not `none`, a LayerNorm of
            the features.
        kwargs: see `PictureEncoder`.

    Raises:
        ConfigurationError: for a picture too small for the kernels, and what is no picture.
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
        **kwargs: Any,
    ) -> None:
        super().__init__(observation_space, **kwargs)
        check_range("NatureCNN.size", size, least=1)
        layers, numbers = self._convolutions(channels, kernels, strides, activation, normalization)
        layers += _to_features(math.prod(numbers), size, activation, normalization)
        self.layers = nn.Sequential(*layers)
        self.size = size


class SpatialSoftmaxCNN(PictureEncoder):
    """Convolutions that say where things are: the features are points in the picture.

    Each of the last channels becomes a probability over the places of the picture by a softmax, and
    the mean place by it, x and y from -1 (left, top) to 1, is two features. Where a task is about
    positions they are found in fewer samples, and more exactly, than by a linear layer: see
    docs/pictures.md. What a thing looks like, and how many there are, they do not say.

    Source: Levine et al. 2016, "End-to-End Training of Deep Visuomotor Policies", section 5.1; Finn
    et al. 2016, "Deep Spatial Autoencoders for Visuomotor Learning", equations 1 and 2.
    Differs from the papers: smaller convolutions, with orthogonal weights.

    Args:
        observation_space: of a picture, see `PictureEncoder`.
        points: K, of a 1x1 convolution after the others; 2K features, (x, y) of each point.
        channels: of each convolution before it.
        kernels: their sizes, in pixels.
        strides: their steps, in pixels. Large ones make for few places to choose from.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalization: of the channels of each convolution.
        kwargs: see `PictureEncoder`.

    Raises:
        ConfigurationError: for a picture too small for the kernels, and what is no picture.
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
        **kwargs: Any,
    ) -> None:
        super().__init__(observation_space, **kwargs)
        check_range("SpatialSoftmaxCNN.points", points, least=1)
        layers, numbers = self._convolutions(channels, kernels, strides, activation, normalization)
        before, *sides = numbers
        layers += [_convolution(before, points, 1, 1, gain=1.0), _MeanPlace(*sides)]
        self.layers = nn.Sequential(*layers)
        self.size = 2 * points


class _MeanPlace(nn.Module):
    """Turn pictures [M, K, H, W] of logits into the mean places [M, 2K], (x, y) of each channel."""

    places: Tensor

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        y, x = torch.meshgrid(_from_edge_to_edge(height), _from_edge_to_edge(width), indexing="ij")
        self.register_buffer("places", torch.stack((x, y), -1).reshape(-1, 2), persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        return (pictures.flatten(2).softmax(-1) @ self.places).flatten(1)


def _from_edge_to_edge(number: int) -> Tensor:
    """Return the places -1 to 1 at equal distances; the middle where there is but one."""
    return torch.linspace(-1.0, 1.0, number) if number > 1 else torch.zeros(1)


class ImpalaCNN(PictureEncoder):
    """A residual network: in each section a convolution, a pooling, and two residual blocks.

    Source: Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
    Actor-Learner Architectures", figure 3, the large architecture.

    Args:
        observation_space: of a picture, see `PictureEncoder`; of any size.
        size: D, features.
        channels: of each section, which halves the picture's sides.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalization: of the channels before each activation in the residual blocks, and, where
            not `none`, a LayerNorm of the features.
        kwargs: see `PictureEncoder`.

    Raises:
        ConfigurationError: for what is no picture, and a number below 1.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        size: int = 256,
        channels: Sequence[int] = (16, 32, 32),
        activation: str = "relu",
        normalization: ChannelNormalization = "none",
        **kwargs: Any,
    ) -> None:
        super().__init__(observation_space, **kwargs)
        check_activation(activation)
        check_range("ImpalaCNN.channels", min(channels, default=0), least=1)
        check_range("ImpalaCNN.size", size, least=1)
        before, *sides = self.input_shape
        layers: list[nn.Module] = []
        for after in channels:
            layers.append(_convolution(before, after, 3, 1, padding=1))
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            layers += [_Residual(after, activation, normalization) for _ in range(2)]
            sides = [(side + 1) // 2 for side in sides]
            before = after
        layers.append(ACTIVATIONS[activation]())
        layers += _to_features(before * math.prod(sides), size, activation, normalization)
        self.layers = nn.Sequential(*layers)
        self.size = size


class _Residual(nn.Module):
    """Add to pictures [M, C, H, W] what two convolutions make of them."""

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
    before: int,
    after: int,
    kernel: int,
    stride: int,
    padding: int = 0,
    gain: float = math.sqrt(2),
) -> nn.Conv2d:
    check_weights_fit((before * kernel**2, after))
    layer = nn.Conv2d(before, after, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(cast(Tensor, layer.bias))
    return layer


def _channel_normalization(kind: ChannelNormalization, channels: int) -> list[nn.Module]:
    if kind == "none":
        return []
    groups = 1
    if kind == "group":
        groups = max(g for g in range(1, max(1, channels // 8) + 1) if channels % g == 0)
    return [nn.GroupNorm(groups, channels)]


def _to_features(
    inputs: int, size: int, activation: str, normalization: ChannelNormalization
) -> list[nn.Module]:
    """Return the layers from the last pictures, `inputs` numbers each, to the features."""
    check_weights_fit((inputs, size))
    linear = nn.Linear(inputs, size)
    nn.init.orthogonal_(linear.weight, math.sqrt(2))
    nn.init.zeros_(linear.bias)
    normalized = [nn.LayerNorm(size)] if normalization != "none" else []
    return [nn.Flatten(), linear, *normalized, ACTIVATIONS[activation]()]


# --- several keys ---


class DictEncoder(Encoder):
    """Give each key of an observation an encoder of its own, and join what they make of it.

    Args:
        observation_space: a Dict.
        encoders: by key; of those not named, pictures get a `NatureCNN`, Discrete ones a `OneHot`,
            a Dict within the Dict a `DictEncoder`, and numbers are taken flat.
        normalize: whether those not named scale what they read by its running mean and variance.

    Raises:
        ConfigurationError: for a key that the observation has not, and for what an encoder cannot
            take, naming its key.
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
                f"DictEncoder reads a Dict of observations, and the observation space is "
                f"{observation_space}: name the encoder of that alone, NatureCNN for a picture."
            )
        given = dict(encoders or {})
        known = sorted(observation_space.keys())
        unknown = [key for key in given if key not in known]
        require(
            not unknown,
            f"DictEncoder.encoders names '{', '.join(unknown)}', and the observation has the keys "
            f"{', '.join(known)}{closest(unknown[0], known) if unknown else ''}.",
        )
        self.encoders = nn.ModuleDict()
        for key in known:
            space = observation_space[key]
            make = given.get(key) or _default_encoder(space, normalize)
            try:
                self.encoders[_module_name(key)] = make(space)
            except ConfigurationError as error:
                raise ConfigurationError(f"Encoder of the observation's '{key}': {error}") from None
        self.size = sum(encoder.size for encoder in self._children().values())

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        tree = cast(TensorDict, observation)
        return torch.cat([one(tree.get(key)) for key, one in self._children().items()], -1)

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        for key, encoder in self._children().items():
            encoder.update_normalization(cast(TensorDict, observation).get(key))

    def _children(self) -> dict[str, Encoder]:
        keys = sorted(cast(gymnasium.spaces.Dict, self.observation_space).keys())
        return {key: cast(Encoder, self.encoders[_module_name(key)]) for key in keys}


def _module_name(key: str) -> str:
    """Return the name of a module for a key: without dots, and no name of a `ModuleDict`'s own."""
    return f"{key}/" if hasattr(nn.ModuleDict, key) or key == "training" else key.replace(".", "/")


def _default_encoder(space: gymnasium.Space[Any], normalize: bool) -> EncoderFactory:
    if is_picture(space):
        return partial(NatureCNN, normalize=normalize)
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        return OneHot
    if isinstance(space, gymnasium.spaces.Dict):
        return partial(DictEncoder, normalize=normalize)
    return partial(PerceptronEncoder, normalize=normalize)


# --- weights that stay as they are ---


class FrozenEncoder(Encoder):
    """An encoder with weights from a local file, which no training changes.

    Its parameters have no gradient, it stays in eval mode whatever mode the policy is in, and a
    line says so when it is made. A rollout or a replay can hold what it makes of pictures in their
    stead: see `EncodedObservations`.

    Args:
        observation_space: of what it reads.
        encoder: makes the encoder whose weights these are.
        weights: a file of a state dict, of `torch.save` or safetensors, or a checkpoint of this
            package; no code in it is run.
        prefix: what the names of its weights begin with in the file, such as `policy.encoder.` in
            a checkpoint.

    Raises:
        ConfigurationError: where the file cannot be read, or holds other weights.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        encoder: EncoderFactory,
        weights: str | Path,
        prefix: str = "",
    ) -> None:
        super().__init__(observation_space)
        with torch.random.fork_rng(devices=[]):  # what it draws is replaced at once
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
            f"FrozenEncoder: the weights of {weights} are not those of a "
            f"{type(self.inner).__name__} with these settings: {report}. Give `encoder` the "
            "settings that they were trained with, and `prefix` what their names begin with.",
        )
        self.inner.load_state_dict(state)
        self.inner.requires_grad_(False)
        self.inner.eval()
        rank_zero_info(
            f"{type(self.inner).__name__} is frozen, with the weights of {weights}: "
            f"{sum(p.numel() for p in self.inner.parameters()):,} parameters that are not trained."
        )

    def train(self, mode: bool = True) -> "FrozenEncoder":
        """Stay in eval mode."""
        return super().train(False)

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        with torch.no_grad():
            return cast(Tensor, self.inner(observation))


def _batch_dims(observation: Tensor | TensorDict, space: gymnasium.Space[Any]) -> int:
    """Return how many dimensions of an observation [*batch, ...] are those of the batch."""
    if isinstance(observation, Tensor):
        return observation.dim() - len(space.shape or ())
    return len(observation.batch_size)
