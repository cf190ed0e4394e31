"""Say what a collector is: it steps the env with the policy, and counts what it did."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from lightning_rl.collectors.statistics import EnvReports, EpisodeStatistics
from lightning_rl.envs import VectorEnv
from lightning_rl.phases import PhaseTimer, no_phases
from lightning_rl.policies import Policy


@dataclass(frozen=True)
class EpisodePlan:
    """How an algorithm wants the episodes of a rollout to begin and to end.

    Attributes:
        group_size: G rows that follow each other begin in the same state.
        reset_every_rollout: begin every rollout with new episodes.
        first_episode_only: what follows the first episode of a row does not count; the rollout ends
            as soon as every row has had one.
    """

    group_size: int = 1
    reset_every_rollout: bool = False
    first_episode_only: bool = False


class Collector(ABC):
    """Collects rollouts of batch shape [N, T+1].

    A subclass's constructor begins with these four arguments; the data module fills them in, the
    config sets the rest.

    Args:
        env: stepped by this collector alone.
        policy: acts; the collector reads its weights and never writes them.
        num_steps: T, steps per env in a rollout.
        seed: of the env and of the sampling of actions.

    Attributes:
        plan: how episodes begin and end; set by the data module, from the algorithm.
        statistics: returns and lengths of finished episodes.
        reports: means of what the env says of its rewards and metrics.
        env_steps: steps collected so far, over all N envs of this process.
        max_staleness: by how many updates the weights behind a step may lag the learner's when it
            is trained on.
        phase: times the phases `env` and `inference`, for a profiler.
    """

    max_staleness: int = 0

    def __init__(self, env: VectorEnv, policy: Policy, num_steps: int, seed: int) -> None:
        self.env = env
        self.policy = policy
        self.num_steps = num_steps
        self.seed = seed
        self.plan = EpisodePlan()
        self.statistics = EpisodeStatistics(env.num_envs)
        self.reports = EnvReports()
        self.env_steps = 0
        self.phase: PhaseTimer = no_phases

    @abstractmethod
    def collect(self) -> TensorDict:
        """Return a rollout of batch shape [N, T+1]; its storage holds until the next call."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to collect on, bit for bit."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state before the first `collect`."""

    def close(self) -> None:  # noqa: B027  # a collector without threads has nothing to stop
        """Stop threads and processes of the collector.

        May be called more than once; the env is not its to close.
        """
