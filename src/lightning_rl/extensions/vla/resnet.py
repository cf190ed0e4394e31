"""Residual networks for pictures, with the weights of torchvision, Hugging Face or HIL-SERL."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl import Encoder
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import PictureEncoder
from lightning_rl.extensions.vla.weight_files import fitting, weights_at
from lightning_rl.kwargs import ResNetEncoderKwargs, Unpack

Pool = Literal["mean", "none"]
"""Features of a picture: the mean of the last planes, or all their numbers."""

CHANNELS = 512
"""Channels of the last planes."""

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""Residual blocks of each section, by the name of the network."""

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of the colors, 0 to 1, in the training of such networks."""

_HUGGING_FACE = (
    (r"^(resnet\.)?embedder\.embedder\.convolution\.", "conv1."),
    (r"^(resnet\.)?embedder\.embedder\.normalization\.", "bn1."),
    (r"^(resnet\.)?encoder\.stages\.(\d)\.layers\.", lambda m: f"layer{int(m[2]) + 1}."),
    (r"\.layer\.(\d)\.convolution\.", lambda m: f".conv{int(m[1]) + 1}."),
    (r"\.layer\.(\d)\.normalization\.", lambda m: f".bn{int(m[1]) + 1}."),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
)
"""Names of Hugging Face's ResNet, and of torchvision's."""

_HIL_SERL = (
    (r"^embedder\.0\.", "conv1."),
    (r"^embedder\.1\.", "bn1."),
    (r"^encoder\.stages\.(\d)\.", lambda m: f"layer{int(m[1]) + 1}.0."),
    (r"\.norm(\d)\.", r".bn\1."),
    (r"\.shortcut\.", ".downsample."),
    (r"\.conv\.weight$", ".weight"),
)
"""Names of LeRobot's conversion of HIL-SERL's ResNet-10, and of torchvision's."""


class FrozenBatchNorm(nn.Module):
    """Batch normalisation with fixed statistics and factors of earlier training."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.ones(channels))
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.zeros(channels))

    def forward(self, planes: Tensor) -> Tensor:
        # Folded into a factor and a shift: two operations on the planes instead of four.
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return planes * scale[:, None, None] + shift[:, None, None]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, named as in torchvision; `jax_pad`: see `ResNet`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        norm: Callable[[int], nn.Module],
        jax_pad: bool = False,
    ) -> None:
        super().__init__()
        # torch pads both sides alike; JAX, behind.
        self._pads_itself = jax_pad and stride == 2
        padding = 0 if self._pads_itself else 1
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, norm(outputs))

    def forward(self, planes: Tensor) -> Tensor:
        padded = _padded(planes) if self._pads_itself else planes
        hidden = self.bn2(self.conv2(self.bn1(self.conv1(padded)).relu()))
        shortcut = planes if self.downsample is None else self.downsample(planes)
        return (hidden + shortcut).relu()  # type: ignore[no-any-return]  # nn.Module


def _padded(planes: Tensor, value: float = 0.0) -> Tensor:
    """Pad planes for windows of 3 pixels with a stride of 2, as JAX's padding `SAME` does."""
    height, width = planes.shape[-2:]
    # An even side gets one pixel behind, an odd side one on both ends.
    return F.pad(planes, (width % 2, 1, height % 2, 1), value=value)


class _SamePool(nn.MaxPool2d):
    def forward(self, planes: Tensor) -> Tensor:
        # The padding must never be the maximum.
        return cast(Tensor, super().forward(_padded(planes, -torch.inf)))


class ResNet(nn.Sequential):
    """The convolutions of a residual network: pictures [M, 3, H, W] to [M, 512, H / 32, W / 32].

    Source: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1. Names of layers
    are torchvision's.

    Args:
        blocks: blocks of each section, see `BLOCKS`.
        norm: makes the normalisation layer for a number of channels.
        jax_pad: pad windows with a stride of 2 behind, if a side is even, as in JAX.
    """

    def __init__(
        self,
        blocks: Sequence[int] = BLOCKS["resnet18"],
        norm: Callable[[int], nn.Module] = FrozenBatchNorm,
        jax_pad: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU()
        self.maxpool = _SamePool(3, 2) if jax_pad else nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for i, count in enumerate(blocks):
            outputs = 64 * 2**i
            # The pool has halved the planes of the first section already.
            section = [BasicBlock(inputs, outputs, 2 if i else 1, norm, jax_pad)]
            section += [BasicBlock(outputs, outputs, 1, norm) for _ in range(count - 1)]
            self.add_module(f"layer{i + 1}", nn.Sequential(*section))
            inputs = outputs


class ResNetEncoder(PictureEncoder):
    """Base class of residual networks as encoders, with weights from a file, frozen or trained.

    Colors are scaled as for networks trained on ImageNet.

    Args:
        observation_space: observation space of a picture, see `PictureEncoder`.
        weights: file or directory of weights; no code in it runs. Default: random weights.
        frozen: do not train the weights; `EncodedObservations` then stores features instead of
            pictures.
        pool: `mean`, 512 features; or `none`, all numbers of the last planes [512, H / 32, W / 32],
            which keep positions: see `SpatialEmbedding`.

    Raises:
        ConfigurationError: if the space is not a picture of three colors, for other weights, and
            without weights that could be frozen.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        weights: str | None = None,
        frozen: bool = False,
        pool: Pool = "mean",
        **kwargs: Unpack[ResNetEncoderKwargs],
    ) -> None:
        super().__init__(observation_space, **kwargs)
        name = type(self).__name__
        channels, *sides = self.input_shape
        require(
            channels == 3,
            f"{name} reads one picture of three colors, but this one has {channels} channels: use "
            "ImpalaCNN.",
        )
        require(
            not frozen or weights is not None,
            f"{name}: frozen is true, but there are no weights: name the file of their weights, or "
            "set frozen: false.",
        )
        network = self.network()
        if weights is not None:
            state_dict = torchvision_names(weights_at(weights, f"{name}.weights"))
            network.load_state_dict(fitting(network.state_dict(), state_dict, weights))
        pooled = [nn.AdaptiveAvgPool2d(1)] if pool == "mean" else []
        self.layers = nn.Sequential(_Scaled(), network, *pooled, nn.Flatten())
        self.requires_grad_(not frozen)
        # Five halvings, each rounded up.
        height, width = (-(-side // 32) for side in sides)
        self.size = CHANNELS * (1 if pool == "mean" else height * width)

    def network(self) -> ResNet:
        """Return the network with random weights."""
        return ResNet()


class ResNet18(ResNetEncoder):
    """ResNet-18, with weights of torchvision, timm or Hugging Face; see `ResNetEncoder`.

    Its batch normalisation is frozen: with the statistics of a batch, outputs would differ between
    acting and learning.
    """


class ResNet10(ResNetEncoder):
    """ResNet-10 with GroupNorm, the network of HIL-SERL; see `ResNetEncoder`.

    It reads the weights of LeRobot's conversion, helper2424/resnet10. Source: Luo et al. 2024,
    HIL-SERL.
    """

    def network(self) -> ResNet:
        return ResNet((1, 1, 1, 1), partial(nn.GroupNorm, 4), jax_pad=True)


class SpatialEmbedding(Encoder):
    """Weighted sums of the planes of a residual network, a linear layer, LayerNorm and tanh.

    Each of the 512 planes has `sums` sums over its places, with weights of their own. It reads the
    features of a frozen `ResNet10` or `ResNet18` with `pool: none` (see `EncodedObservations`), and
    is trained. Source: Luo et al. 2024, HIL-SERL (`SpatialLearnedEmbeddings`); differs: no dropout.

    Args:
        observation_space: a Box of the features [512 * P] of P places.
        size: D, number of features.
        sums: sums per plane.

    Raises:
        ConfigurationError: for another space, or a number below 1.
    """

    def __init__(
        self, observation_space: gymnasium.Space[Any], size: int = 256, sums: int = 8
    ) -> None:
        super().__init__(observation_space)
        check_range("SpatialEmbedding.size", size, minimum=1)
        check_range("SpatialEmbedding.sums", sums, minimum=1)
        shape = observation_space.shape or (0,)
        require(
            len(shape) == 1 and shape[0] > 0 and shape[0] % CHANNELS == 0,
            f"SpatialEmbedding reads features of {CHANNELS} planes, a Box [{CHANNELS} * places], "
            f"but the observation is {observation_space}: let EncodedObservations make them, by a "
            "ResNet10 with pool: none.",
        )
        places = shape[0] // CHANNELS
        # Sums over this many places keep a variance of 1.
        self.kernel = nn.Parameter(torch.randn(CHANNELS, places, sums) * places**-0.5)
        linear = nn.Linear(CHANNELS * sums, size)
        self.layers = nn.Sequential(linear, nn.LayerNorm(size), nn.Tanh())
        self.size = size

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        planes = cast(Tensor, observation).unflatten(-1, self.kernel.shape[:2])
        sums = torch.einsum("...cp,cpf->...cf", planes, self.kernel)
        return cast(Tensor, self.layers(sums.flatten(-2)))


class _Scaled(nn.Module):
    """Scale pictures [M, 3, H, W] from 0 to 1 by the statistics of ImageNet."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, numbers in zip(("mean", "std"), IMAGENET, strict=True):
            # Constants, which files of weights do not have.
            self.register_buffer(name, torch.tensor(numbers).view(3, 1, 1), persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        return (pictures - self.mean) / self.std


def torchvision_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights of a ResNet of any of these sources, without its classifier."""
    patterns = _HIL_SERL if "embedder.0.weight" in weights else _HUGGING_FACE
    renamed = {}
    for name, value in weights.items():
        for pattern, other in patterns:
            name = re.sub(pattern, other, name)
        # The classifier is not used; batches_tracked only counts steps of training.
        if not name.startswith(("fc.", "classifier.")) and not name.endswith("batches_tracked"):
            renamed[name] = value
    return renamed
