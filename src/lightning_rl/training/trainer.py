"""Lightning's trainer, configured for reinforcement learning."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    OnExceptionCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from lightning_rl.algorithms.checks import check_not_on_meta, check_strategy
from lightning_rl.buffers.replay_files import REPLAY_FOLDER, ReplayFolder
from lightning_rl.checkpoints.format import restoring
from lightning_rl.collectors.evaluation import logged_values
from lightning_rl.system.construction import Configurable
from lightning_rl.system.errors import ConfigurationError, WriteError, require
from lightning_rl.system.extensions import HOOKS, function_at
from lightning_rl.system.files import expanded, gone, shown
from lightning_rl.system.lightning_private import omit_anonymous, saves_by_time, was_restoring
from lightning_rl.system.machine import MachineSettings
from lightning_rl.system.output import tell
from lightning_rl.system.process import before_forced_exit, flush_denormals, keep_freed_memory
from lightning_rl.system.runs import (
    locked_run,
    new_run_dir,
    refuse_overwriting,
    remove_refused,
    removed_if_refused,
)
from lightning_rl.system.saved_runs import ALIASES, CHECKPOINTS, find_checkpoint
from lightning_rl.system.signals import interrupted_by_signals
from lightning_rl.training.callbacks import (
    AtomicCheckpointIO,
    BestCheckpoint,
    EnvStepBudget,
    EnvStepCSV,
    EnvStepProgress,
    EnvStepTensorBoard,
    EpisodeLines,
    EvaluationReport,
    GracefulStop,
    LastCheckpoint,
    MemoryEstimate,
    MetricsWriter,
    Peers,
    PeriodicCheckpoint,
    RunManifest,
    SettingsWriter,
    VideoSettings,
    WarmStart,
    Window,
)
from lightning_rl.training.callbacks.checkpoints import WEIGHTS_ONLY
from lightning_rl.training.callbacks.typed import algorithm_of
from lightning_rl.training.closing import closing_lines
from lightning_rl.training.data import RLDataModule

NOISE = (
    "GPU available",
    "TPU available",
    "HPU available",
    "Tip:",
    "LOCAL_RANK",
    "You are using the plain ModelCheckpoint",
    "Restoring states from the checkpoint",
    "Restored all states from the checkpoint",
    "Loaded model weights from the checkpoint",
    "`Trainer.fit` stopped",
    "Seed set to",
    "distributed_backend=",
    "All distributed processes registered",
    "Initializing distributed",
    "Your model can run with static graph optimizations",
    "SLURM auto-requeueing enabled",  # nothing is requeued: `GracefulStop` has the signal
)
"""Beginnings or parts of Lightning's messages that are not about the run."""


REFUSED: dict[str, tuple[Any, str]] = {
    "accumulate_grad_batches": (
        1,
        "a batch of Lightning is a rollout, which the update splits into minibatches. For larger "
        "minibatches raise model.batch_size; if memory runs out, set the policy's "
        "micro_batch_size, which accumulates gradients",
    ),
    "gradient_clip_val": (
        None,
        "the update clips its gradients itself: set model.max_grad_norm, the bound on the norm of "
        "the whole gradient",
    ),
    "gradient_clip_algorithm": (
        None,
        "the update clips by the norm of the whole gradient: set model.max_grad_norm",
    ),
    "barebones": (
        False,
        "it disables checkpoints and logs: set trainer.logger and trainer.enable_checkpointing to "
        "false instead",
    ),
    "limit_predict_batches": (None, "there is no prediction: use rl-cli validate or test"),
    "reload_dataloaders_every_n_epochs": (
        0,
        "a new loader would be a second collector with an empty replay. Remove it: each batch is a "
        "new rollout already",
    ),
    "min_epochs": (
        None,
        "a run ends at data.total_env_steps, or after a signal, however few epochs it has had. To "
        "train longer, raise data.total_env_steps",
    ),
    "min_steps": (
        None,
        "a run ends at data.total_env_steps, or after a signal, however few iterations it has had. "
        "To train longer, raise data.total_env_steps",
    ),
}
"""Settings of Lightning's trainer that do not fit: the only allowed value, and the reason."""


SPLITTING = ("fsdp_", "deepspeed", "xla", "model_parallel")
"""Name prefixes of strategies of Lightning that shard a policy over processes."""


class RLTrainer(Trainer, Configurable):
    """Lightning's `Trainer` with the callbacks, loggers and checkpoint files of this package.

    An iteration is one rollout and its update; an epoch is `data.iterations_per_epoch` iterations;
    `global_step` counts iterations. Training ends at `data.total_env_steps` at the latest, even if
    `max_epochs` and `max_steps` allow more.

    Args:
        num_threads: CPU threads of torch, for the whole process. One is fastest for small networks,
            and makes results independent of the number of cores. Raise it for large networks on a
            CPU.
        flush_denormal: treat numbers below 1.2e-38 as zero in the calling thread and its new
            threads, because Intel CPUs are many times slower on such numbers. The attribute
            `flush_denormal` is true if the CPU supports it.
        machine: switches of optimisations; see `MachineSettings`.
        exp_name: prefix of the run directory's name.
        output_dir: parent of the run directories.
        run_dir: directory of this run. Default: a new `output_dir/exp_name_<timestamp>`. It stays
            empty until training starts, and is removed at exit if still empty.
        video: true records all evaluations (`--video true` for short); `VideoSettings` choose which
            ones and how.
        logger: Lightning loggers. Default: TensorBoard in `run_dir/logs`. `logs/metrics.csv` is
            always written too; false disables all loggers.
        callbacks: additional callbacks.
        enable_checkpointing: write `last.ckpt` and `best.ckpt`.
        best_metric: evaluation metric that selects `best.ckpt`.
        best_mode: whether the largest (max) or the smallest (min) value is the best.
        checkpoint_every_n_iterations: also write `iteration_<number>.ckpt` at this interval; null
            for none.
        keep_checkpoints: number of `iteration_*.ckpt` files to keep, the newest; null for all.
        checkpoint_weights_only: write `best.ckpt` and `iteration_*.ckpt` without the state that
            only a resumed run needs; `last.ckpt` stays full.
        save_replay: save the replay buffer of an off-policy algorithm next to each full checkpoint,
            in `checkpoints/replay`; only new transitions are written. If false, a resumed run
            begins with an empty replay.
        restore_replay: restore the replay of the resumed checkpoint; false begins with an empty
            replay.
        init_from: checkpoint (or run directory, `last` or `best`) whose policy initialises a new
            run; ignored by a resumed run.
        enable_progress_bar: show progress, by a `ProgressBar` among the callbacks if there is one.
        max_epochs: maximum number of epochs; -1 for no limit but the budget.
        num_sanity_val_steps: evaluation batches before training.
        log_every_n_steps: iterations between two logged rows of metrics.
        enable_model_summary: print the modules and their parameters when a run begins.
        kwargs: see Lightning's `Trainer`.

    Attributes:
        stop_signal: the signal that ended the last `fit`, or None.
        keeps_freed_memory: whether the C library keeps freed memory, see `keep_freed_memory`.
    """

    stop_signal: int | None = None

    _check_run_dir: Callable[[], None] = staticmethod(lambda: None)  # it is not locked yet

    _recorder: Any = None  # of the extension `videos`

    _fitted: LightningModule | None = None  # by the last `fit`

    def __init__(
        self,
        *,
        num_threads: int = 1,
        flush_denormal: bool = True,
        machine: MachineSettings | None = None,
        exp_name: str = "run",
        output_dir: str = "outputs",
        run_dir: str | None = None,
        video: VideoSettings | bool = False,
        logger: Logger | list[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        enable_checkpointing: bool = True,
        best_metric: str = "eval/avg_reward",
        best_mode: Literal["max", "min"] = "max",
        checkpoint_every_n_iterations: int | None = None,
        keep_checkpoints: int | None = 5,
        checkpoint_weights_only: bool = False,
        save_replay: bool = True,
        restore_replay: bool = True,
        init_from: str | None = None,
        enable_progress_bar: bool = True,
        max_epochs: int = -1,
        num_sanity_val_steps: int = 0,
        log_every_n_steps: int = 1,
        enable_model_summary: bool = False,
        **kwargs: Any,
    ) -> None:
        quieten_framework()
        _refuse(kwargs)
        self._set_process_up(num_threads, flush_denormal, machine or MachineSettings())
        self.run_dir, self._output_dir = _chosen_dir(run_dir, output_dir, exp_name), output_dir
        self.save_replay, self.restore_replay = save_replay, restore_replay
        self._replay_folders: dict[Path, ReplayFolder] = {}
        with removed_if_refused(self.run_dir):
            user_callbacks = _usable_callbacks(callbacks)
            metrics = MetricsWriter(best_metric, best_mode)
            package = self._callbacks(user_callbacks, metrics, video, enable_progress_bar)
            if enable_checkpointing:
                interval, weights_only = checkpoint_every_n_iterations, checkpoint_weights_only
                package.append(BestCheckpoint(self.run_dir, best_metric, best_mode, weights_only))
                if not kwargs.get("fast_dev_run"):  # a smoke test leaves none for `last`
                    package += self._later_checkpoints(interval, keep_checkpoints, weights_only)
            if init_from is not None:
                package.append(WarmStart(lambda: find_checkpoint(init_from, output_dir)))
            with _readable():
                super().__init__(
                    logger=_loggers(self.run_dir / "logs", logger),
                    callbacks=[*user_callbacks, *package, RunManifest(self.run_dir)],
                    enable_checkpointing=enable_checkpointing,
                    enable_progress_bar=enable_progress_bar,
                    enable_model_summary=enable_model_summary,
                    max_epochs=max_epochs,
                    num_sanity_val_steps=num_sanity_val_steps,
                    log_every_n_steps=log_every_n_steps,
                    default_root_dir=str(self.run_dir),
                    plugins=[*_as_list(kwargs.pop("plugins", None)), AtomicCheckpointIO()],
                    **kwargs,
                )
            self._use_strategy()

    def _set_process_up(
        self, num_threads: int, flush_denormal: bool, machine: MachineSettings
    ) -> None:
        require(num_threads >= 1, f"trainer.num_threads must be at least 1, got {num_threads}.")
        # Do this first: threads that torch starts later inherit the setting.
        self.flush_denormal = flush_denormals(flush_denormal)
        torch.set_num_threads(num_threads)
        machine.apply()
        self.keeps_freed_memory = machine.keep_freed_memory and keep_freed_memory()

    def _use_strategy(self) -> None:
        check_strategy(self)
        # Lightning takes the rank from the environment, even if a SLURM task trains alone.
        cast(Any, rank_zero_only).rank = self.global_rank

    def _callbacks(
        self,
        user_callbacks: list[Callback],
        metrics: MetricsWriter,
        video: VideoSettings | bool,
        progress: bool,
    ) -> list[Callback]:
        # Lightning calls callbacks in this order: `Peers` shares the run directory before its use;
        # the budget sets `should_stop`, which metrics and checkpoints read; progress reads metrics.
        callbacks: list[Callback] = [Peers(), EnvStepBudget(), metrics]
        callbacks.append(EvaluationReport(self.run_dir))
        if not any(isinstance(callback, SettingsWriter) for callback in user_callbacks):
            callbacks.append(SettingsWriter())
        if video:
            settings = video if isinstance(video, VideoSettings) else VideoSettings()
            self._recorder = function_at(HOOKS["film"])(self.run_dir, settings)
            callbacks.append(self._recorder)
        if progress:
            has_bar = any(isinstance(callback, ProgressBar) for callback in user_callbacks)
            callbacks += [*([] if has_bar else [EnvStepProgress(metrics)]), MemoryEstimate()]
        return callbacks

    def _later_checkpoints(
        self, every: int | None, keep: int | None, small: bool
    ) -> list[Callback]:
        """Return the callbacks after the evaluation; `GracefulStop` must be the last one."""
        periodic = [] if every is None else [PeriodicCheckpoint(self.run_dir, every, keep, small)]
        return [*periodic, LastCheckpoint(self.run_dir), GracefulStop(self.run_dir)]

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any | None = None,
    ) -> None:
        is_training = self.state.fn == "fit" and self.state.status == "running"  # so it is locked
        if is_training and self.run_dir in Path(filepath).parents:
            self._check_run_dir()
        for logger in self.loggers:
            logger.save()  # a run resumed from this checkpoint does not log these rows again
        # Lightning's weights-only checkpoints lack the configuration of the policy.
        options = WEIGHTS_ONLY if weights_only else storage_options
        directory = Path(filepath).absolute().parent
        with nullcontext() if weights_only else self._with_replay(directory):
            super().save_checkpoint(filepath, weights_only=False, storage_options=options)
        # Remove the files of a replaced checkpoint after writing the new one.
        folder = self._replay_folders.setdefault(directory, ReplayFolder(directory))
        folder.remove_unnamed()

    def _with_replay(self, directory: Path) -> AbstractContextManager[None]:
        data = self.datamodule  # type: ignore[attr-defined]  # set by `fit`
        if not self.save_replay or not isinstance(data, RLDataModule):
            return nullcontext()
        return data.states.replay_saved_to(directory / REPLAY_FOLDER)

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train, with exclusive use of the run directory; resume from `ckpt_path`.

        `ckpt_path` is a checkpoint, a run directory, or `last` or `best` of this trainer's run, or
        without one of the newest run in `output_dir`; also in `check`, `validate`, `test`, `play`.

        Raises:
            ConfigurationError: without an `RLDataModule`, if there is no such checkpoint, if
                another process uses the run directory, if it holds another run, or if settings
                contradict each other; a new run then leaves no directory.
            WriteError: if the disk is full or the run directory was deleted; the message names the
                checkpoint to resume from.
        """
        check_not_on_meta(self, model)
        _check_data("fit", datamodule or train_dataloaders)
        ckpt_path = self._resolved(ckpt_path)
        self.stop_signal, user_limit = None, self.limit_val_batches
        # A second `fit` of the same model continues in its own directory.
        if self.is_global_zero and (self.global_step == 0 or model is not self._fitted):
            refuse_overwriting(self.run_dir, ckpt_path)
        self._fitted = model
        # Lock the directory first, because Lightning opens the loggers before any callback.
        alone = locked_run(self.run_dir) if self.is_global_zero else nullcontext(lambda: None)
        # Lightning ignores SIGTERM until the training begins.
        leaving = before_forced_exit(self._report_error)
        with alone as self._check_run_dir, leaving, interrupted_by_signals():
            try:
                with _restoring():
                    super().fit(
                        *(model, train_dataloaders, val_dataloaders, datamodule),
                        *(ckpt_path, weights_only),
                    )
                self._print_closing()
            # An error while the checkpoint is written, or a log: an older checkpoint is complete.
            except WriteError as error:
                raise WriteError(self._resume_hint(error)) from error
            except Exception as error:
                if self.is_global_zero and self.global_step == 0 and _is_refusal(error):
                    remove_refused(self.run_dir)
                raise
            finally:
                # A signal, and a run without an env, turn its evaluations off.
                self.limit_val_batches = user_limit

    def _resolved(self, ckpt_path: str | Path | None) -> str | None:
        # Without a checkpoint Lightning only warns, and continues with the untrained policy.
        if ckpt_path is None:
            return None
        alias = self.run_dir / CHECKPOINTS / f"{ckpt_path}.ckpt"
        if ckpt_path in ALIASES and alias.is_file():
            return str(alias)
        return str(find_checkpoint(str(ckpt_path), self._output_dir))

    def _print_closing(self) -> None:
        """Print the paths of all outputs and the next commands, unless progress is not shown."""
        stopped = self.stop_signal is not None
        if self.is_global_zero and (stopped or self.progress_bar_callback is not None):
            tell("\n".join(closing_lines(self)), sys.stderr if stopped else None)

    def check(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
        seconds: float = 5.0,
        json_file: str | None = None,
    ) -> list[Any]:
        """Check a run without starting it: the env, the collector, and the settings of the update.

        The check builds everything as `fit` does, and plays the env with random actions and with
        the current policy. It trains nothing and leaves no run directory.

        Args:
            model: the algorithm.
            datamodule: an `RLDataModule`.
            ckpt_path: checkpoint from which training would resume.
            seconds: approximate seconds of play, without the creation of the envs.
            json_file: file for the findings as JSON: a list of `topic`, `level`, `text` and `cure`.
        """
        check = function_at(HOOKS["check"])
        # The check is an extension: the core does not import it.
        try:
            path = self._resolved(ckpt_path)
            return cast(list[Any], check(self, model, datamodule, path, seconds, json_file))
        finally:
            remove_refused(self.run_dir)

    def _resume_hint(self, error: WriteError) -> str:
        if not self.run_dir.is_dir():
            return f"{gone(self.run_dir)} There is nothing to resume from."
        folder = self.run_dir / CHECKPOINTS
        for path in (folder / "last.ckpt", folder / "best.ckpt"):
            if path.is_file():
                resume = f"rl-cli fit --ckpt_path {shown(path)}"
                return f"{error} {path.name} is complete. Resume: {resume}"
        return f"{error} No checkpoint has been written."

    def _report_error(self, error: Exception) -> None:
        # The process ends without raising: tell callbacks and loggers here.
        for callback in cast(list[Callback], cast(Any, self).callbacks):
            with suppress(Exception):
                callback.on_exception(self, self.lightning_module, error)
        for logger in self.loggers:
            logger.finalize("failed")

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = False,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Evaluate on the validation seeds; return the report's numbers, equal on all ranks."""
        check_not_on_meta(self, model)
        _check_data("validate", datamodule or dataloaders)
        ckpt_path = self._resolved(ckpt_path)
        with self._evaluating("limit_val_batches"):
            logged = super().validate(
                model, dataloaders, ckpt_path, verbose, datamodule, weights_only
            )
        return self._with_evaluation(logged)

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = False,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Evaluate on seeds that no validation uses, and report; see `validate`."""
        check_not_on_meta(self, model)
        _check_data("test", datamodule or dataloaders)
        ckpt_path = self._resolved(ckpt_path)
        with self._evaluating("limit_test_batches"):
            logged = super().test(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)
        return self._with_evaluation(logged)

    def play(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | Path | None = None,
    ) -> list[Mapping[str, float]]:
        """Play the evaluation's episodes in a window, one by one; with `video`, record them.

        Prints the outcome of each episode, and writes no `evaluation.json`; returns like
        `validate`.

        Args:
            model: the algorithm.
            datamodule: an `RLDataModule`; its `num_eval_episodes` are played.
            ckpt_path: checkpoint whose policy plays.

        Raises:
            ConfigurationError: if the env has no window, or if a rendering package is missing.
        """
        callbacks = cast(list[Callback], cast(Any, self).callbacks)
        # An evaluation with a window is no result to report.
        callbacks[:] = [c for c in callbacks if not isinstance(c, EvaluationReport)]
        if self._recorder is not None:
            self._recorder.stage = "play"
        callbacks.append(Window() if self._recorder is None else EpisodeLines())
        return self.validate(model, datamodule=datamodule, ckpt_path=ckpt_path)

    def _with_evaluation(self, logged: Any) -> list[Mapping[str, float]]:
        evaluation = algorithm_of(self.lightning_module).evaluation
        return [{**values, **logged_values(evaluation)} for values in logged]

    @contextmanager
    def _evaluating(self, limit: str) -> Iterator[None]:
        user_limit = getattr(self, limit)
        if user_limit == 0:
            rank_zero_info(
                f"trainer.{limit} is 0, which disables evaluations during training; this requested "
                "evaluation still runs."
            )
            # Lightning skips the evaluation at a limit of 0, also when it was requested.
            setattr(self, limit, 1.0)
        try:
            with _restoring():
                yield
        finally:
            setattr(self, limit, user_limit)


def _check_data(function: str, data: Any) -> None:
    require(
        isinstance(data, RLDataModule),
        f"trainer.{function} needs an RLDataModule, which makes the envs and collects the batches, "
        f"but got {'none' if data is None else f'a {type(data).__name__}'}: "
        f"trainer.{function}(model, data).",
    )


@contextmanager
def _restoring() -> Iterator[None]:
    """Turn an error of Lightning while it restores a checkpoint into one message."""
    try:
        yield
    except Exception as error:
        with restoring("content") if was_restoring(error) else nullcontext():
            raise


def _chosen_dir(run_dir: str | None, output_dir: str, exp_name: str) -> Path:
    """Return the run directory as an absolute path: an env may change the working directory."""
    directory = expanded(run_dir) if run_dir else new_run_dir(output_dir, exp_name)
    return directory.absolute()


def _refuse(settings: dict[str, Any]) -> None:
    for name, (allowed, reason) in REFUSED.items():
        value = settings.get(name, allowed)
        require(
            value == allowed,
            f"trainer.{name} must be {_as_yaml(allowed)}, got {_as_yaml(value)}: {reason}.",
        )
    _check_devices(settings.get("accelerator", "auto"), settings.get("devices", "auto"))
    strategy = settings.get("strategy")
    require(
        not (isinstance(strategy, str) and strategy.startswith(SPLITTING)),
        f"trainer.strategy {strategy} is not supported: every process needs the whole policy to "
        "act. Use --trainer.strategy ddp or fsdp, or one device.",
    )
    # FSDP2 instead of Lightning's strategy: it shards the policy alone.
    if strategy == "fsdp":
        settings["strategy"] = function_at(HOOKS["fsdp"])()


def _usable_callbacks(callbacks: Any) -> list[Callback]:
    listed: list[Callback] = _as_list(callbacks)
    for callback in listed:
        require(
            not isinstance(callback, LearningRateFinder | BatchSizeFinder),
            f"trainer.callbacks has {type(callback).__name__}, which tries settings on batches of "
            "a fixed dataset, but each batch here is a new rollout. Remove it, and compare "
            "settings by rl-cli sweep.",
        )
        require(
            not isinstance(callback, BaseFinetuning),
            f"trainer.callbacks has {type(callback).__name__}, which unfreezes parameters within a "
            "run, but a run trains the same parameters from its beginning to its end. Remove it, "
            "freeze parameters before the run, and train all of them in another one that begins "
            "with its weights (trainer.init_from).",
        )
        require(
            not isinstance(callback, OnExceptionCheckpoint),
            "trainer.callbacks has OnExceptionCheckpoint: with it Lightning begins a new run with "
            "the weights of an earlier one. Remove it: last.ckpt is written after each epoch; "
            "resume with ckpt_path.",
        )
        require(
            not getattr(callback, "save_on_exception", False),
            f"trainer.callbacks has {type(callback).__name__} with save_on_exception, which saves "
            "in the middle of an update, from where no run can resume exactly. Set it to false: "
            "last.ckpt is written after each epoch, and iteration_*.ckpt at "
            "trainer.checkpoint_every_n_iterations.",
        )
        require(
            not saves_by_time(callback),
            f"trainer.callbacks has {type(callback).__name__} with train_time_interval, at which "
            "Lightning saves nothing here. Set trainer.checkpoint_every_n_iterations.",
        )
        if isinstance(callback, StochasticWeightAveraging):
            rank_zero_warn(
                "swa_lrs of StochasticWeightAveraging has no effect: it averages weights that are "
                "trained at the rate of model.learning_rate and model.lr_schedule."
            )
    return listed


def _check_devices(accelerator: Any, devices: Any) -> None:
    cuda, mps = torch.cuda.device_count() > 0, torch.backends.mps.is_available()
    kinds = {"auto": True, "cpu": True, "gpu": cuda or mps, "cuda": cuda, "mps": mps}
    usable = [name for name, is_here in kinds.items() if is_here]
    if isinstance(accelerator, str):
        require(
            accelerator.lower() in usable,
            f"trainer.accelerator must be one of {', '.join(usable)} on this machine, got "
            f"'{accelerator}'{': torch finds no such device' if accelerator in kinds else ''}. By "
            "default a GPU is used if there is one.",
        )
    on_cpu = accelerator == "cpu" or not kinds["gpu"]
    # Other values, such as "auto", start one process on a CPU.
    processes = int(devices) if str(devices).isdecimal() else 1
    limit = max(8, os.cpu_count() or 1)
    require(
        not on_cpu or processes <= limit,
        f"trainer.devices must be at most {limit} on this machine without GPU, got {devices}: on a "
        "CPU each device is a process.",
    )


def _as_yaml(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except ConfigurationError:
        raise
    except (MisconfigurationException, TypeError, ValueError, ImportError, RuntimeError) as error:
        cores = " For CPU cores for the envs, set --cpus-per-task and one task."
        raise ConfigurationError(
            f"Lightning's trainer cannot be made with these settings of trainer: {error}"
            f"{cores if '--ntasks' in str(error) else ''}"
        ) from error


def _is_refusal(error: BaseException) -> bool:
    refusals = (ConfigurationError, MisconfigurationException)
    return isinstance(error, refusals) or isinstance(error.__cause__, refusals)


def _as_list(setting: Any) -> list[Any]:
    return setting if isinstance(setting, list) else [setting] if setting else []


def _loggers(directory: Path, setting: Logger | list[Logger] | bool | None) -> list[Logger]:
    if setting is False:
        return []
    if setting is None or setting is True:
        setting = EnvStepTensorBoard(directory, name="", version="", default_hp_metric=False)
    loggers = setting if isinstance(setting, list) else [setting]
    for logger in loggers:
        omit_anonymous(logger)
    return [*loggers, EnvStepCSV(directory / "metrics.csv")]


def quieten_framework() -> None:
    """Silence Lightning's device lines, tips and advertisements, for the whole process."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            # Once per process: every trainer calls this function.
            if _is_news not in handler.filters:
                handler.addFilter(_is_news)
    for message in (
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*your dataloader is not resumable.*",
        ".*Your `IterableDataset` has `__len__` defined.*",
        ".*The dirpath has changed from.*",
        ".*logging on epoch level in distributed setting.*",  # logged values are already equal
        ".*isinstance.treespec, LeafSpec.*",
        ".*in eval mode at the start of training.*",  # a policy always is
        "Using ModelCheckpoint with manual optimization",  # the weights after the update are meant
    ):
        warnings.filterwarnings("ignore", message)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(noise in message for noise in NOISE)
