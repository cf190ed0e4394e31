"""Action heads: distributions over action chunks, as tokens or Gaussians."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import gymnasium
import torch
from torch import Tensor, nn

from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.rollout import FieldSpec
from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.functional import bounded

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
"""Constant of the log-density of a normal distribution."""

Level = Literal["token", "action", "chunk"]
"""Granularity of the log-prob: per number, per action or per chunk."""

Statistics = tuple[Tensor, Tensor] | None
"""The action values for -1 and 1, see `action_bounds`."""


class ActionHead(nn.Module, ABC):
    """A distribution over action chunks [K, A] within the bounds of a Box.

    Args:
        space: space of one chunk, [K, *A]; its bounds, or `statistics`, correspond to -1 and 1.
        level: `token` gives a log-prob per number, [B, K * A]; other levels one per action, [B, K].
        statistics: see `action_bounds`.

    Attributes:
        has_entropy: whether the entropies are known; otherwise they are zeros.
        noise_size: numbers of the initial noise of a flow, 0 for other heads.
        clone_noise_size: numbers of the noise of `clone_loss`.
        center, scale: [L], an action is center + scale * unit.
        constant_buffers: buffers that training does not change.
        real_time_methods: the methods of `RealTime` that fit the head.
    """

    center: Tensor
    scale: Tensor
    constant_buffers = ("center", "scale")
    real_time_methods: tuple[str, ...] = ("skip",)
    has_entropy = True
    noise_size = 0
    clone_noise_size = 0

    def __init__(
        self, space: gymnasium.spaces.Box, level: Level, statistics: Statistics = None
    ) -> None:
        super().__init__()
        self.joint_ratio = level == "chunk"
        self.chunk_size, self.shape = space.shape[0], space.shape
        self.action_size = math.prod(space.shape[1:])
        self.num_slots = self.chunk_size * self.action_size
        self.num_parts = self.num_slots if level == "token" else self.chunk_size
        low, high = action_bounds(space, statistics)
        # State: the data that they come from may change.
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("scale", (high - low) / 2)

    @property
    @abstractmethod
    def fields(self) -> dict[str, FieldSpec]:
        """Fields that `sample` returns with the action, and `log_prob_and_entropy` reads."""

    def draw_noise(self, batch: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Draw noise [*batch, Z] for `sample`."""
        noise = torch.empty(*batch, self.num_slots, device=self.center.device)
        return noise.normal_(generator=generator)

    def draw_clone_noise(
        self, batch: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw noise [*batch, Z] for `clone_loss`; Z is `clone_noise_size`."""
        return torch.empty(*batch, 0, device=self.center.device)

    @abstractmethod
    def sample(self, features: Features, noise: Tensor | None) -> dict[str, Tensor]:
        """Return `action` [B, K, *A], `sample_log_prob` [B, parts] and `fields`.

        Args:
            features: features of the observations [B].
            noise: [B, Z], from `draw_noise`; None for the mode. A flow has no log-prob of its mode.
        """

    @abstractmethod
    def log_prob_and_entropy(
        self, features: Features, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy [B, parts] of the chunk in `fields`."""

    def clone_loss(
        self, features: Features, action: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of imitating given actions [B, K, *A], and the entropy, [B, parts].

        `noise` [B, Z] comes from `draw_clone_noise`; None if Z = 0.
        """
        log_prob, entropy = self.log_prob_and_entropy(features, self.fields_of(action))
        return -log_prob, entropy

    @abstractmethod
    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        """Return `fields` for given actions [B, K, *A]."""

    def sum_by_part(self, value: Tensor) -> Tensor:
        """Sum numbers [B, L] to parts [B, parts]."""
        parts: Tensor = value.unflatten(1, (self.num_parts, -1))
        return parts.sum(-1)

    def to_action(self, unit: Tensor) -> Tensor:
        """Return the actions [B, K, *A] for numbers [B, L] in units of the bounds."""
        action: Tensor = torch.addcmul(self.center, self.scale, unit).unflatten(1, self.shape)
        return action

    def to_unit(self, action: Tensor) -> Tensor:
        """Return actions [B, K, *A] as numbers [B, L] in units of the bounds."""
        return (action.flatten(1) - self.center) / self.scale


HeadFactory = Callable[[gymnasium.spaces.Box, Level, Statistics, int], ActionHead]
"""Makes a head from the space of a chunk, the level, the statistics and D, the size of a slot."""


class TokenHead(ActionHead):
    """One of n bins for each number of a chunk, all from one pass ("parallel decoding").

    The action is the center of its bin. Sources: Brohan et al. 2023, "RT-2" (bins); Kim et al.
    2025, "Fine-Tuning Vision-Language-Action Models" (parallel decoding).

    Args:
        space, level, statistics: see `ActionHead`.
        to_logits: maps slots [B, L, D] to logits [B, L, n].
        num_bins: n; bin centers are equidistant, from bound to bound.
        temperature: divides the logits, in acting and training.
    """

    def __init__(
        self,
        space: gymnasium.spaces.Box,
        level: Level,
        to_logits: nn.Module,
        num_bins: int,
        temperature: float,
        statistics: Statistics = None,
    ) -> None:
        super().__init__(space, level, statistics)
        self.to_logits, self.num_bins, self.temperature = to_logits, num_bins, temperature

    @property
    def fields(self) -> dict[str, FieldSpec]:
        return {"action_tokens": ((self.num_slots,), torch.int64)}

    def draw_noise(self, batch: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        size = self.num_slots * self.num_bins
        exponential = torch.empty(*batch, size, device=self.center.device)
        return exponential.exponential_(generator=generator).log_().neg_()

    def sample(self, features: Features, noise: Tensor | None) -> dict[str, Tensor]:
        log_probs = self._log_probs(features)
        # Gumbel noise: the largest sum is a sample, and without noise the mode.
        tokens = (log_probs if noise is None else log_probs + noise.view_as(log_probs)).argmax(-1)
        # The centers of the bins reach from -1 to 1, both included.
        unit = tokens.to(torch.float32) * (2.0 / (self.num_bins - 1)) - 1.0
        return {
            "action": self.to_action(unit),
            "sample_log_prob": self._log_prob_of(log_probs, tokens),
            "action_tokens": tokens,
        }

    def log_prob_and_entropy(
        self, features: Features, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        log_probs = self._log_probs(features)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return self._log_prob_of(log_probs, fields["action_tokens"]), self.sum_by_part(entropy)

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        # The nearest bins.
        place = (self.to_unit(action) + 1.0) * ((self.num_bins - 1) / 2)
        return {"action_tokens": place.round().clamp(0, self.num_bins - 1).to(torch.int64)}

    def _log_probs(self, features: Features) -> Tensor:
        logits = features.guided(lambda f: self.to_logits(f.slots))
        # Log-probs need more digits than bfloat16 has.
        return (logits.float() / self.temperature).log_softmax(-1)

    def _log_prob_of(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        return self.sum_by_part(log_probs.gather(-1, tokens[..., None]).squeeze(-1))


class GaussianHead(ActionHead):
    """A normal distribution for each number of a chunk, with a state-independent deviation.

    Args:
        space, level, statistics: see `ActionHead`.
        slot_size: D.
        log_std_init: initial log standard deviation, in units of the bounds.
        temperature: multiplies the deviation, in acting and training.
    """

    def __init__(
        self,
        space: gymnasium.spaces.Box,
        level: Level,
        slot_size: int,
        log_std_init: float,
        temperature: float,
        statistics: Statistics = None,
    ) -> None:
        super().__init__(space, level, statistics)
        # The range to which `_distribution` clamps it.
        check_range("log_std_init", log_std_init, minimum=-5.0, maximum=2.0)
        self.temperature = temperature
        self.to_mean = nn.Linear(slot_size, 1)
        self.log_std = nn.Parameter(torch.full((self.num_slots,), float(log_std_init)))

    @property
    def fields(self) -> dict[str, FieldSpec]:
        return {"unit_action": ((self.num_slots,), torch.float32)}

    def sample(self, features: Features, noise: Tensor | None) -> dict[str, Tensor]:
        mean, log_std = self._distribution(features)
        unit = mean if noise is None else torch.addcmul(mean, noise, log_std.exp())
        return {
            "action": self.to_action(unit),
            "sample_log_prob": self._log_prob_of(mean, log_std, unit),
            "unit_action": unit,
        }

    def log_prob_and_entropy(
        self, features: Features, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = self._distribution(features)
        entropy = (log_std + 0.5 + HALF_LOG_TWO_PI).expand_as(mean)
        return self._log_prob_of(mean, log_std, fields["unit_action"]), self.sum_by_part(entropy)

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        return {"unit_action": self.to_unit(action)}

    def _distribution(self, features: Features) -> tuple[Tensor, Tensor]:
        mean = features.guided(lambda f: self.to_mean(f.slots)).squeeze(-1)
        # A factor of the deviation is a summand of its logarithm.
        return mean, bounded(self.log_std, -5.0, 2.0) + math.log(self.temperature)

    def _log_prob_of(self, mean: Tensor, log_std: Tensor, unit: Tensor) -> Tensor:
        standardized = (unit - mean) * (-log_std).exp()
        return self.sum_by_part(-0.5 * standardized.square() - log_std - HALF_LOG_TWO_PI)


def action_bounds(space: gymnasium.spaces.Box, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Return the action values for -1 and for 1, for each number of a chunk, two tensors [L].

    Args:
        space: space of one chunk, [K, *A]; its bounds are used without statistics.
        statistics: the values for -1 and for 1 of one action, [A] each.

    Raises:
        ConfigurationError: for infinite bounds.
    """
    if statistics is not None:
        # The values of one action hold for each action of the chunk.
        low, high = (
            bound.float().view(space.shape[1:]).expand(space.shape) for bound in statistics
        )
        return low.flatten(), high.flatten()
    low, high = (torch.as_tensor(bound).float() for bound in (space.low, space.high))
    require(
        bool((low.isfinite() & high.isfinite() & (low < high)).all()),
        "A VLA's actions need finite bounds, low < high; the action space has "
        f"{low.flatten().tolist()} and {high.flatten().tolist()}. Give the task's action term a "
        "clip, wrap the env, or give action_statistics.",
    )
    return low.flatten(), high.flatten()
