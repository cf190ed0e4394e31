"""The one stepping loop, of training, evaluation and recording: act, step, look at what came."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_rl.envs import VectorEnv
from lightning_rl.envs.vector_env import Observation
from lightning_rl.phases import PhaseTimer, no_phases

Chooser = Callable[[Observation, Tensor], Tensor]
"""Gives the actions [N, *A] for an observation [N, ...] and the rows [N] bool that still run."""


class Acts(Protocol):
    """Chooses the actions: a `RolloutActor` on the storage of a rollout, or `FirstEpisodes`."""

    def act(self, t: int) -> None:
        """Choose the actions of step t."""


class Steps(Protocol):
    """Steps an env: a `RolloutStepper` on the storage of a rollout, or `FirstEpisodes`."""

    def step(self, t: int) -> dict[str, Any]:
        """Step by the actions of step t, keep what follows from them, and return the info."""


def step_through(
    actor: Acts,
    stepper: Steps,
    num_steps: int,
    *,
    before: Callable[[int], None] | None = None,
    phase: PhaseTimer = no_phases,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step an env, and hand out after each step its number, from 0, and its info.

    Who looks on stands in the body of the loop over it, and may break it off. No gradients are
    wanted: switch them off around that loop, not here, as a generator runs in its caller's mode.

    Args:
        actor: chooses the actions.
        stepper: steps the env by them.
        num_steps: at most.
        before: called before each step with its number; what it raises ends the loop.
        phase: times the phases `inference` and `env`.
    """
    for t in range(num_steps):
        if before is not None:
            before(t)
        with phase("inference"):
            actor.act(t)
        with phase("env"):
            info = stepper.step(t)
        yield t, info


class FirstEpisodes:
    """Play the first episode of some rows of an env, side by side and without storage.

    What a row does afterwards is played on, and does not count. Iterate to play: each step hands
    out its info.

    Args:
        env: is reset.
        choose: gives the actions; the observation that it gets holds until the next step.
        seeds: of the M episodes, M at most N; row i plays the i-th, the rows beyond do not count.
        max_steps: after which an episode is cut.

    Attributes:
        running: [N] bool, on the CPU: the episodes that have not ended.
        counted: [N] bool, on the CPU: the rows whose last step counts, those that ended by it
            included.
        observation: [N, ...], what the next actions are chosen for.
        action: [N, *A], the last one.
        reward, terminated, truncated: [N], of the last step.
    """

    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor

    def __init__(
        self,
        env: VectorEnv,
        choose: Chooser,
        seeds: Sequence[int],
        max_steps: int,
    ) -> None:
        self._env, self._choose, self._max_steps = env, choose, max_steps
        idle = [seeds[0]] * (env.num_envs - len(seeds))
        self.observation, _ = env.reset(seed=[*seeds, *idle])
        self.running = self.counted = torch.arange(env.num_envs) < len(seeds)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for t, info in step_through(self, self, self._max_steps):
            done = self.terminated.cpu() | self.truncated.cpu()
            self.counted = self.running
            self.running = self.counted & ~done & (t + 1 < self._max_steps)
            yield info
            if not self.running.any():
                break

    def act(self, t: int) -> None:
        """Choose the actions for the present observation."""
        self.action = self._choose(self.observation, self.running)

    def step(self, t: int) -> dict[str, Any]:
        """Step by the chosen actions."""
        self.observation, self.reward, self.terminated, self.truncated, info = self._env.step(
            self.action
        )
        return info
