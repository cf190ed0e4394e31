"""Distributions over continuous actions, and the choice of one for an action space."""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.policies.distributions.base import ActionDistribution, Categorical, Fields, summed
from lightning_rl.policies.distributions.joint import JointDistribution
from lightning_rl.rollout.structured_actions import StructuredActions, flat_actions
from lightning_rl.system.errors import ConfigurationError, require

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
"""log(2 pi) / 2, in the density of a normal distribution."""

UNIT_LIMIT = 1.0 - 1e-6
"""Actions are clamped to this before atanh, which is infinite at the bounds."""

LARGEST_BOUND = 1e6
"""Larger bounds count as infinite: many envs write float32's maximum or 1e10."""


def distribution_for(
    space: gymnasium.Space[Any],
    *,
    squash: bool,
    rescale: bool = True,
    log_std_init: float,
    log_std_bounds: Sequence[float],
    noise_correlation: float = 0.0,
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
    )
    if isinstance(space, StructuredActions):
        boxes = [part for part in space.parts if not part.counts]
        # Settings of continuous actions need one Box at least.
        _refuse_for_choices(space, squash and not boxes, noise_correlation and not boxes)
        parts = [
            Categorical(part.counts, (len(part.counts),)) if part.counts else gaussian(part.space)
            for part in space.parts
        ]
        return JointDistribution(space.parts, parts)
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        settings = log_std_init, log_std_bounds, noise_correlation
        if squash:
            return TanhGaussian(space, *settings)
        if rescale and _needs_scaling(space):
            return RescaledGaussian(space, *settings)
        return DiagonalGaussian(space.shape, *settings)
    _refuse_for_choices(space, squash, noise_correlation)
    if isinstance(space, gymnasium.spaces.Discrete):
        return Categorical([int(space.n)], ())
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return Categorical([int(n) for n in space.nvec], space.shape)
    raise ConfigurationError(
        f"Action space {space} is not supported: use a floating-point Box, Discrete or "
        "one-dimensional MultiDiscrete, a MultiBinary, or a Dict or Tuple of them."
    )


def _refuse_for_choices(space: gymnasium.Space[Any], squash: Any, noise_correlation: Any) -> None:
    require(not squash, f"squash is for continuous actions; the action space is {space}.")
    require(
        not noise_correlation,
        f"noise_correlation={noise_correlation} is for continuous actions, but the action space is "
        f"{space}. Remove it.",
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
            f"also in entry {entry} with the bounds {bounds}, and the env clips actions. Wrap the "
            "env so that each entry has two bounds (gymnasium.wrappers.TransformAction), or set "
            "rescale_action: false.",
            stacklevel=2,
        )
    return False


class CorrelatedNoise(ActionDistribution):
    """Base class of distributions with standard normal noise, optionally correlated over time.

    e_0 = x_0 and e_t = c e_(t-1) + sqrt(1 - c^2) x_t with independent x_t: a first-order
    autoregressive process with a standard normal marginal at each step, so that the density of an
    action given its observation does not change. The correlation falls to 1/e after -1 / log(c)
    steps. `state` [A + 1] is stored with the rollout: the last e, and 1 if there was a draw.

    Source: Uhlenbeck and Ornstein 1930 in discrete time, as in Lillicrap et al. 2016 (DDPG),
    section 3; density of single steps: Eberhard et al. 2023, section 4. Differs from DDPG: constant
    variance.

    Attributes:
        noise_correlation: c, between consecutive actions of an episode, in [0, 1).
    """

    def set_correlation(self, noise_correlation: float, size: int) -> None:
        """Set c, for noise of `size` numbers.

        Raises:
            ConfigurationError: if c is outside [0, 1).
        """
        require(
            0 <= noise_correlation < 1,
            f"noise_correlation must be at least 0 and below 1, got {noise_correlation}: with 0 "
            "actions are independent, with 0.97 noise is correlated over 33 steps.",
        )
        self.noise_correlation = float(noise_correlation)
        self.noise_size = size
        self.state_size = size + 1 if noise_correlation else 0

    def sample_around(
        self,
        mean: Tensor,
        std: Tensor,
        noise: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return mean + std * e [B, A], and `next_state` if there is a state.

        Args:
            mean: [B, A].
            std: [B, A] or [A].
            noise: [B, A]; None returns the mean and does not change the state.
            state: [B, A + 1], of the previous step.

        Raises:
            ValueError: if the state is missing.
        """
        if noise is None:
            return mean, {} if state is None or not self.state_size else {"next_state": state}
        if not self.state_size:
            return torch.addcmul(mean, noise, std), {}
        if state is None:
            raise ValueError(
                "Correlated noise needs the `state` of the previous step; first_state(policy, "
                "num_envs) returns the state at the start of an episode."
            )
        last, exists = state[..., :-1], state[..., -1:]
        # Before the first draw `exists` is 0, and the noise is x_0 alone.
        correlation = self.noise_correlation * exists
        noise = correlation * last + (1.0 - correlation.square()).sqrt() * noise
        next_state = {"next_state": torch.cat((noise, torch.ones_like(exists)), -1)}
        return torch.addcmul(mean, noise, std), next_state


class DiagonalGaussian(CorrelatedNoise):
    """Independent normal distributions with a state-independent log standard deviation.

    The network gives the mean. Actions are unbounded; the env adapter clips them to the space.

    Args:
        shape: *A, of an action.
        log_std_init: initial log standard deviation, in units of the action.
        log_std_bounds: (low, high), clamps the log standard deviation.
        noise_correlation: see `CorrelatedNoise`.

    Raises:
        ConfigurationError: for `log_std_init` outside its bounds, or a correlation outside [0, 1).
    """

    def __init__(
        self,
        shape: Sequence[int],
        log_std_init: float,
        log_std_bounds: Sequence[float],
        noise_correlation: float = 0.0,
    ) -> None:
        super().__init__()
        require(
            len(log_std_bounds) == 2 and log_std_bounds[0] <= log_std_init <= log_std_bounds[1],
            f"log_std_init={log_std_init} must lie within log_std_bounds={list(log_std_bounds)} "
            "(low, high).",
        )
        self.shape = tuple(shape)
        self.num_outputs = math.prod(self.shape)
        self.bounds = (float(log_std_bounds[0]), float(log_std_bounds[1]))
        self.log_std = nn.Parameter(torch.full((self.num_outputs,), float(log_std_init)))
        self.set_correlation(noise_correlation, self.num_outputs)

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        std = self.clamped_log_std().exp()
        action, next_state = self.sample_around(output, std, noise, state)
        log_prob = self._log_prob(output, action)
        return {"action": self._shaped(action), "sample_log_prob": log_prob, **next_state}

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        action = fields["action"].reshape(output.shape)
        return self._log_prob(output, action, executed), self._entropy(output, executed)

    def clamped_log_std(self) -> Tensor:
        """Return the log standard deviation [A], within its bounds."""
        return self.log_std.clamp(*self.bounds)

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(*flat.shape[:-1], *self.shape)

    def _log_prob(self, mean: Tensor, action: Tensor, executed: Tensor | None = None) -> Tensor:
        log_std = self.clamped_log_std()
        standardized = (action - mean) * (-log_std).exp()
        if executed is not None:
            return summed(-0.5 * standardized.square() - log_std - HALF_LOG_TWO_PI, executed)
        # Terms without a batch dimension are summed once, not for each sample.
        return (
            -0.5 * standardized.square().sum(-1)
            - log_std.sum()
            - self.num_outputs * HALF_LOG_TWO_PI
        )

    def _entropy(self, output: Tensor, executed: Tensor | None) -> Tensor:
        log_std = self.clamped_log_std()
        if executed is not None:
            return summed((log_std + 0.5 + HALF_LOG_TWO_PI).expand(output.shape), executed)
        entropy = log_std.sum() + self.num_outputs * (0.5 + HALF_LOG_TWO_PI)
        # The same for all samples: a view, without copies.
        return entropy.expand(output.shape[:-1])


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
        self.extra_fields = {"unit_action": ((self.num_outputs,), torch.float32)}

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        std = self.clamped_log_std().exp()
        unit, next_state = self.sample_around(output, std, noise, state)
        return {
            "action": self._shaped(torch.addcmul(self.center, self.scale, unit)),
            "sample_log_prob": self._log_prob(output, unit) - self.scale.log().sum(),
            "unit_action": unit,
            **next_state,
        }

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        unit = fields["unit_action"]
        if unit is None:  # an action that was not drawn here
            unit = self.fields_of(fields["action"])["unit_action"]
        log_volume = self.scale.log().sum()  # log |da/du|
        if executed is not None:
            log_volume = summed(self.scale.log().expand(output.shape), executed)
        entropy = self._entropy(output, executed) + log_volume
        return self._log_prob(output, unit, executed) - log_volume, entropy

    def fields_of(self, action: Tensor) -> Fields:
        flat = action.flatten(action.dim() - len(self.shape)) if self.shape else action[..., None]
        return {"unit_action": ((flat - self.center) / self.scale).float()}


class Squashing(ActionDistribution):
    """Base class for actions squashed to the bounds [A] of a Box: a = center + scale * tanh(u)."""

    low: Tensor
    high: Tensor
    center: Tensor
    scale: Tensor

    def set_bounds(self, space: gymnasium.spaces.Box, user: str, cure: str) -> None:
        """Set the bounds from a space; `user` and `cure` are for the message about bad bounds.

        Raises:
            ConfigurationError: for infinite bounds, or bounds without low < high.
        """
        largest = max(np.abs(space.low).max(initial=0), np.abs(space.high).max(initial=0))
        require(
            bool(largest <= LARGEST_BOUND),
            f"{user} needs finite action bounds; the action space is {space}. {cure}"
            + (" Bounds beyond a million count as infinite." if np.isfinite(largest) else ""),
        )
        low = torch.as_tensor(space.low).float().flatten()
        high = torch.as_tensor(space.high).float().flatten()
        require(bool((low < high).all()), f"{user} needs low < high; the action space is {space}.")
        bounds = {"low": low, "high": high, "center": (high + low) / 2, "scale": (high - low) / 2}
        for name, value in bounds.items():
            # Not saved: the space has them.
            self.register_buffer(name, value, persistent=False)

    def squashed(self, u: Tensor) -> Tensor:
        """Return the actions [B, A] of unsquashed u [B, A]."""
        # Clamp, because rounding may exceed a bound.
        return torch.addcmul(self.center, self.scale, u.tanh()).clamp(self.low, self.high)

    def _log_volume(self, u: Tensor, executed: Tensor | None = None) -> Tensor:
        """Return log |da/du| [B], summed over the dimensions of the action."""
        return summed(log_slope_of_tanh(u) + self.scale.log(), executed)


def log_slope_of_tanh(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2) [...] of u [...], as 2 (log 2 - u - softplus(-2u)): no overflow."""
    return 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))


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
        self.set_bounds(space, "squash", "Set squash: false, or bound the space.")
        # Probabilists' Hermite: its weight exp(-x^2 / 2) is that of a standard normal.
        nodes, weights = np.polynomial.hermite_e.hermegauss(24)
        for name, values in {"nodes": nodes, "weights": weights / weights.sum()}.items():
            self.register_buffer(name, torch.as_tensor(values).float(), persistent=False)
        # Store u: atanh of the action would round, and is infinite at the bounds.
        self.extra_fields = {"unsquashed_action": ((self.num_outputs,), torch.float32)}

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        std = self.clamped_log_std().exp()
        u, next_state = self.sample_around(output, std, noise, state)
        action = self.squashed(u)
        log_prob = self._log_prob(output, u) - self._log_volume(u)
        return {
            "action": self._shaped(action),
            "sample_log_prob": log_prob,
            "unsquashed_action": u,
            **next_state,
        }

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        u, std = fields["unsquashed_action"], self.clamped_log_std().exp()
        # [..., 24, A], with the same nodes in every dimension: the volume is a sum over dimensions.
        points = output.unsqueeze(-2) + std * self.nodes.unsqueeze(-1)
        # The nodes of a sample share its row of `executed`.
        at_points = None if executed is None else executed.unsqueeze(-2)
        volume = (self._log_volume(points, at_points) * self.weights).sum(-1)
        entropy = self._entropy(output, executed) + volume
        return self._log_prob(output, u, executed) - self._log_volume(u, executed), entropy


class UnitActions(Squashing, CorrelatedNoise):
    """Base class for off-policy actors: actions in units of their bounds, [-1, 1].

    Raises:
        ConfigurationError: for another space, or a correlation outside [0, 1).
    """

    def __init__(self, space: gymnasium.Space[Any], noise_correlation: float = 0.0) -> None:
        super().__init__()
        continuous = isinstance(space, gymnasium.spaces.Box) and np.issubdtype(
            space.dtype, np.floating
        )
        # `StructuredActions` is a Box, too.
        in_parts = isinstance(flat_actions(space), StructuredActions)
        if not continuous or in_parts:
            cure = "For discrete actions, use DiscreteSAC with a DiscreteActorCritic, or PPO."
            if in_parts:
                cure = (
                    "Use PPO for actions of several parts. GripperSAC supports an arm and a "
                    "gripper in one Box."
                )
            raise ConfigurationError(
                f"The critics of an off-policy algorithm take continuous actions, a floating-point "
                f"Box; the action space is {space}. {cure}"
            )
        assert isinstance(space, gymnasium.spaces.Box)
        self.set_bounds(
            space,
            "An actor that is squashed to the bounds of its actions",
            "Bound the space: wrappers: [{class_path: gymnasium.wrappers.TransformAction, ...}] "
            "with a bounded action_space, or learn with PPO.",
        )
        self.shape = space.shape
        self.size = math.prod(space.shape)
        self.set_correlation(noise_correlation, self.size)

    def unit(self, action: Tensor) -> Tensor:
        """Return actions [B, *A] of the env in units of their bounds, [-1, 1], as [B, A]."""
        flat = action.flatten(action.dim() - len(self.shape)) if self.shape else action[..., None]
        return (flat.to(self.center.dtype) - self.center) / self.scale

    def from_unit(self, unit: Tensor) -> Tensor:
        """Return the env's actions [B, *A] for actions in [-1, 1] [B, A]."""
        action = torch.addcmul(self.center, self.scale, unit).clamp(self.low, self.high)
        return action.reshape(*action.shape[:-1], *self.shape)


class StateStdTanhGaussian(UnitActions):
    """A squashed Gaussian with a state-dependent standard deviation.

    The network gives mean and log standard deviation of u, [B, 2A]. Source: Haarnoja et al. 2018,
    "Soft Actor-Critic Algorithms and Applications", appendix C; bounds from the authors' code. The
    entropy is approximated by H(u) plus the log slope of tanh at the mean, exact for small
    deviations.

    Args:
        space: floating-point Box with finite bounds.
        log_std_bounds: (low, high), clamps the log standard deviation of u.
        noise_correlation: see `CorrelatedNoise`.

    Raises:
        ConfigurationError: for another space, or bounds without low < high.
    """

    def __init__(
        self,
        space: gymnasium.Space[Any],
        log_std_bounds: Sequence[float],
        noise_correlation: float = 0.0,
    ) -> None:
        super().__init__(space, noise_correlation)
        require(
            len(log_std_bounds) == 2 and log_std_bounds[0] < log_std_bounds[1],
            f"log_std_bounds must be two numbers, low < high, got {list(log_std_bounds)}.",
        )
        self.num_outputs = 2 * self.size
        self.log_std_bounds = float(log_std_bounds[0]), float(log_std_bounds[1])
        self.extra_fields = {"unsquashed_action": ((self.size,), torch.float32)}

    def split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of u, [B, A] each, of an output [B, 2A]."""
        mean, log_std = output.chunk(2, dim=-1)
        return mean, log_std.clamp(*self.log_std_bounds)

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        mean, log_std = self.split(output)
        u, next_state = self.sample_around(mean, log_std.exp(), noise, state)
        return {
            "action": self.from_unit(u.tanh()),
            "sample_log_prob": self._log_prob(mean, log_std, u) - self._log_volume(u),
            "unsquashed_action": u,
            **next_state,
        }

    def draw_unit(self, output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions in [-1, 1] [B, A], with gradients, and their log-probs [B].

        Args:
            output: [B, 2A].
            noise: [B, A], standard normal.
        """
        mean, log_std = self.split(output)
        u = mean + noise * log_std.exp()
        # The noise is (u - mean) / std already.
        log_prob = (-0.5 * noise.square() - log_std - HALF_LOG_TWO_PI).sum(-1)
        return u.tanh(), log_prob - log_slope_of_tanh(u).sum(-1)

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = self.split(output)
        u = fields["unsquashed_action"]
        # Actions that were not drawn here, such as demonstrations, have no u.
        if u is None:
            u = self.fields_of(fields["action"])["unsquashed_action"]
        entropy = summed(log_std + 0.5 + HALF_LOG_TWO_PI, executed)
        entropy = entropy + self._log_volume(mean, executed)
        log_prob = self._log_prob(mean, log_std, u, executed)
        return log_prob - self._log_volume(u, executed), entropy

    def fields_of(self, action: Tensor) -> Fields:
        unit = self.unit(action).clamp(-UNIT_LIMIT, UNIT_LIMIT)
        return {"unsquashed_action": torch.atanh(unit)}

    def _log_prob(
        self, mean: Tensor, log_std: Tensor, u: Tensor, executed: Tensor | None = None
    ) -> Tensor:
        standardized = (u - mean) * (-log_std).exp()
        return summed(-0.5 * standardized.square() - log_std - HALF_LOG_TWO_PI, executed)


class NoisyTanh(UnitActions):
    """A deterministic action tanh(x), in units of its bounds, with exploration noise.

    Source: Fujimoto et al. 2018 (TD3), section 6.

    Args:
        space: floating-point Box with finite bounds.
        exploration_std: standard deviation of the noise, in units of the bounds.
        noise_correlation: see `CorrelatedNoise`.

    Raises:
        ConfigurationError: for another space, or a negative deviation.
    """

    def __init__(
        self, space: gymnasium.Space[Any], exploration_std: float, noise_correlation: float = 0.0
    ) -> None:
        super().__init__(space, noise_correlation)
        require(exploration_std >= 0, f"exploration_std must not be negative: {exploration_std}.")
        self.num_outputs = self.size
        self.exploration_std = exploration_std

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        unit = output.tanh()
        noise, next_state = self.sample_around(
            torch.zeros_like(unit), torch.ones_like(unit), noise, state
        )
        action = self.from_unit((unit + self.exploration_std * noise).clamp(-1.0, 1.0))
        return {"action": action, "sample_log_prob": self._log_prob(noise), **next_state}

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        # Log-prob and entropy of the noise before it is clipped at the bounds.
        std = max(self.exploration_std, 1e-6)
        log_prob = self._log_prob((self.unit(fields["action"]) - output.tanh()) / std, executed)
        log_std = self.scale.log() + math.log(std)
        entropies = (log_std + 0.5 + HALF_LOG_TWO_PI).expand(output.shape)
        return log_prob, summed(entropies, executed)

    def _log_prob(self, noise: Tensor, executed: Tensor | None = None) -> Tensor:
        # At least 1e-6, because the density without noise is infinite.
        log_std = self.scale.log() + math.log(max(self.exploration_std, 1e-6))
        return summed(-0.5 * noise.square() - log_std - HALF_LOG_TWO_PI, executed)
