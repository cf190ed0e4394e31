"""A head of a VLA: a logistic distribution for each number of a chunk of actions."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_rl import ActionHead
from lightning_rl.extend.rollout import FieldSpec


class LogisticHead(ActionHead):
    """A logistic distribution with a learnt scale: heavier tails than a Gaussian.

    Args:
        space, level, statistics: see `ActionHead`.
        slot_size: D, size of the backbone's slots.
        log_scale_init: initial logarithm of the scale, in units of the bounds.
    """

    def __init__(
        self,
        space: gymnasium.spaces.Box,
        level: Any,
        statistics: Any,
        slot_size: int,
        log_scale_init: float = -2.0,
    ) -> None:
        super().__init__(space, level, statistics)
        self.to_mean = nn.Linear(slot_size, 1)
        self.log_scale = nn.Parameter(torch.full((self.num_slots,), log_scale_init))

    @property
    def fields(self) -> dict[str, FieldSpec]:
        return {"unit_action": ((self.num_slots,), torch.float32)}

    def draw_noise(self, batch: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.empty(*batch, self.num_slots, device=self.center.device)
        return uniform.uniform_(1e-6, 1 - 1e-6, generator=generator).logit()

    def sample(self, features: Any, noise: Tensor | None) -> dict[str, Tensor]:
        mean = self.to_mean(features.slots).squeeze(-1)
        unit = mean if noise is None else mean + self.log_scale.exp() * noise
        log_prob = self._log_prob(mean, unit)
        return {"action": self.to_action(unit), "sample_log_prob": log_prob, "unit_action": unit}

    def log_prob_and_entropy(
        self, features: Any, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        mean = self.to_mean(features.slots).squeeze(-1)
        entropy = self.sum_by_part((self.log_scale + 2.0).expand_as(mean))
        return self._log_prob(mean, fields["unit_action"]), entropy

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        return {"unit_action": self.to_unit(action)}

    def _log_prob(self, mean: Tensor, unit: Tensor) -> Tensor:
        z = (unit - mean) * (-self.log_scale).exp()
        return self.sum_by_part(-z - self.log_scale - 2 * softplus(-z))
