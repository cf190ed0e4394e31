"""Simulate slow inference, for tests and benchmarks."""

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict

from lightning_rl.policies.actors import RolloutActor
from lightning_rl.policies.base import RNG, Policy
from lightning_rl.policies.wrapper import PolicyWrapper
from lightning_rl.system.errors import check_range

PolicyFactory = Callable[[gymnasium.Space[Any], gymnasium.Space[Any]], Policy]
"""Makes a policy from the two spaces; in YAML, a class and its other arguments."""


class SlowPolicy(PolicyWrapper):
    """A policy with a simulated inference delay: each acting call sleeps first.

    The delay does not depend on the number of envs, and updates are not delayed.

    Args:
        observation_space, action_space: spaces of one env.
        policy: makes the wrapped policy.
        delay_ms: delay of each acting call, in milliseconds of wall time.
    """

    training_settings = ("delay_ms",)

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        policy: PolicyFactory,
        *,
        delay_ms: float,
    ) -> None:
        check_range("delay_ms", delay_ms, minimum=0)
        super().__init__(policy(observation_space, action_space))
        self.delay_ms = delay_ms

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        self.wait()
        return super().forward(td, deterministic, generator)

    def wait(self) -> None:
        """Sleep for one inference."""
        time.sleep(self.delay_ms / 1000.0)

    def rollout_actor(self, rollout: TensorDict) -> RolloutActor:
        # The inner policy keeps its fast actor.
        return SlowActor(self, self.inner.rollout_actor(rollout))


class SlowActor(RolloutActor):
    """Acts with the inner policy's actor, after the delay."""

    def __init__(self, policy: SlowPolicy, actor: RolloutActor) -> None:
        self._policy = policy
        self._actor = actor

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._actor.begin(generator, start)

    def act(self, t: int) -> None:
        self._policy.wait()
        self._actor.act(t)

    def finish(self, start: int, stop: int) -> None:
        self._actor.finish(start, stop)
