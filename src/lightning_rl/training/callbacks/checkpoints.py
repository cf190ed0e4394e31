"""Keep the last, the best and the latest checkpoints of a run, each whole or absent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from lightning_rl.algorithms import OffPolicyAlgorithm
from lightning_rl.algorithms.checks import weights_to_begin_with
from lightning_rl.algorithms.reference import ReferencePolicy
from lightning_rl.buffers.replay_files import ReplayFolder
from lightning_rl.checkpoints.format import STATE_KEY, read_checkpoint, weights_of, with_contents
from lightning_rl.policies.vla.adapters import with_fresh_adapter
from lightning_rl.system.errors import ConfigurationError, check_range, closest
from lightning_rl.system.files import remove_leftovers, write_atomically
from lightning_rl.system.runs import CHECKPOINTS
from lightning_rl.training.callbacks.typed import algorithm_of

WEIGHTS_ONLY = {"weights_only": True}
"""What `AtomicCheckpointIO` is told to make it save the weights-only kind."""


PATHS: dict[str, type] = {
    "best_model_path": str,
    "kth_best_model_path": str,
    "last_model_path": str,
    "best_k_models": dict,
}
"""What a `ModelCheckpoint` remembers of its files, and removes once better ones are there.

No callback gets it out of a checkpoint, where it may name any file; the scores it does get.
"""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write to a temporary file beside the target, flush it to the disk, and rename it.

    Lightning's own way goes through the system's temporary directory, which often is another file
    system, where a move is a copy that can be cut short. And it may unpickle what it reads.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; a kill at any moment leaves the file that was there before."""
        content = weights_of(checkpoint) if storage_options == WEIGHTS_ONLY else checkpoint
        if STATE_KEY in content:
            content = with_contents(content)
        write_atomically(path, lambda file: torch.save(content, file))

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint as data, whatever `weights_only` says."""
        checkpoint = read_checkpoint(path, map_location)
        for state in (checkpoint.get("callbacks") or {}).values():
            if isinstance(state, dict):
                state |= {key: empty() for key, empty in PATHS.items() if key in state}
        return checkpoint


class LastCheckpoint(Callback):
    """Save `last.ckpt` after every epoch, whatever the evaluation said.

    Not a `Checkpoint` of Lightning's, which would be moved behind `GracefulStop`.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / CHECKPOINTS / "last.ckpt"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the unfinished files of a run that was killed, and those that none refers to."""
        if stage == "fit" and trainer.is_global_zero:
            for directory in (self.path.parent, self.path.parent.parent):
                remove_leftovers(directory)
            ReplayFolder(self.path.parent).remove_unfinished()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, unless a signal cut the epoch short: then that moment has been saved."""
        if getattr(trainer, "stop_signal", None) is None:
            trainer.save_checkpoint(self.path)


class PeriodicCheckpoint(Callback):
    """Save `iteration_000123.ckpt` every so many iterations, and remove the oldest ones.

    One that falls on the end of an epoch is saved after its evaluation.

    Args:
        directory: of the run.
        every_n_iterations: iterations between two checkpoints.
        keep: how many of these files stay; null for all.
        weights_only: save the weights-only kind.

    Raises:
        ConfigurationError: for a number out of range.
    """

    def __init__(
        self, directory: Path, every_n_iterations: int, keep: int | None, weights_only: bool
    ) -> None:
        check_range("trainer.checkpoint_every_n_iterations", every_n_iterations, least=1)
        check_range("trainer.keep_checkpoints", keep, least=1)
        self.directory = directory / CHECKPOINTS
        self.every_n_iterations = every_n_iterations
        self.keep = keep
        self.weights_only = weights_only
        self._due = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Save in the middle of an epoch; at its end, the evaluation comes first."""
        self._due = trainer.global_step % self.every_n_iterations == 0
        if self._due and not (trainer.is_last_batch or trainer.should_stop):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what the end of the epoch has put off."""
        if self._due:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._due = False
        path = self.directory / f"iteration_{trainer.global_step:06d}.ckpt"
        trainer.save_checkpoint(path, self.weights_only)
        if self.keep is not None and trainer.is_global_zero:
            # By age: a run that resumed from an earlier iteration has files of later ones.
            files = sorted(path.parent.glob("iteration_*.ckpt"), key=_age)
            for old in files[: -self.keep]:
                old.unlink(missing_ok=True)


class BestCheckpoint(ModelCheckpoint):
    """Keep the checkpoint of the best evaluation as `best.ckpt`.

    Args:
        directory: of the run.
        metric: by which an evaluation is judged: `eval/...`.
        mode: `max` or `min`.
        weights_only: save the weights-only kind.

    Raises:
        ConfigurationError: for a metric that is not one of the evaluation.
    """

    def __init__(
        self, directory: Path, metric: str, mode: Literal["max", "min"], weights_only: bool
    ) -> None:
        if not metric.startswith("eval/"):
            raise ConfigurationError(
                f"trainer.best_metric must be a metric of the evaluation, eval/..., got '{metric}'."
            )
        self.metric = metric
        super().__init__(
            dirpath=directory / CHECKPOINTS,
            filename="best",
            monitor=metric,
            mode=mode,
            save_weights_only=weights_only,
            auto_insert_metric_name=False,
            enable_version_counter=False,
            save_on_train_epoch_end=False,
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare, and save.

        Raises:
            ConfigurationError: where the evaluation has no such metric.
        """
        if trainer.state.fn == "fit" and self.metric not in trainer.callback_metrics:
            known = sorted(key for key in trainer.callback_metrics if key.startswith("eval/"))
            raise ConfigurationError(
                f"trainer.best_metric is '{self.metric}', which the evaluation does not have; it "
                f"has {', '.join(known)}{closest(self.metric, known)}."
            )
        super().on_validation_end(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the best score, also where the run directory has been moved since.

        In another run's directory, which has no `best.ckpt` yet, the search begins anew.
        """
        path = Path(str(self.dirpath)) / "best.ckpt"
        if path.is_file():
            here, score = str(path), state_dict["best_model_score"]
            moved = {
                "best_model_path": here,
                "kth_best_model_path": here,
                "best_k_models": {here: score},
            }
            super().load_state_dict(state_dict | moved | {"dirpath": self.dirpath})


class WarmStart(Callback):
    """Begin a new run with the policy of a checkpoint: its weights, and nothing else of it.

    The policy does what that of the checkpoint did, or is refused; a critic may be new, or be left
    out (see `Policy.critic_modules`).

    Args:
        find: returns the path of the checkpoint.
    """

    def __init__(self, find: Callable[[], Path]) -> None:
        self.find = find

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the weights, unless the run resumes: then it has its own."""
        module = algorithm_of(pl_module)
        if module.env_steps > 0:
            return
        checkpoint, own = read_checkpoint(self.find()), module.policy.state_dict()
        own = {f"policy.{name}": value for name, value in own.items()}
        checkpoint["state_dict"], fresh = with_fresh_adapter(own, checkpoint["state_dict"])
        weights, note = weights_to_begin_with(module.policy, checkpoint)
        for told in (fresh, note):
            if told is not None:
                rank_zero_info(told)
        module.policy.load_state_dict(weights)
        if isinstance(module, OffPolicyAlgorithm):
            module.begin_with_policy()
        reference = getattr(pl_module, "reference", None)
        if isinstance(reference, ReferencePolicy):
            reference.remember()


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name
