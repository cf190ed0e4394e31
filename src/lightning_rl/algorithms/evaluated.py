"""Play evaluation episodes when Lightning validates or tests."""

from typing import Any, Protocol, cast

from lightning.pytorch import LightningModule

from lightning_rl import ranks
from lightning_rl.construction import Constructed
from lightning_rl.envs import VectorEnv
from lightning_rl.evaluation import Episode, Watcher, logged_values, run_episodes, summarize
from lightning_rl.policies import Policy
from lightning_rl.policies.precision import autocast


class TrainingData(Protocol):
    """What a module wants to know of the data module."""

    @property
    def num_envs(self) -> int: ...

    @property
    def buffer_size(self) -> int: ...

    @property
    def env_steps_per_iteration(self) -> int: ...

    @property
    def total_iterations(self) -> int: ...

    @property
    def max_staleness(self) -> int: ...

    @property
    def reports_success(self) -> bool: ...

    @property
    def acted_by_policy(self) -> bool: ...

    @property
    def eval_env(self) -> VectorEnv: ...

    @property
    def eval_env_reports_success(self) -> bool: ...

    @property
    def eval_deterministic(self) -> bool: ...

    def seed_for(self, purpose: str) -> int: ...

    def publish(self) -> None: ...


class EvaluatedModule(LightningModule, Constructed):
    """A policy in a LightningModule, evaluated on one episode per seed.

    Attributes:
        policy: what acts.
        env_steps: env steps trained on so far, over all ranks.
        evaluation: the summary of the last evaluation (see `summarize`), with `env_steps` and
            `deterministic`.
        watch: looks on at the episodes; a callback's, for as long as it wants to.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.env_steps = 0
        self.evaluation: dict[str, Any] = {}
        self.watch: Watcher | None = None
        self._episodes: list[Episode] = []

    @property
    def data(self) -> TrainingData:
        """The data module of the trainer."""
        return cast(TrainingData, self.trainer.datamodule)  # type: ignore[attr-defined]  # set by `fit`

    def setup(self, stage: str) -> None:
        """Have the policy act as it is trained."""
        self.policy.compute_in(str(self.trainer.precision))

    def play(self, seeds: list[int], watch: Watcher | None = None) -> list[Episode]:
        """Play one episode per seed in the evaluation's env; alike however often it is asked."""
        data = self.data
        with autocast(self.policy.version.device, self.policy.autocast_dtype):
            return run_episodes(
                self.policy,
                data.eval_env,
                seeds,
                deterministic=data.eval_deterministic,
                watch=watch,
            )

    def validation_step(self, seeds: list[int], batch_idx: int) -> None:
        """Play the episodes of a batch of seeds; a rank may have an empty one."""
        if seeds:
            self._episodes += self.play(seeds, self.watch)

    def on_validation_epoch_end(self) -> None:
        """Summarise the episodes of all ranks, for the monitors and the log."""
        gathered = ranks.gather_over_ranks(self._episodes)
        episodes = [episode for one in gathered for episode in one]  # by seed, as by rank
        self.evaluation = summarize(episodes, self.data.eval_env_reports_success) | {
            "deterministic": self.data.eval_deterministic,
            "env_steps": self.env_steps,
        }
        self._episodes = []
        # For monitors; the loggers get it from MetricsWriter, over env steps.
        self.log_dict(logged_values(self.evaluation), logger=False)

    def test_step(self, seeds: list[int], batch_idx: int) -> None:
        """Play the episodes of a batch of seeds."""
        self.validation_step(seeds, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Summarise the episodes."""
        self.on_validation_epoch_end()
