"""Distributions over continuous actions, and the choice of one for an action space."""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.functional import bounded
from lightning_rl.policies.distributions.base import ActionDistribution, Categorical, Fields, summed
from lightning_rl.policies.distributions.correlated import HALF_LOG_TWO_PI, CorrelatedNoise
from lightning_rl.policies.distributions.joint import JointDistribution
from lightning_rl.policies.distributions.unit_actions import (
    BOUND_THE_SPACE,
    LARGEST_BOUND,
    Squashing,
)
from lightning_rl.rollout.structured_actions import StructuredActions, flat_actions
from lightning_rl.system.errors import ConfigurationError, require

LogStd = Literal["parameter", "state_dependent"]
"""The log standard deviation of a Gaussian: a parameter, or an output of the network."""


def distribution_for(
    space: gymnasium.Space[Any],
    *,
    squash: bool,
    rescale: bool = True,
    log_std_init: float,
    log_std_bounds: Sequence[float],
    noise_correlation: float = 0.0,
    log_std: LogStd = "parameter",
) -> ActionDistribution:
    """Choose the distribution for an action space.

    With `rescale`, the Gaussian of a bounded Box is over [-1, 1] and scaled to the bounds, unless
    the bounds are -1 and 1. A Box with only some bounded entries is not scaled, with a warning.

    Raises:
        ConfigurationError: for an unsupported action space, or `squash` for discrete actions.
    """
    space = flat_actions(space)
    gaussian = partial(
        distribution_for,
        squash=squash,
        rescale=rescale,
        log_std_init=log_std_init,
        log_std_bounds=log_std_bounds,
        noise_correlation=noise_correlation,
        log_std=log_std,
    )
    continuous: dict[str, Any] = {"squash": squash, "noise_correlation": noise_correlation}
    if log_std != "parameter":
        continuous["log_std"] = log_std
    if isinstance(space, StructuredActions):
        boxes = [part for part in space.parts if not part.counts]
        # Settings of continuous actions need one Box at least.
        _refuse_for_choices(space, {} if boxes else continuous)
        parts = [
            Categorical(part.counts, (len(part.counts),)) if part.counts else gaussian(part.space)
            for part in space.parts
        ]
        return JointDistribution(space.parts, parts)
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        settings = log_std_init, log_std_bounds, noise_correlation, log_std
        if squash:
            return TanhGaussian(space, *settings)
        if rescale and _needs_scaling(space):
            return RescaledGaussian(space, *settings)
        return DiagonalGaussian(space.shape, *settings)
    _refuse_for_choices(space, continuous)
    if isinstance(space, gymnasium.spaces.Discrete):
        return Categorical([int(space.n)], ())
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return Categorical([int(n) for n in space.nvec], space.shape)
    raise ConfigurationError(
        f"Action space {space} is not supported: use a floating-point Box, Discrete or "
        "one-dimensional MultiDiscrete, a MultiBinary, or a Dict or Tuple of them."
    )


def _refuse_for_choices(space: gymnasium.Space[Any], continuous: Mapping[str, Any]) -> None:
    for name, value in continuous.items():
        require(
            not value,
            f"{name}={value} is for continuous actions, but the action space is {space}. "
            "Remove it.",
        )


def _needs_scaling(space: gymnasium.spaces.Box) -> bool:
    low, high = (np.asarray(bound, np.float64) for bound in (space.low, space.high))
    is_low, is_high = low > -LARGEST_BOUND, high < LARGEST_BOUND
    bounded = is_low & is_high & (low < high)
    unit = (low == -1.0) & (high == 1.0)
    if bounded.all():
        # Bounds of -1 and 1 are units already.
        return not bool(unit.all())
    unscaled = (is_low | is_high) & ~unit
    # Some entries have bounds: the user may expect that they are scaled.
    if unscaled.any():
        entry = np.argwhere(unscaled)[0].tolist()
        bounds = f"[{low[tuple(entry)]:g}, {high[tuple(entry)]:g}]"
        warnings.warn(
            f"Not every entry of the action space {space} has two bounds, low < high, so no entry "
            "is rescaled: the Gaussian begins around 0 with a deviation of exp(log_std_init), "
            f"also in entry {entry} with the bounds {bounds}, and the env clips actions. Set "
            f"rescale_action: false. Or, so that each entry has two bounds: {BOUND_THE_SPACE}",
            stacklevel=2,
        )
    return False


@torch.no_grad()
def begin_deviations(
    distribution: ActionDistribution, log_std_init: float, weight: Tensor, bias: Tensor
) -> None:
    """Set first deviations in the last layer: weight [num_outputs, H], bias [num_outputs]."""
    if isinstance(distribution, JointDistribution):
        rows = (weight.split(distribution.sizes), bias.split(distribution.sizes))
        for part, *part_rows in zip(distribution.parts, *rows, strict=True):
            begin_deviations(cast(ActionDistribution, part), log_std_init, *part_rows)
    elif isinstance(distribution, DiagonalGaussian) and distribution.state_dependent:
        # The same in every state, as a parameter is.
        weight[distribution.size :], bias[distribution.size :] = 0.0, log_std_init


class DiagonalGaussian(CorrelatedNoise):
    """Independent normal distributions with a state-independent log standard deviation.

    The network gives the mean; with `log_std="state_dependent"` also the log standard deviation,
    [B, 2A]. Actions are unbounded; the env adapter clips them to the space.

    Args:
        shape: *A, of an action.
        log_std_init: initial log standard deviation, in units of the action.
        log_std_bounds: (low, high), clamps the log standard deviation.
        noise_correlation: see `CorrelatedNoise`.
        log_std: `parameter`, or `state_dependent`.

    Raises:
        ConfigurationError: for `log_std_init` outside its bounds, or a correlation outside [0, 1).
    """

    def __init__(
        self,
        shape: Sequence[int],
        log_std_init: float,
        log_std_bounds: Sequence[float],
        noise_correlation: float = 0.0,
        log_std: LogStd = "parameter",
    ) -> None:
        super().__init__()
        require(
            len(log_std_bounds) == 2 and log_std_bounds[0] <= log_std_init <= log_std_bounds[1],
            f"log_std_init={log_std_init} must lie within log_std_bounds={list(log_std_bounds)} "
            "(low, high).",
        )
        self.shape = tuple(shape)
        self.size = math.prod(self.shape)
        self.bounds = (float(log_std_bounds[0]), float(log_std_bounds[1]))
        self.state_dependent = log_std == "state_dependent"
        self.num_outputs = 2 * self.size if self.state_dependent else self.size
        if not self.state_dependent:
            self.log_std = nn.Parameter(torch.full((self.size,), float(log_std_init)))
        self.set_correlation(noise_correlation, self.size)

    def split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [B, A] and the log standard deviation, [A] or [B, A], of an output."""
        if not self.state_dependent:
            return output, self.clamped_log_std()
        mean, log_std = output.chunk(2, -1)
        return mean, bounded(log_std, *self.bounds)

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        mean, log_std = self.split(output)
        action, next_state = self.sample_around(mean, log_std.exp(), noise, state)
        log_prob = self._log_prob(mean, log_std, action)
        return {"action": self._shaped(action), "sample_log_prob": log_prob, **next_state}

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = self.split(output)
        action = fields["action"].reshape(mean.shape)
        log_prob = self._log_prob(mean, log_std, action, executed)
        return log_prob, self._entropy(mean, log_std, executed)

    def clamped_log_std(self) -> Tensor:
        """Return the log standard deviation [A], within its bounds."""
        return bounded(self.log_std, *self.bounds)

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(*flat.shape[:-1], *self.shape)

    def _log_prob(
        self, mean: Tensor, log_std: Tensor, action: Tensor, executed: Tensor | None = None
    ) -> Tensor:
        standardized = (action - mean) * (-log_std).exp()
        if executed is not None:
            return summed(-0.5 * standardized.square() - log_std - HALF_LOG_TWO_PI, executed)
        # Terms without a batch dimension are summed once, not for each sample.
        return -0.5 * standardized.square().sum(-1) - log_std.sum(-1) - self.size * HALF_LOG_TWO_PI

    def _entropy(self, mean: Tensor, log_std: Tensor, executed: Tensor | None) -> Tensor:
        if executed is not None:
            return summed((log_std + 0.5 + HALF_LOG_TWO_PI).expand(mean.shape), executed)
        entropy = log_std.sum(-1) + self.size * (0.5 + HALF_LOG_TWO_PI)
        # A parameter is the same for all samples: a view, without copies.
        return entropy.expand(mean.shape[:-1])


class RescaledGaussian(DiagonalGaussian):
    """A diagonal Gaussian u in units of the bounds of a Box: a = center + scale * u.

    log p(a) = log N(u) - sum(log(scale)); the entropy is H(u) + sum(log(scale)).

    Attributes:
        center, scale: [A], middle and half width of the bounds, saved with the weights.
    """

    center: Tensor
    scale: Tensor

    def __init__(self, space: gymnasium.spaces.Box, *args: Any, **kwargs: Any) -> None:
        super().__init__(space.shape, *args, **kwargs)
        # In float64, because the sum of large float32 bounds may overflow.
        low, high = (np.asarray(bound, np.float64) for bound in (space.low, space.high))
        self.register_buffer("center", torch.as_tensor((high + low) / 2).float().flatten())
        self.register_buffer("scale", torch.as_tensor((high - low) / 2).float().flatten())
        # Store u: recomputing u from the action would round, and the first ratio would differ from
        # 1.
        self.extra_fields = {"unit_action": ((self.size,), torch.float32)}

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        mean, log_std = self.split(output)
        unit, next_state = self.sample_around(mean, log_std.exp(), noise, state)
        return {
            "action": self._shaped(torch.addcmul(self.center, self.scale, unit)),
            "sample_log_prob": self._log_prob(mean, log_std, unit) - self.scale.log().sum(),
            "unit_action": unit,
            **next_state,
        }

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        unit = fields["unit_action"]
        if unit is None:  # an action that was not drawn here
            unit = self.fields_of(fields["action"])["unit_action"]
        mean, log_std = self.split(output)
        log_volume = self.scale.log().sum()  # log |da/du|
        if executed is not None:
            log_volume = summed(self.scale.log().expand(mean.shape), executed)
        entropy = self._entropy(mean, log_std, executed) + log_volume
        return self._log_prob(mean, log_std, unit, executed) - log_volume, entropy

    def fields_of(self, action: Tensor) -> Fields:
        flat = action.flatten(action.dim() - len(self.shape)) if self.shape else action[..., None]
        return {"unit_action": ((flat - self.center) / self.scale).float()}


class TanhGaussian(DiagonalGaussian, Squashing):
    """A diagonal Gaussian u squashed to the bounds of the space: a = center + scale * tanh(u).

    log p(a) = log N(u) - sum(log(scale * (1 - tanh(u)^2))). Source: Haarnoja et al. 2018, "Soft
    Actor-Critic", appendix C. The entropy is the entropy of u plus the mean of the last term, by
    Gauss-Hermite quadrature with 24 nodes per dimension (Abramowitz & Stegun 1964, 25.4.46; error
    1e-6 at a standard deviation of u of 1, 6e-4 at 2, .02 at 4). The usual estimate, from the
    sampled u, is noisy and depends on the acting policy.
    """

    nodes: Tensor
    weights: Tensor

    def __init__(self, space: gymnasium.spaces.Box, *args: Any, **kwargs: Any) -> None:
        super().__init__(space.shape, *args, **kwargs)
        self.set_bounds(space, "squash", f"Set squash: false. Or: {BOUND_THE_SPACE}")
        # Probabilists' Hermite: its weight exp(-x^2 / 2) is that of a standard normal.
        nodes, weights = np.polynomial.hermite_e.hermegauss(24)
        for name, values in {"nodes": nodes, "weights": weights / weights.sum()}.items():
            self.register_buffer(name, torch.as_tensor(values).float(), persistent=False)
        # Store u: atanh of the action would round, and is infinite at the bounds.
        self.extra_fields = {"unsquashed_action": ((self.size,), torch.float32)}

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        mean, log_std = self.split(output)
        u, next_state = self.sample_around(mean, log_std.exp(), noise, state)
        action = self.squashed(u)
        log_prob = self._log_prob(mean, log_std, u) - self._log_volume(u)
        return {
            "action": self._shaped(action),
            "sample_log_prob": log_prob,
            "unsquashed_action": u,
            **next_state,
        }

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        u, (mean, log_std) = fields["unsquashed_action"], self.split(output)
        # [..., 24, A], with the same nodes in every dimension: the volume is a sum over dimensions.
        points = mean.unsqueeze(-2) + log_std.exp().unsqueeze(-2) * self.nodes.unsqueeze(-1)
        # The nodes of a sample share its row of `executed`.
        at_points = None if executed is None else executed.unsqueeze(-2)
        volume = (self._log_volume(points, at_points) * self.weights).sum(-1)
        entropy = self._entropy(mean, log_std, executed) + volume
        log_prob = self._log_prob(mean, log_std, u, executed)
        return log_prob - self._log_volume(u, executed), entropy
