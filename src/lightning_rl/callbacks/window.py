"""Show the episodes of an evaluation in a window, one after the other."""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rl.callbacks.typed import algorithm_of, data_of
from lightning_rl.errors import require


class Window(Callback):
    """Have the env of the evaluation open a window, and print a line when an episode ends.

    `RLTrainer.play` puts it in the place of the report.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open it, before Lightning asks which episodes are played together.

        Raises:
            ConfigurationError: where the env has none, and with several processes.
        """
        require(
            trainer.world_size == 1,
            f"A policy is watched in one process, and these are {trainer.world_size}: add "
            "--trainer.devices 1 --trainer.strategy auto.",
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
        """Look on at one episode."""
        data = data_of(trainer)
        taken = "env steps" if data.eval_env.steps_per_action == 1 else "chunks"

        def watch(step: int, returns: Tensor, running: Tensor) -> None:
            if not running.any():
                number = f"Episode {batch_idx + 1} of {data.num_eval_episodes}"
                said = f"return {float(returns[0]):.2f} after {step} {taken}"
                print(f"{number} (seed {batch[0]}): {said}", flush=True)

        algorithm_of(pl_module).watch = watch

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look away, and sum up."""
        algorithm = algorithm_of(pl_module)
        algorithm.watch = None
        print(f"Average return: {algorithm.evaluation['avg_reward']:.2f}", flush=True)
