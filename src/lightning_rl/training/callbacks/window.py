"""Print the end of each evaluation episode, and show the episodes in a window."""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rl.system.errors import require
from lightning_rl.system.output import tell
from lightning_rl.training.callbacks.typed import algorithm_of, data_of


class EpisodeLines(Callback):
    """Print a line per evaluation episode, and the average return, for `RLTrainer.play`."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        evaluation = algorithm_of(pl_module).evaluation
        episodes = zip(*(evaluation[key] for key in ("seeds", "returns", "lengths")), strict=True)
        for i, (seed, value, length) in enumerate(episodes):
            _print_episode(i, len(evaluation["seeds"]), seed, value, length)
        _print_average(evaluation["avg_reward"])


class Window(Callback):
    """Open a window of the evaluation env, and print a line at the end of each episode."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the window, before Lightning asks which episodes are played together.

        Raises:
            ConfigurationError: if the env has no window, or the run has several processes.
        """
        require(
            trainer.world_size == 1,
            f"play runs in one process, but there are {trainer.world_size}: add --trainer.devices "
            "1 --trainer.strategy auto.",
        )
        data_of(trainer).show_evaluation()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: list[int],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        data = data_of(trainer)

        def watch(lengths: Tensor, returns: Tensor, running: Tensor) -> None:
            if not running.any():
                count, value = data.num_eval_episodes, float(returns[0])
                _print_episode(batch_idx, count, batch[0], value, int(lengths[0]))

        algorithm_of(pl_module).watch_next(watch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _print_average(algorithm_of(pl_module).evaluation["avg_reward"])


def _print_episode(index: int, count: int, seed: int, value: float, length: int) -> None:
    episode = f"Episode {index + 1} of {count} (seed {seed})"
    tell(f"{episode}: return {value:.2f} after {length} env steps")


def _print_average(average: float) -> None:
    tell(f"Average return: {average:.2f}")
