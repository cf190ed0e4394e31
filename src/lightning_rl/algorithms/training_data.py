"""The part of the data module that algorithms use."""

from typing import Protocol

from lightning_rl.buffers import Replay
from lightning_rl.collectors import Collector
from lightning_rl.envs import VectorEnv
from lightning_rl.system.phases import PhaseTimer


class TrainingData(Protocol):
    """Protocol of `RLDataModule`."""

    num_envs: int
    buffer_size: int
    env_steps_per_iteration: int
    max_episode_actions: int | None
    total_iterations: int
    iterations_per_epoch: int
    max_staleness: int
    may_drop_rollouts: bool
    reports_success: bool
    acted_by_policy: bool
    replay: Replay | None
    collector: Collector | None
    eval_env: VectorEnv
    eval_calls: PhaseTimer
    eval_env_reports_success: bool
    evaluates_on_the_training_env: bool
    eval_deterministic: bool
    max_eval_episode_steps: int

    def seed_for(self, purpose: str) -> int: ...

    def publish(self) -> None: ...
