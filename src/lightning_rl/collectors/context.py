"""The inputs of collectors: env, policy, and how episodes begin and end."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers.segments import Segment, allocate_segments
from lightning_rl.collectors.weights import acting_copy, changing_weights
from lightning_rl.compiled.choice import StepsCompileDecision
from lightning_rl.envs import VectorEnv
from lightning_rl.policies import Policy
from lightning_rl.policies.actors import RolloutActor
from lightning_rl.system.phases import PhaseTimer, no_phases

Mixer = Callable[[RolloutActor, int, TensorDict], RolloutActor | None]
"""Returns the actor of a rollout [N, T+1], from the policy's actor and the env steps of the run;
None: the policy acts alone."""


@dataclass(frozen=True)
class EpisodeSettings:
    """How the episodes of a rollout begin and end, as the algorithm requires.

    Attributes:
        group_size: G consecutive rows begin in the same state.
        reset_every_rollout: begin every rollout with new episodes.
        first_episode_only: count only the first episode of each row; the rollout ends when every
            row has finished one.
        random_env_steps: env steps, over all processes, with uniformly random actions before the
            policy acts; rounded up to whole rollouts.
        mixer: lets a teacher act in a share of the steps.
        keep_start: keep the env's state at the start of each rollout.
    """

    group_size: int = 1
    reset_every_rollout: bool = False
    first_episode_only: bool = False
    random_env_steps: int = 0
    mixer: Mixer | None = None
    keep_start: bool = False


@dataclass(frozen=True)
class CollectorContext:
    """The inputs of a collector; made by the data module.

    Attributes:
        env: N envs, stepped by this collector only and closed by the data module.
        policy: chooses the actions; the collector never changes its weights.
        num_steps: T, steps per env in a rollout.
        seed: seed of the env and of the action sampling.
        episode_settings: how episodes begin and end. Default: as in the env, continuing across
            rollouts.
        phase: times the phases `env` and `inference`, for a profiler.
        calls: times the calls into the env (`with calls("step"): ...`), see `EnvWatch`.
        make_env: makes another env like `env`, for collectors in other processes.
        compilation: how to compile the steps of a batched torch env; None for no compilation.
        env_steps_before: env steps of all processes before this collector was created.
    """

    env: VectorEnv
    policy: Policy
    num_steps: int
    seed: int
    episode_settings: EpisodeSettings = EpisodeSettings()
    phase: PhaseTimer = no_phases
    calls: PhaseTimer = no_phases
    make_env: Callable[[], VectorEnv] | None = None
    compilation: StepsCompileDecision | None = None
    env_steps_before: int = 0

    def segments(self, count: int = 1) -> tuple[Segment, ...]:
        """Allocate segments of T steps for env and policy, on the policy's device."""
        env, policy = self.env, self.policy
        return allocate_segments(
            count,
            env.single_observation_space,
            env.single_action_space,
            env.num_envs,
            self.num_steps,
            extra_fields=policy.extra_fields | env.extra_fields,
            device=policy.version.device,
        )

    def acting_copy(self, device: torch.device) -> Policy:
        """Return a copy of the policy to act with; see `weights.acting_copy`."""
        return acting_copy(self.policy, device)

    def changing_weights(self) -> dict[str, Tensor]:
        """Return the tensors of the policy by name that acting reads and training changes."""
        return changing_weights(self.policy)
