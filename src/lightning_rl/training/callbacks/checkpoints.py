"""Write the last, best and periodic checkpoints of a run, each complete or absent."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_rl.algorithms.base import Algorithm
from lightning_rl.algorithms.checkpoint_checks import warm_start_weights
from lightning_rl.buffers.replay_files import ReplayFolder
from lightning_rl.checkpoints.format import (
    STATE_KEY,
    read_checkpoint,
    readable,
    weights_of,
    with_contents,
)
from lightning_rl.checkpoints.own import signed
from lightning_rl.collectors.evaluation import logged_values
from lightning_rl.system.construction import config_of
from lightning_rl.system.errors import ConfigurationError, check_range, closest
from lightning_rl.system.files import remove_leftovers, write_atomically
from lightning_rl.system.saved_runs import CHECKPOINTS
from lightning_rl.system.sharded import load_whole
from lightning_rl.training.callbacks.settings import (
    differences,
    evaluation_protocol,
    warn_of_first_values,
)
from lightning_rl.training.callbacks.typed import algorithm_of

WEIGHTS_ONLY = {"weights_only": True}
"""Storage options that make `AtomicCheckpointIO` save a weights-only checkpoint."""


PATHS: dict[str, type] = {
    "best_model_path": str,
    "kth_best_model_path": str,
    "last_model_path": str,
    "best_k_models": dict,
}
"""Paths in the state of a `ModelCheckpoint`, which deletes these files; they are not loaded."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write checkpoints to a temporary file in the target's folder, flush, and rename it.

    Lightning writes via the system's temporary directory, often on another file system, where a
    move is an interruptible copy, and may unpickle the files that it reads.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        content = weights_of(checkpoint) if storage_options == WEIGHTS_ONLY else checkpoint
        # A later read would refuse the whole file, and the run would be lost.
        content = readable(content, "")
        if STATE_KEY in content:
            content = with_contents(signed(content))
        write_atomically(path, lambda file: torch.save(content, file))

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        checkpoint = read_checkpoint(path, map_location)
        # The run may have moved since: Lightning would delete files of another run.
        for state in (checkpoint.get("callbacks") or {}).values():
            if isinstance(state, dict):
                state |= {key: empty() for key, empty in PATHS.items() if key in state}
        return checkpoint


NUMBERED = re.compile(r"iteration_\d{6,}\.ckpt")
"""Names of the files that `keep_checkpoints` may remove: not a user's copies."""


class LastCheckpoint(Callback):
    """Save `last.ckpt` after every epoch.

    Args:
        directory: the run directory.
    """

    # Do not subclass Lightning's `Checkpoint`, which Lightning would move behind `GracefulStop`.

    def __init__(self, directory: Path) -> None:
        self.path = directory / CHECKPOINTS / "last.ckpt"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            # The run directory is locked: no living process writes these files.
            for directory in (self.path.parent, self.path.parent.parent):
                remove_leftovers(directory)
            ReplayFolder(self.path.parent).remove_unfinished()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After a signal, `GracefulStop` has saved the run.
        if getattr(trainer, "stop_signal", None) is None:
            trainer.save_checkpoint(self.path)


class PeriodicCheckpoint(Callback):
    """Save `iteration_000123.ckpt` at a fixed interval, and remove the oldest files.

    At the end of an epoch, the checkpoint follows the evaluation.

    Args:
        directory: the run directory.
        every_n_iterations: iterations between two checkpoints.
        keep: number of files to keep; null for all.
        weights_only: save weights-only checkpoints.
    """

    def __init__(
        self, directory: Path, every_n_iterations: int, keep: int | None, weights_only: bool
    ) -> None:
        check_range("trainer.checkpoint_every_n_iterations", every_n_iterations, minimum=1)
        check_range("trainer.keep_checkpoints", keep, minimum=1)
        self.directory = directory / CHECKPOINTS
        self.every_n_iterations = every_n_iterations
        self.keep = keep
        self.weights_only = weights_only
        self._due = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._due = trainer.global_step % self.every_n_iterations == 0
        # At the end of an epoch, the evaluation comes first.
        if self._due and not (trainer.is_last_batch or trainer.should_stop):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._due:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._due = False
        path = self.directory / f"iteration_{trainer.global_step:06d}.ckpt"
        trainer.save_checkpoint(path, self.weights_only)
        if self.keep is not None and trainer.is_global_zero:
            # Sort by age: a run that resumed from an earlier iteration has files of later
            # iterations.
            files = [file for file in path.parent.iterdir() if NUMBERED.fullmatch(file.name)]
            files.sort(key=_age)
            for old in files[: -self.keep]:
                old.unlink(missing_ok=True)


class BestCheckpoint(ModelCheckpoint):
    """Keep the checkpoint of the best evaluation as `best.ckpt`.

    Args:
        directory: the run directory.
        metric: metric of the evaluation, `eval/...`.
        mode: `max` or `min`.
        weights_only: save a weights-only checkpoint.

    Raises:
        ConfigurationError: if the metric does not begin with `eval/`.
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
        self._has_warned = False
        self._protocol: dict[str, Any] | None = None  # of the evaluations that gave the scores

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare, and save; skip an evaluation in which no episode reported the metric.

        Raises:
            ConfigurationError: if evaluations have no such metric.
        """
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._forget_other_scores(evaluation_protocol(trainer, pl_module))
        metrics = sorted(key for key in trainer.callback_metrics if key.startswith("eval/"))
        # An episode may report a metric at a success alone, and `callback_metrics` keeps old ones.
        is_reported = self.metric.startswith(("eval/metrics/", "eval/success_"))
        of_this = logged_values(algorithm_of(pl_module).evaluation) if is_reported else metrics
        if trainer.state.fn == "fit" and self.metric not in of_this:
            lack = (
                f"trainer.best_metric is '{self.metric}', which the evaluation does not have; it "
                f"has {', '.join(metrics)}{closest(self.metric, metrics)}."
            )
            if not is_reported:
                raise ConfigurationError(lack)
            if not self._has_warned:
                rank_zero_warn(f"{lack} An evaluation without it cannot be the best one.")
            self._has_warned = True
            return
        super().on_validation_end(trainer, pl_module)

    def _forget_other_scores(self, protocol: dict[str, Any]) -> None:
        changed, self._protocol = differences(self._protocol, protocol), protocol
        if changed and self.best_model_score is not None:
            rank_zero_info(
                f"best.ckpt was chosen by another evaluation ({', '.join(changed)}): its score "
                "does not count any more, and the present evaluation is the best one."
            )
            self.best_k_models, self.best_model_score = {}, None
            self.best_model_path = self.kth_best_model_path = ""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"protocol": self._protocol}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score if `best.ckpt` exists; the run directory may have moved."""
        path = Path(str(self.dirpath)) / "best.ckpt"
        # Without a file or a score, any next evaluation is the best.
        if path.is_file() and state_dict["best_model_score"] is not None:
            file, score = str(path), torch.as_tensor(state_dict["best_model_score"]).reshape(())
            moved = {
                "best_model_path": file,
                "kth_best_model_path": file,
                "best_k_models": {file: score},
            }
            super().load_state_dict(state_dict | moved | {"dirpath": self.dirpath})
            self._protocol = state_dict.get("protocol")


class WarmStart(Callback):
    """Initialise the policy of a new run with the weights of a checkpoint.

    The policy must act like the checkpoint's policy; only the critic may be new or missing (see
    `Policy.critic_modules`).

    Args:
        find: returns the path of the checkpoint.
    """

    def __init__(self, find: Callable[[], Path]) -> None:
        self.find = find

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = algorithm_of(pl_module)
        # A resumed run has its own weights.
        if module.env_steps > 0:
            return
        checkpoint = read_checkpoint(self.find())
        scale = _reward_scale(checkpoint["state_dict"])
        state = {f"policy.{key}": value for key, value in module.policy.state_dict().items()}
        adapted = module.policy.adapt_state_dict(state, checkpoint["state_dict"])
        checkpoint["state_dict"], adapter_note = adapted
        weights, critic_note = warm_start_weights(module.policy, checkpoint)
        for note in (adapter_note, critic_note):
            if note is not None:
                rank_zero_info(note)
        policy = config_of(module)["init_args"].get("policy")
        warn_of_first_values({"init_args": {"policy": policy}}, checkpoint)
        load_whole(module.policy, weights)
        if module.policy.has_critic and critic_note is None:
            _take_reward_scale(module, scale)
        module.after_warm_start()


def _reward_scale(state: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "reward_normalizer."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _take_reward_scale(module: Algorithm, scale: dict[str, Tensor]) -> None:
    """Scale rewards as the checkpoint does, because its critics are in these units."""
    normalizer = module.reward_normalizer
    if normalizer is not None and scale.keys() == normalizer.state_dict().keys():
        normalizer.load_state_dict(scale)
    elif normalizer is not None or scale:
        rank_zero_info(
            f"The checkpoint has {'a' if scale else 'no'} scale of rewards, but this run has "
            f"{'another' if scale and normalizer else 'one' if normalizer else 'none'}: a trained "
            "critic begins in other units. Set model.normalize_reward as in the checkpoint's run."
        )


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name
