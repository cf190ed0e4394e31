"""Play evaluation episodes when Lightning validates or tests."""

from typing import Any, Protocol, cast

from lightning.pytorch import LightningModule

from lightning_rl.envs import VectorEnv
from lightning_rl.evaluation import Episode, run_episodes, summarize
from lightning_rl.policies import Policy


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
    def eval_env(self) -> VectorEnv: ...

    def seed_for(self, purpose: str) -> int: ...

    def publish(self) -> None: ...


class EvaluatedModule(LightningModule):
    """A policy in a LightningModule, evaluated on one episode per seed.

    Attributes:
        policy: what acts.
        env_steps: env steps trained on so far, over all ranks.
        evaluation: the summary of the last evaluation (see `summarize`), with `env_steps`.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.env_steps = 0
        self.evaluation: dict[str, Any] = {}
        self._episodes: list[Episode] = []

    @property
    def data(self) -> TrainingData:
        """The data module of the trainer."""
        return cast(TrainingData, self.trainer.datamodule)  # type: ignore[attr-defined]  # set by `fit`

    def validation_step(self, seeds: list[int], batch_idx: int) -> None:
        """Play the episodes of a batch of seeds."""
        self._episodes += run_episodes(self.policy, self.data.eval_env, seeds)

    def on_validation_epoch_end(self) -> None:
        """Summarise the episodes, for the monitors and the log."""
        self.evaluation = summarize(self._episodes) | {"env_steps": self.env_steps}
        self._episodes = []
        results = {
            "eval/avg_reward": self.evaluation["avg_reward"],
            "eval/avg_length": self.evaluation["avg_length"],
            "eval/success_rate": self.evaluation["success_rate"],
        }
        # For monitors; the loggers get it from MetricsWriter, over env steps.
        self.log_dict({k: v for k, v in results.items() if v is not None}, logger=False)

    def test_step(self, seeds: list[int], batch_idx: int) -> None:
        """Play the episodes of a batch of seeds."""
        self.validation_step(seeds, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Summarise the episodes."""
        self.on_validation_epoch_end()
