"""Distributions of off-policy actors: actions squashed to bounds, in units of the bounds."""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from lightning_rl.functional import bounded
from lightning_rl.policies.distributions.base import ActionDistribution, Fields, summed
from lightning_rl.policies.distributions.correlated import HALF_LOG_TWO_PI, CorrelatedNoise
from lightning_rl.rollout.structured_actions import StructuredActions, flat_actions
from lightning_rl.system.errors import ConfigurationError, require

UNIT_LIMIT = 1.0 - 1e-6
"""Actions are clamped to this before atanh, which is infinite at the bounds."""

LARGEST_BOUND = 1e6
"""Larger bounds count as infinite: many envs write float32's maximum or 1e10."""

BOUND_THE_SPACE = (
    "Bound the space: of a GymnasiumEnv by wrappers: [{class_path: "
    "gymnasium.wrappers.TransformAction, ...}] with a bounded action_space; of another env, such "
    "as a simulator, by a TermWrapper around it with action: {class_path: Position, init_args: "
    "{scale: 1.0, clip: 1.0}}; of an RslRlVecEnv by its action_bound."
)
"""Cure in messages about infinite bounds."""


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
            f"{BOUND_THE_SPACE} Or learn with PPO.",
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

    state_dependent = True

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
        return mean, bounded(log_std, *self.log_std_bounds)

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
