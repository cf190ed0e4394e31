"""Write all metrics to the loggers at each logging interval, over env steps."""

import math
import time
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.collectors.evaluation import logged_values
from lightning_rl.training.callbacks.loggers import EnvStepLogger
from lightning_rl.training.callbacks.settings import differences, evaluation_protocol
from lightning_rl.training.callbacks.typed import algorithm_of, data_of


class MetricsWriter(Callback):
    """Collect the metrics of algorithm, collector and clocks, and write them to the loggers.

    Args:
        best_metric: metric of the evaluation whose best value so far is also written, as
            `<metric>_best`, to compare runs.
        best_mode: whether the largest (max) or the smallest (min) value is the best.

    Attributes:
        latest: the metrics of the last iteration.
    """

    def __init__(
        self, best_metric: str = "eval/avg_reward", best_mode: Literal["max", "min"] = "max"
    ) -> None:
        self.latest: dict[str, float] = {}
        self.best_metric = best_metric
        self._better = max if best_mode == "max" else min
        self._best: float | None = None
        self._protocol: dict[str, Any] | None = None  # of the evaluations that gave the best value
        self._started = 0.0
        self._env_steps = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        algorithm = algorithm_of(pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, EnvStepLogger):
                logger.module = algorithm
                if algorithm.env_steps:
                    # Rows after the checkpoint belong to iterations that this run repeats.
                    logger.purge_after(algorithm.env_steps)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._started = time.perf_counter()
        self._env_steps = algorithm_of(pl_module).env_steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        update = time.perf_counter() - self._started
        data, algorithm = data_of(trainer), algorithm_of(pl_module)
        assert data.dataset is not None
        assert data.collector is not None
        collect = data.dataset.collect_seconds
        steps = algorithm.env_steps - self._env_steps
        self.latest = {
            **algorithm.metrics,
            **data.collector.metrics(),
            **(data.replay.metrics() if data.replay is not None else {}),
            "charts/SPS": steps / (collect + update),
            "charts/SPS_collect": steps / collect,
            "charts/SPS_update": steps / update,
        }
        # Write directly into `callback_metrics`: `self.log` takes 0.25 ms per metric and step.
        reward = self.latest.get("charts/episode_reward_avg_100")
        if reward is not None:
            trainer.callback_metrics["charts/episode_reward_avg_100"] = torch.tensor(reward)
        interval = cast(Any, trainer).log_every_n_steps
        # A run that stops writes its last iteration, too.
        if interval and (trainer.global_step % interval == 0 or trainer.should_stop):
            self._write(trainer, self.latest, algorithm.env_steps)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's check before training is no result of the run.
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        algorithm = algorithm_of(pl_module)
        values, protocol = logged_values(algorithm.evaluation), self._protocol
        self._protocol = evaluation_protocol(trainer, pl_module)
        if differences(protocol, self._protocol):
            self._best = None
        if (value := values.get(self.best_metric)) is not None:
            if math.isfinite(value):  # NaN would stay the best
                self._best = value if self._best is None else self._better(self._best, value)
            if self._best is not None:
                values[f"{self.best_metric}_best"] = self._best
        self._write(trainer, values, algorithm.env_steps)

    def state_dict(self) -> dict[str, Any]:
        return {self.best_metric: self._best, "protocol": self._protocol}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict.get(self.best_metric)
        self._best = None if best is None else float(best)
        self._protocol = state_dict.get("protocol")

    def _write(self, trainer: Trainer, metrics: dict[str, float], env_steps: int) -> None:
        with algorithm_of(trainer.lightning_module).phase("logging"):
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=env_steps)
