"""Simulate a policy that takes long to infer, for tests and benchmarks."""

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict

from lightning_rl.policies.base import Policy, RolloutActor
from lightning_rl.policies.wrapper import PolicyWrapper
from lightning_rl.system.errors import check_range

PolicyFactory = Callable[[gymnasium.Space[Any], gymnasium.Space[Any]], Policy]
"""Makes a policy from the observation and the action space.

In YAML the class and its other arguments.
"""


class SlowPolicy(PolicyWrapper):
    """Another policy, with a simulated inference delay: each call that acts sleeps first.

    It stands for a large model on a device of its own: the CPU is free meanwhile, and the delay
    does not depend on how many envs there are. The update is not delayed.

    Args:
        observation_space, action_space: of one env.
        policy: makes the policy that does the work.
        delay_ms: of each call that acts, in milliseconds of wall time.

    Raises:
        ConfigurationError: for a negative delay.
    """

    training_settings = ("delay_ms",)

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        policy: PolicyFactory,
        delay_ms: float,
    ) -> None:
        check_range("delay_ms", delay_ms, least=0)
        super().__init__(policy(observation_space, action_space))
        self.delay_ms = delay_ms

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        self.wait()
        return super().forward(td, deterministic, generator)

    def wait(self) -> None:
        """Take the time of one inference."""
        time.sleep(self.delay_ms / 1000.0)

    def rollout_actor(self, rollout: TensorDict) -> RolloutActor:
        return SlowActor(self, self.inner.rollout_actor(rollout))


class SlowActor(RolloutActor):
    """What acts for the policy inside, with the delay of the one around it."""

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
