"""Play one episode per row of an env, without storage: evaluation and recording."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rl.collectors.loop import run_steps
from lightning_rl.envs import VectorEnv
from lightning_rl.envs.steppers import interventions
from lightning_rl.envs.vector_env import Observation
from lightning_rl.system.phases import PhaseTimer, no_phases

ActionFunction = Callable[[Observation, Tensor], Tensor]
"""Returns actions [N, *A] for an observation [N, ...] and the mask [N] bool of running rows."""


def epoch_iterations(total_env_steps: int, env_steps_per_iteration: int) -> int:
    """Return the default iterations of an epoch; `env_steps_per_iteration` of all processes."""
    return max(1, -(-total_env_steps // env_steps_per_iteration) // 20)


class FirstEpisodes:
    """Play the first episode of M rows of an env in parallel, without storage.

    Each step of the iteration yields its info. Finished rows continue to step, but do not count.

    Args:
        env: the env, which is reset.
        choose: returns the actions; its observation is valid until the next step.
        seeds: seeds of the M <= N episodes, one per row from row 0; other rows do not count.
        max_steps: env steps after which an episode is cut. Default: `MAX_STEPS`.
        calls: times the calls into the env; see `EnvWatch`.

    Attributes:
        running: [N] bool on the CPU, rows whose episode has not ended.
        counted: [N] bool on the CPU, rows whose last step counts, also if it ended the episode.
        observation: [N, ...], input of the next actions.
        action: [N, *A], the last actions.
        reward, terminated, truncated: [N], of the last step.
    """

    MAX_STEPS = 100_000
    """Maximum env steps of any episode; a longer one is cut and counts as truncated."""

    LEAST_BOUND = 1_000
    """Smallest limit, in env steps, of an evaluation episode in an env without a time limit."""

    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor

    def __init__(
        self,
        env: VectorEnv,
        choose: ActionFunction,
        seeds: Sequence[int],
        max_steps: int | None,
        calls: PhaseTimer = no_phases,
    ) -> None:
        self._env, self._choose, self._calls = env, choose, calls
        # Rounded up to whole chunks.
        self._max_steps = -(-(max_steps or self.MAX_STEPS) // env.steps_per_action)
        idle = [seeds[0]] * (env.num_envs - len(seeds))  # rows without an episode
        with calls("reset"):
            self.observation, _ = env.reset(seed=[*seeds, *idle])
        self.running = self.counted = torch.arange(env.num_envs) < len(seeds)

    @classmethod
    def endless_limit(
        cls,
        *,
        num_envs: int,
        buffer_size: int,
        total_env_steps: int,
        iterations_per_epoch: int | None,
        steps_per_action: int,
        processes: int,
    ) -> int:
        """Return the env steps after which evaluations cut an episode of an env without a limit.

        These are the steps per env in an epoch of the training, whose settings the arguments are.
        """
        steps = buffer_size * steps_per_action
        of_all = num_envs * steps * processes
        epoch = steps * (iterations_per_epoch or epoch_iterations(total_env_steps, of_all))
        return min(max(cls.LEAST_BOUND, epoch), cls.MAX_STEPS)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for t, info in run_steps(self, self, self._max_steps, calls=self._calls):
            done = self.terminated.cpu() | self.truncated.cpu()
            self.counted = self.running  # the step that ends an episode counts, too
            self.running = self.counted & ~done & (t + 1 < self._max_steps)
            yield info
            if not self.running.any():
                break

    def interventions(self, info: dict[str, Any]) -> dict[str, Tensor]:
        """Return `executed_action` and `intervened` of the last step, from its info."""
        return interventions(self._env, self.action, info)

    def act(self, t: int) -> None:
        """Choose the actions for the current observation."""
        self.action = self._choose(self.observation, self.running)

    def step(self, t: int) -> dict[str, Any]:
        """Step the env with the chosen actions."""
        self.observation, self.reward, self.terminated, self.truncated, info = self._env.step(
            self.action
        )
        return info
