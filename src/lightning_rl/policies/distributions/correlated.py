"""Standard normal noise, optionally correlated over time."""

import math

import torch
from torch import Tensor

from lightning_rl.policies.distributions.base import ActionDistribution
from lightning_rl.system.errors import require

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
"""log(2 pi) / 2, in the density of a normal distribution."""


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
        self, mean: Tensor, std: Tensor, noise: Tensor | None, state: Tensor | None
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
                "Correlated noise needs the `state` of the previous step; policy.first_state("
                "num_envs) returns the state at the start of an episode."
            )
        last, exists = state[..., :-1], state[..., -1:]
        # Before the first draw `exists` is 0, and the noise is x_0 alone.
        correlation = self.noise_correlation * exists
        noise = correlation * last + (1.0 - correlation.square()).sqrt() * noise
        next_state = {"next_state": torch.cat((noise, torch.ones_like(exists)), -1)}
        return torch.addcmul(mean, noise, std), next_state
