"""Small backbones: for pictures, with 100,000 parameters, and for numbers only."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.extend.errors import require
from lightning_rl.extend.policies import mlp
from lightning_rl.extensions.vla.backbone import Backbone, Features, refuse_unknown_tokens

SHARPNESS = 5.0
"""Factor of feature maps before the softmax over pixels, which would be flat otherwise."""


NUMBERS = ("proprio", "condition")
"""Keys of an observation that bypass the convolution."""


class TinyVLA(Backbone):
    """A convolution modulated by the instruction (FiLM), followed by a spatial soft-argmax.

    Source: Perez et al. 2018 (FiLM); Levine et al. 2016 (soft-argmax). Further cameras, and depth
    pictures of the size of `rgb`, are more channels. `proprio` and `condition` are inputs of the
    last layers.

    Args:
        channels: channels of the convolution's layers.
        hidden_size: E, units of the layers after it.
        slot_size: D.
        vocabulary: upper bound (exclusive) of instruction tokens.

    Raises:
        ConfigurationError: for a size below 1.
    """

    reads = (*Backbone.reads, "condition")
    blocks = ("convolution", "trunk", "to_slots")
    vocabulary: int

    def __init__(
        self,
        channels: tuple[int, int, int] = (16, 32, 32),
        hidden_size: int = 128,
        slot_size: int = 32,
        vocabulary: int = 64,
    ) -> None:
        super().__init__()
        require(
            min(*channels, hidden_size, slot_size, vocabulary) >= 1,
            f"Sizes must be at least 1, got channels={channels}, hidden_size={hidden_size}, "
            f"slot_size={slot_size}, vocabulary={vocabulary}.",
        )
        self.channels, self.vocabulary = channels, vocabulary
        self.slot_size, self.summary_size = slot_size, hidden_size

    def build(self, observation: TensorDict, num_slots: int) -> None:
        first, second, third = self.channels
        # Cameras and depth decide the number of channels.
        self.convolution = nn.Sequential(
            nn.Conv2d(len(_planes(observation)[0]), first, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(second, third, 3, padding=1),
        )
        self.words = self.film = None
        if "language" in observation.keys():
            words = observation["language"].shape[-1]
            self.words = nn.Embedding(self.vocabulary, 16)
            self.film = nn.Sequential(
                nn.Linear(16 * words, 64), nn.ReLU(), nn.Linear(64, 2 * third)
            )
        self.numbers = [key for key in NUMBERS if key in observation.keys()]
        numbers = sum(observation[key].shape[-1] for key in self.numbers)
        language_size = 64 if self.film is not None else 0
        self.told = nn.Linear(2 * third, language_size) if language_size else None
        self.trunk = nn.Sequential(
            nn.Linear(2 * third + numbers + language_size, self.summary_size),
            nn.ReLU(),
            nn.Linear(self.summary_size, self.summary_size),
            nn.ReLU(),
        )
        self.to_slots = nn.Linear(self.summary_size, num_slots * self.slot_size)

    def forward(self, observation: TensorDict) -> Features:
        maps = self.convolution(_planes(observation))
        inputs = []
        if self.film is not None and self.words is not None and self.told is not None:
            modulation = self.film(self._embedded(observation["language"]).flatten(1))
            scale, shift = modulation.chunk(2, 1)
            # 1 + scale, so that a new modulation changes little.
            maps = maps * (1.0 + scale[..., None, None]) + shift[..., None, None]
            inputs.append(self.told(modulation).relu())
        inputs.append(soft_argmax(maps * SHARPNESS))
        inputs += [observation[key].float() for key in self.numbers]
        summary = self.trunk(torch.cat(inputs, 1))
        slots = self.to_slots(summary).unflatten(1, (-1, self.slot_size))
        return Features(slots, summary)

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self.words is not None
        try:
            return self.words(tokens)  # type: ignore[no-any-return]  # nn.Module
        # On the CPU; a GPU reports an unknown token later, by an assertion of the device.
        except IndexError:
            refuse_unknown_tokens(tokens, self.vocabulary)
            raise


class PerceptronBackbone(Backbone):
    """A perceptron on `proprio` and `condition`, for observations without pictures.

    Args:
        hidden_sizes: units of the hidden layers; the last ones are the summary.
        slot_size: D.

    Raises:
        ConfigurationError: for a size below 1.
    """

    reads = NUMBERS
    needs_pictures = False

    def __init__(self, hidden_sizes: Sequence[int] = (64, 64), slot_size: int = 8) -> None:
        super().__init__()
        require(
            min(*hidden_sizes, slot_size) >= 1 and len(hidden_sizes) > 0,
            f"Sizes must be at least 1, and there must be a hidden layer, got "
            f"hidden_sizes={list(hidden_sizes)}, slot_size={slot_size}.",
        )
        self.hidden_sizes = tuple(hidden_sizes)
        self.slot_size, self.summary_size = slot_size, hidden_sizes[-1]

    def build(self, observation: TensorDict, num_slots: int) -> None:
        self.numbers = [key for key in NUMBERS if key in observation.keys()]
        size = sum(observation[key].shape[-1] for key in self.numbers)
        *hidden, last = self.hidden_sizes
        self.trunk = nn.Sequential(mlp(size, hidden, last, initialization="fan_in"), nn.Tanh())
        self.to_slots = nn.Linear(last, num_slots * self.slot_size)

    def forward(self, observation: TensorDict) -> Features:
        summary = self.trunk(torch.cat([observation[key].float() for key in self.numbers], 1))
        slots = self.to_slots(summary).unflatten(1, (-1, self.slot_size))
        return Features(slots, summary)


def soft_argmax(maps: Tensor) -> Tensor:
    """Return the mean place of each map [B, C, H, W], x and y in [-1, 1], as [B, 2 * C]."""
    height, width = maps.shape[-2:]
    weight = maps.flatten(2).softmax(-1).unflatten(-1, (height, width))
    x = torch.linspace(-1.0, 1.0, width, device=maps.device)
    y = torch.linspace(-1.0, 1.0, height, device=maps.device)
    return torch.cat(((weight.sum(2) * x).sum(-1), (weight.sum(3) * y).sum(-1)), 1)


def _planes(observation: TensorDict) -> Tensor:
    rgb: Tensor = observation["rgb"]
    if rgb.dim() == 5:
        # Cameras become channels.
        rgb = rgb.permute(0, 2, 3, 1, 4).flatten(3)
    # To 0 to 2, before the mean is taken off below.
    planes = rgb.permute(0, 3, 1, 2).to(torch.float32).div(127.5)
    if "depth" in observation.keys():
        depth: Tensor = observation["depth"]
        require(
            depth.shape[-2:] == planes.shape[-2:],
            f"TinyVLA needs depth pictures of the size of rgb, {list(planes.shape[-2:])}; depth "
            f"is {list(depth.shape[-2:])}. Resize one of them in a wrapper, or use another "
            "backbone.",
        )
        planes = torch.cat((planes, depth if depth.dim() == 4 else depth[:, None]), 1)
    # Shift a plain background to about 0, which doubles the speed of learning.
    return planes - planes.mean((2, 3), keepdim=True)
