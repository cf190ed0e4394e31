"""Actors by a flow that clones the data, with Q critics of chunks of actions."""

from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import ConfigurationError, QActorCritic
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import RNG, NoisyTanh, mlp, noise_for, widened
from lightning_rl.extend.rollout import FieldSpec
from lightning_rl.kwargs import FlowActorCriticKwargs, Unpack


class FlowActorCritic(QActorCritic):
    """A flow of chunks of K actions, and Q critics of these chunks, for `FQL` and `QC`.

    The flow moves noise to actions in Euler steps; time runs from 1 to 0. For `FQL` a one-step
    actor acts, a perceptron of features and noise. For `QC` the best of n samples of the flow acts,
    by the critics. The policy acts step by step: its state holds the rest of a chunk, which it
    executes before it chooses another one, unless a person intervenes. Deterministic acting takes
    noise of 0, and for several samples noise of a fixed seed. The log-prob is unknown.

    Args:
        observation_space: see `PerceptronPolicy`.
        action_space: a floating-point Box with finite bounds.
        hidden_sizes: units of the hidden layers of flow and one-step actor.
        chunk_size: K, actions in a chunk.
        flow_steps: Euler steps from noise to actions.
        num_samples: n, samples of the flow of which the best one acts; null for the one-step actor.
        q_reduction: value of a chunk by all critics, in targets and in the choice of the best
            sample: `mean` or `min`.
        activation: see `QActorCritic`.
        critic_normalization: see `QActorCritic`.
        kwargs: see `QActorCritic`.

    Raises:
        ConfigurationError: for a memory, or critics that cannot choose a sample in acting.
    """

    distribution: NoisyTanh
    fixed_noise: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (512, 512, 512, 512),
        *,
        chunk_size: int = 1,
        flow_steps: int = 10,
        num_samples: int | None = None,
        q_reduction: Literal["mean", "min"] = "mean",
        activation: str = "gelu",
        critic_normalization: Literal["none", "layer", "rms"] = "layer",
        **kwargs: Unpack[FlowActorCriticKwargs],
    ) -> None:
        check_range("chunk_size", chunk_size, minimum=1)
        check_range("flow_steps", flow_steps, minimum=1)
        check_range("num_samples", num_samples, minimum=1)
        require(
            q_reduction in ("mean", "min"), f"q_reduction is {q_reduction!r}; allowed: mean, min."
        )
        require(
            kwargs.get("memory") is None,
            "FlowActorCritic is trained on chunks, not on sequences: remove policy.memory.",
        )
        single = NoisyTanh(action_space, 0.0)  # refuses spaces without finite bounds
        low, high = (torch.stack([x] * chunk_size).numpy() for x in (single.low, single.high))
        # The distribution is only for the units of a chunk [K, A]: no number is drawn from it.
        units = NoisyTanh(gymnasium.spaces.Box(low, high, dtype=np.float32), 0.0)
        super().__init__(
            observation_space,
            action_space,
            units,
            hidden_sizes,
            activation=activation,
            critic_normalization=critic_normalization,
            **kwargs,
        )
        self.chunk_size, self.flow_steps, self.num_samples = chunk_size, flow_steps, num_samples
        self.q_reduction, self.action_shape = q_reduction, single.shape
        self.state_is_plan = chunk_size > 1
        self._add_networks(hidden_sizes, kwargs.get("actor_normalization", "none"))
        self.noise_size = (num_samples or 1) * units.size
        # One drawn noise would be the same quantile of the actions everywhere: always too far left.
        fixed = torch.zeros(self.noise_size)
        if num_samples is not None and num_samples > 1:
            fixed.normal_(generator=torch.Generator().manual_seed(0))
        self.register_buffer("fixed_noise", fixed, persistent=False)

    def _add_networks(self, hidden_sizes: Sequence[int], normalization: Any) -> None:
        """Make the flow, and the one-step actor instead of the constructor's actor."""
        size = self.distribution.size
        inputs = self.features_size + size
        settings: Any = {
            "activation": self._activation,
            "normalization": normalization,
            "network": self._network,
            "initialization": self._initialization,
        }
        self.flow = mlp(inputs + 1, hidden_sizes, size, **settings)
        if self.num_samples is None:
            self.actor = mlp(inputs, hidden_sizes, size, **settings)
            return
        self.actor = nn.Sequential()  # the best of n samples acts
        if self.num_samples > 1:
            require(
                self.critic_keys == self.actor_keys,
                f"With num_samples={self.num_samples} the critics choose the best sample in "
                f"acting, but they read other keys than the actor: critic_keys={self.critic_keys}, "
                f"actor_keys={self.actor_keys}. Set the same keys, or num_samples: null with FQL.",
            )
            self.critic_modules = ()  # acting needs the critics

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        # The remaining actions of the chunk, the next one first, and their number.
        size = self.distribution.size // self.chunk_size * (self.chunk_size - 1) + 1
        return {"state": ((size,), torch.float32)} if self.chunk_size > 1 else {}

    def draw_noise(self, batch: Sequence[int], generator: RNG = None) -> Tensor:
        noise = torch.empty(*batch, self.noise_size, device=self.version.device)
        return noise.normal_(generator=generator)

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        rows = len(td)
        noise = noise_for(self, td, deterministic, generator)
        noise = self.fixed_noise.expand(rows, -1) if noise is None else noise
        unit = self.chosen_unit(td, self.actor_features(td), noise)
        chunk = self.distribution.from_unit(unit).flatten(1)
        size = chunk.shape[1] // self.chunk_size
        if self.chunk_size > 1:
            planned, count = td["state"].split([chunk.shape[1] - size, 1], -1)
            # Computed for all rows, also those that do not use it: no decision depends on a value.
            chunk = torch.where(count > 0, nn.functional.pad(planned, (0, size)), chunk)
            count = torch.where(count > 0, count, float(self.chunk_size)) - 1.0
            td.set("next_state", torch.cat((chunk[:, size:], count), -1))
        action = chunk[:, :size].reshape(rows, *self.action_shape)
        td.set("action", action, inplace=True)
        return td.set("sample_log_prob", action.new_zeros(rows), inplace=True)

    def chosen_unit(self, td: TensorDict, features: Tensor, noise: Tensor) -> Tensor:
        """Return the chunks in [-1, 1] [B, K*A] by which the policy acts on `td` [B].

        Args:
            td: [B], with the observations.
            features: [B, D], of the actor.
            noise: [B, n*K*A], standard normal.
        """
        if self.num_samples is None:
            return self.one_step(features, noise).clamp(-1.0, 1.0)
        samples = noise.shape[-1] // self.distribution.size
        noise = noise.reshape(len(noise) * samples, -1)
        unit = self.flow_unit(features.repeat_interleave(samples, 0), noise)
        if samples == 1:
            return unit
        features = self.critic_features(td, features).repeat_interleave(samples, 0)
        q = self.reduced(self.critic(features, unit)).unflatten(0, (-1, samples))
        index = q.argmax(1)[:, None, None].expand(-1, 1, unit.shape[1])
        best: Tensor = unit.unflatten(0, (-1, samples)).gather(1, index).squeeze(1)
        return best

    def reduced(self, q: Tensor) -> Tensor:
        """Return the value [B] of the values [E, B] of all critics."""
        return q.mean(0) if self.q_reduction == "mean" else q.amin(0)

    def one_step(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the one-step actor's chunks [B, K*A], unbounded, of features [B, D] and noise."""
        return widened(self.actor(torch.cat((features, noise), -1)))

    def flow_unit(self, features: Tensor, noise: Tensor) -> Tensor:
        """Return the flow's chunks in [-1, 1] [B, K*A] of features [B, D] and noise [B, K*A]."""
        x, size = noise, 1.0 / self.flow_steps
        for step in range(self.flow_steps):
            t = x.new_full(x.shape[:1], 1.0 - step * size)
            x = x - size * self.velocity(features, x, t)
        return x.clamp(-1.0, 1.0)

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocities [B, K*A] at x [B, K*A] and times t [B], from actions to noise."""
        return widened(self.flow(torch.cat((features, x, t[:, None]), -1)))

    def actor_modules(self) -> list[nn.Module]:
        return [self.flow, *super().actor_modules()]

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        return {}  # the state of a dataset's steps is not trained on

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        raise ConfigurationError(
            f"The log-probs of {type(self).__name__} are unknown: train it with FQL or QC."
        )
