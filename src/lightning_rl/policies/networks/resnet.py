"""A residual network for pictures, with the weights of torchvision, timm or Hugging Face."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from lightning_rl.policies.networks.encoders import PictureEncoder
from lightning_rl.policies.weights import fitting, weights_at
from lightning_rl.system.errors import require

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
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return planes * scale[:, None, None] + shift[:, None, None]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, named as in torchvision."""

    def __init__(
        self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = norm(after)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, norm(after))

    def forward(self, planes: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(self.bn1(self.conv1(planes)).relu()))
        shortcut = planes if self.downsample is None else self.downsample(planes)
        return (hidden + shortcut).relu()  # type: ignore[no-any-return]  # nn.Module


class ResNet(nn.Sequential):
    """The convolutions of a residual network: pictures [M, 3, H, W] to [M, 512, H / 32, W / 32].

    Source: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1. Names of layers
    are torchvision's.

    Args:
        blocks: blocks of each section, see `BLOCKS`.
        norm: makes the normalisation layer for a number of channels.
    """

    def __init__(
        self,
        blocks: Sequence[int] = BLOCKS["resnet18"],
        norm: Callable[[int], nn.Module] = FrozenBatchNorm,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = 64
        for i, count in enumerate(blocks):
            after = 64 * 2**i
            section = [BasicBlock(before, after, 2 if i else 1, norm)]
            section += [BasicBlock(after, after, 1, norm) for _ in range(count - 1)]
            self.add_module(f"layer{i + 1}", nn.Sequential(*section))
            before = after


class ResNet18(PictureEncoder):
    """ResNet-18, the mean of its last planes: 512 features.

    Its batch normalisation is frozen: with the statistics of a batch, outputs would differ between
    acting and learning. Colors are scaled as for networks trained on ImageNet.

    Args:
        observation_space: observation space of a picture, see `PictureEncoder`.
        weights: file or directory of weights of torchvision, timm or Hugging Face; no code in it
            runs. Default: random weights.

    Raises:
        ConfigurationError: if the space is not a picture of three colors, or for other weights.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        weights: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(observation_space, **kwargs)
        require(
            self.input_shape[0] == 3,
            f"ResNet18 reads one picture of three colors, but this one has {self.input_shape[0]} "
            "channels: use ImpalaCNN.",
        )
        network = ResNet()
        if weights is not None:
            found = torchvision_names(weights_at(weights, "ResNet18.weights"))
            network.load_state_dict(fitting(network.state_dict(), found, weights, strict=True))
        self.layers = nn.Sequential(_Scaled(), network, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.size = 512


class _Scaled(nn.Module):
    """Scale pictures [M, 3, H, W] from 0 to 1 by the statistics of ImageNet."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, numbers in zip(("mean", "std"), IMAGENET, strict=True):
            self.register_buffer(name, torch.tensor(numbers).view(3, 1, 1), persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        return (pictures - self.mean) / self.std


def torchvision_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights of a ResNet by torchvision, timm or Hugging Face, without its classifier."""
    renamed = {}
    for name, value in weights.items():
        for pattern, other in _HUGGING_FACE:
            name = re.sub(pattern, other, name)
        if not name.startswith(("fc.", "classifier.")) and not name.endswith("batches_tracked"):
            renamed[name] = value
    return renamed
