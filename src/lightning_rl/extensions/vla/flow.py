"""The flow-matching head: action chunks by a velocity field and a few Euler steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import torch
from torch import Tensor, nn

from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import mlp
from lightning_rl.extend.rollout import FieldSpec
from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.extensions.vla.heads import HALF_LOG_TWO_PI, ActionHead, Level, Statistics
from lightning_rl.extensions.vla.real_time import guidance_weight, pull
from lightning_rl.functional import flow_matching_loss, flow_transition, interpolate

FREQUENCIES = 4
"""Number of sines, and of cosines, of the time: pi t, 2 pi t, 4 pi t, ..."""

NARROW = 32
"""Largest number of inputs per slot of a `SlotExpert`."""


@dataclass(frozen=True)
class FlowSettings:
    """Settings of a `FlowHead`, equal in acting and training.

    Args:
        steps: K, Euler steps from noise to action.
        noise: `sde`: in a rollout one step of K, drawn per sample, is stochastic, with a fixed
            deviation. `learnt`: all steps are stochastic, with a learnt deviation.
        noise_level: s of the stochastic step, see `flow_transition`.
        noise_range: smallest and largest deviation of `learnt`, in units of the action bounds.
        hidden_sizes: units of the hidden layers of a `SlotExpert`.
    """

    steps: int = 4
    noise: Literal["sde", "learnt"] = "sde"
    noise_level: float = 0.5
    noise_range: tuple[float, float] = (0.05, 0.2)
    hidden_sizes: tuple[int, ...] = (128, 128)


class FlowHead(ActionHead):
    """A chunk of actions by a velocity field that moves noise to actions in K Euler steps.

    In a rollout the chain of steps is stochastic. The log-prob of the stored transitions is exact:
    a normal distribution for each number. With `sde` it is one transition of K (one pass of the
    expert), and the entropy is unknown. With `learnt` it is the whole chain (K passes), with
    entropy. Deterministic acting integrates the ODE from `fixed_noise`, one draw of seed 0, the
    same for all observations; `decode` integrates it from given noise.

    An expert may have more numbers per action than the env (`action_size` P > A). Log-probs and
    losses ignore this padding.

    Source: Liu et al. 2025, "Flow-GRPO" (`sde`), with one stochastic step as in Chen et al. 2025,
    "pi_RL: Online RL Fine-tuning for Flow-based VLA Models"; Zhang et al. 2025, "ReinFlow"
    (`learnt`). Differs from pi_RL: the stochastic step is drawn per sample, not per batch; from
    ReinFlow: the log-probs of the steps are added, not averaged.

    Args:
        space, level, statistics: see `ActionHead`.
        expert: module that maps `Features`, x [B, K, P] and times [B] to velocities [B, K, P], with
            an attribute `action_size`, P. It runs without autocast. With `takes_action_times` it
            also takes times [B, K], 0 for actions that are given.
        summary_size: E, inputs of the network of the learnt deviation.
        settings: numbers of the flow.

    Raises:
        ConfigurationError: for a number out of range.
    """

    times: Tensor
    fixed_noise: Tensor

    def __init__(
        self,
        space: gymnasium.spaces.Box,
        level: Level,
        expert: nn.Module,
        summary_size: int,
        settings: FlowSettings = FlowSettings(),
        statistics: Statistics = None,
    ) -> None:
        super().__init__(space, level, statistics)
        check_range("flow.steps", settings.steps, minimum=1)
        check_range("flow.noise_level", settings.noise_level, above=0)
        low, high = settings.noise_range
        require(
            0 < low < high,
            f"flow.noise_range must be 0 < smallest < largest, got {list(settings.noise_range)}.",
        )
        self.steps, self.noise_level = settings.steps, settings.noise_level
        self.noise_range = (low, high)
        self.has_entropy = settings.noise == "learnt"
        self.expert = expert
        conditioned = ("conditioned",) if getattr(expert, "takes_action_times", False) else ()
        self.real_time_methods = ("guided", *conditioned, "skip")
        self.flow_shape = (self.chunk_size, int(expert.action_size))  # type: ignore[arg-type]  # nn.Module
        self.noise_shape = (1, *self.flow_shape)
        self.noise_size = math.prod(self.flow_shape)
        self.clone_noise_size = self.noise_size + 1
        # In float64, so that each time is rounded once.
        times = 1.0 - torch.arange(self.steps, dtype=torch.float64) / self.steps
        self.register_buffer("times", times.float(), persistent=False)
        fixed = torch.randn(self.noise_size, generator=torch.Generator().manual_seed(0))
        self.register_buffer("fixed_noise", fixed, persistent=False)
        self.deviation: nn.Module | None = None
        if settings.noise == "learnt":
            inputs = summary_size + 2 * FREQUENCIES
            # With small outputs, deviations begin in the middle of their range.
            self.deviation = mlp(
                inputs, (64,), self.noise_size, activation="silu", output_gain=0.01
            )

    @property
    def fields(self) -> dict[str, FieldSpec]:
        if self.has_entropy:
            return {"chain": ((self.steps + 1, *self.flow_shape), torch.float32)}
        shape = (self.flow_shape, torch.float32)
        return {"chain_from": shape, "chain_to": shape, "chain_step": ((), torch.int64)}

    def draw_noise(self, batch: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        # The initial noise, then the noise of each step (`learnt`), or the noise of one step and a
        # number in [0, 1) that draws this step (`sde`).
        count = self.steps + 1 if self.has_entropy else 2
        return self._draw(batch, count, generator, uniform=not self.has_entropy)

    def draw_clone_noise(
        self, batch: Sequence[int], generator: torch.Generator | None = None
    ) -> Tensor:
        return self._draw(batch, 1, generator, uniform=True)

    def sample(self, features: Features, noise: Tensor | None) -> dict[str, Tensor]:
        if noise is None:
            start = self.fixed_noise.expand(features.summary.shape[0], -1)
            return {"action": self.act(features, start)}
        if self.deviation is not None:
            return self._sample_chain(features, noise)
        x, step_noise = noise[:, :-1].unflatten(1, (2, *self.flow_shape)).unbind(1)
        # In float32 the product may round up to K.
        step = (noise[:, -1] * self.steps).long().clamp(max=self.steps - 1)
        chain_from, chain_to, log_prob = (torch.zeros_like(x) for _ in range(3))
        # All samples take all steps, and each has its stochastic step at another one.
        for k in range(self.steps):
            velocity = self.velocity(features, x, k)
            mean, std = self._transition(x, velocity, self.times[k].expand(x.shape[0]))
            stochastic = torch.addcmul(mean, std, step_noise)
            is_step = (step == k).view(-1, 1, 1)
            chain_from = torch.where(is_step, x, chain_from)
            chain_to = torch.where(is_step, stochastic, chain_to)
            log_prob = torch.where(is_step, normal_log_prob(stochastic, mean, std.log()), log_prob)
            x = torch.where(is_step, stochastic, x - velocity / self.steps)
        return {
            "action": self.to_action(self._unpadded(x)),
            "sample_log_prob": self.sum_by_part(self._unpadded(log_prob)),
            **{"chain_from": chain_from, "chain_to": chain_to, "chain_step": step},
        }

    def log_prob_and_entropy(
        self, features: Features, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self.deviation is not None:
            return self._chain_log_prob(features, fields["chain"])
        x, t = fields["chain_from"], self.times[fields["chain_step"]]
        mean, std = self._transition(x, self._velocity(features, x, t), t)
        log_probs = normal_log_prob(fields["chain_to"], mean, std.log())
        log_prob = self.sum_by_part(self._unpadded(log_probs))
        # The entropy is unknown: see `has_entropy`.
        return log_prob, torch.zeros_like(log_prob)

    def clone_loss(
        self, features: Features, action: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the flow-matching loss and zeros, [B, parts]; see `ActionHead.clone_loss`.

        The times are drawn from Beta(1.5, 1), within [.001, 1], as in Black et al. 2024, "pi_0: A
        Vision-Language-Action Flow Model for General Robot Control" (appendix B).
        """
        assert noise is not None
        start = noise[:, :-1].unflatten(1, self.flow_shape)
        t = 0.001 + 0.999 * noise[:, -1].pow(2.0 / 3.0)  # the inverse of the distribution function
        goal = self.to_unit(action).unflatten(1, (self.chunk_size, self.action_size))
        # The padding of an action has the goal 0; the loss leaves it out.
        goal = self._padded(goal)
        velocity = self._velocity(features, interpolate(goal, start, t), t)
        losses = flow_matching_loss(velocity, goal, start)
        if features.old_chunk is not None:  # the expert knows these actions
            losses = losses.masked_fill(features.old_chunk.copied[..., None], 0.0)
        loss = self.sum_by_part(self._unpadded(losses))
        return loss, torch.zeros_like(loss)

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        return {}  # a demonstrated action has no chain of steps

    def act(self, features: Features, noise: Tensor) -> Tensor:
        """Return the actions [B, K, *A] of the ODE from noise [B, K * P]."""
        return self.to_chunk(self.decode(features, noise))

    def decode(self, features: Features, noise: Tensor) -> Tensor:
        """Integrate the ODE from noise [B, K * P]; return x [B, K, P], padding included."""
        x: Tensor = noise.unflatten(1, self.flow_shape)
        for k in range(self.steps):
            x = self.advance(features, x, k)
        return x

    def advance(self, features: Features, x: Tensor, step: Any, noise: Any = None) -> Tensor:
        """Return x [B, K, P] after Euler step `step`, an int or [B], which needs no noise."""
        return x - self.velocity(features, x, step) / self.steps

    def to_chunk(self, x: Tensor) -> Tensor:
        """Return the actions [B, K, *A] at the end of a chain, x [B, K, P]."""
        return self.to_action(self._unpadded(x))

    def velocity(self, features: Features, x: Tensor, step: int | Tensor) -> Tensor:
        """Return the velocity [B, K, P] at x [B, K, P] in Euler step `step`, an int or [B]."""
        return self._velocity(features, x, self.times[step].expand(x.shape[0]))

    def _velocity(self, features: Features, x: Tensor, t: Tensor) -> Tensor:
        old = features.old_chunk
        if old is None or old.settings.method == "skip":
            return self._free_velocity(features, x, t)
        if old.settings.method == "conditioned":
            x = torch.where(old.copied[..., None], self._padded(old.target), x)
            return self._free_velocity(features, x, t[:, None].masked_fill(old.copied, 0.0))
        time = t.view(-1, 1, 1)

        def predict(x: Tensor) -> tuple[Tensor, Tensor]:
            velocity = self._free_velocity(features, x, t)
            return velocity, (x - time * velocity)[..., : self.action_size]

        velocity, correction = pull(predict, x, old.target, old.mask[..., None])
        # Time runs from noise to action backwards, hence the sign.
        return velocity - guidance_weight(time, old.settings.max_guidance_weight) * correction

    def _free_velocity(self, features: Features, x: Tensor, t: Tensor) -> Tensor:
        # The steps add up, so they are in float32 even if the expert computes in bfloat16.
        return features.guided(lambda f: self.expert(f, x, t).float())

    def _padded(self, unit: Tensor) -> Tensor:
        return nn.functional.pad(unit, (0, self.flow_shape[1] - self.action_size))

    def _transition(self, x: Tensor, velocity: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        size = 1.0 / self.steps
        return flow_transition(x, velocity, t, step_size=size, noise_level=self.noise_level)

    def _unpadded(self, numbers: Tensor) -> Tensor:
        unpadded: Tensor = numbers[..., : self.action_size].flatten(1)
        return unpadded

    def _draw(
        self, batch: Sequence[int], count: int, generator: torch.Generator | None, uniform: bool
    ) -> Tensor:
        size = count * self.noise_size
        noise = torch.empty(*batch, size + uniform, device=self.center.device)
        noise.normal_(generator=generator)
        if uniform:
            noise[..., -1].uniform_(generator=generator)
        return noise

    # --- noise: learnt ---

    def _sample_chain(self, features: Features, noise: Tensor) -> dict[str, Tensor]:
        start, *step_noises = noise.unflatten(1, (self.steps + 1, *self.flow_shape)).unbind(1)
        # The start of the chain is drawn, too: its log-prob belongs to the chain.
        zero = torch.zeros_like(start)
        chain, log_prob = [start], normal_log_prob(start, zero, zero)
        for k, step_noise in enumerate(step_noises):
            mean, log_std = self._learnt_transition(features, chain[-1], k)
            chain.append(torch.addcmul(mean, log_std.exp(), step_noise))
            log_prob = log_prob + normal_log_prob(chain[-1], mean, log_std)
        return {
            "action": self.to_action(self._unpadded(chain[-1])),
            "sample_log_prob": self.sum_by_part(self._unpadded(log_prob)),
            "chain": torch.stack(chain, 1),
        }

    def _chain_log_prob(self, features: Features, chain: Tensor) -> tuple[Tensor, Tensor]:
        start, *states = chain.unbind(1)
        zero = torch.zeros_like(start)
        log_prob = normal_log_prob(start, zero, zero)
        # Each normal has the entropy log std + .5 + log sqrt(2 pi); at the start log std is 0.
        entropy = torch.full_like(start, (self.steps + 1) * (0.5 + HALF_LOG_TWO_PI))
        for k, (x, next_x) in enumerate(zip([start, *states], states, strict=False)):
            mean, log_std = self._learnt_transition(features, x, k)
            log_prob = log_prob + normal_log_prob(next_x, mean, log_std)
            entropy = entropy + log_std
        return self.sum_by_part(self._unpadded(log_prob)), self.sum_by_part(self._unpadded(entropy))

    def _learnt_transition(self, features: Features, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        assert self.deviation is not None
        time = embedded_time(self.times[step].expand(x.shape[0]))
        output = self.deviation(torch.cat((features.summary.float(), time), 1)).tanh()
        low, high = (math.log(bound) for bound in self.noise_range)
        log_std = low + (output + 1.0) * ((high - low) / 2.0)
        mean = x - self.velocity(features, x, step) / self.steps
        return mean, log_std.unflatten(1, self.flow_shape)


class SlotExpert(nn.Module):
    """The default expert: a perceptron on the slots, x and the time.

    Args:
        space: space of one chunk, [K, *A].
        slot_size: D; a linear layer narrows slots of more than 32 numbers.
        hidden_sizes: units of the hidden layers.
        takes_action_times: read which actions of x are given.
    """

    def __init__(
        self,
        space: gymnasium.spaces.Box,
        slot_size: int,
        hidden_sizes: Sequence[int],
        takes_action_times: bool = False,
    ) -> None:
        super().__init__()
        self.takes_action_times = takes_action_times
        self.action_size = math.prod(space.shape[1:])
        size, narrow = math.prod(space.shape), min(slot_size, NARROW)
        self.narrow = nn.Identity() if narrow == slot_size else nn.Linear(slot_size, narrow)
        self.network = mlp(
            size * narrow + size + 2 * FREQUENCIES + takes_action_times * space.shape[0],
            hidden_sizes,
            size,
            activation="silu",
            initialization="fan_in",
        )

    def forward(self, features: Features, x: Tensor, t: Tensor) -> Tensor:
        parts = [self.narrow(features.slots).flatten(1), x.flatten(1)]
        if self.takes_action_times:
            times = t[:, None].expand(x.shape[:2]) if t.dim() == 1 else t
            # All other actions have the same time.
            t = times.amax(1)
            parts.append((times == 0).to(x))
        velocity: Tensor = self.network(torch.cat((*parts, embedded_time(t)), 1))
        return velocity.view_as(x)


def embedded_time(t: Tensor) -> Tensor:
    """Return sines and cosines [B, 8] of times [B]."""
    frequencies = math.pi * 2.0 ** torch.arange(FREQUENCIES, device=t.device)
    angle = t[:, None] * frequencies
    return torch.cat((angle.sin(), angle.cos()), 1)


def normal_log_prob(value: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return log N(value; mean, exp(log_std)) [...] of value [...], mean [...], log_std [...]."""
    standardized = (value - mean) * (-log_std).exp()
    return -0.5 * standardized.square() - log_std - HALF_LOG_TWO_PI
