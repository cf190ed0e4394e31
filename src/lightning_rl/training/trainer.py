"""Lightning's trainer, configured for reinforcement learning."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
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
from lightning_rl.system.lightning_private import omit_anonymous, was_restoring
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
from lightning_rl.training.quiet import quieten_framework
from lightning_rl.training.unfit import as_list, readable_errors, refuse_unfit, usable_callbacks


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
        log_every_n_steps: iterations between two logged rows of metrics; 0 logs evaluations alone.
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
        refuse_unfit(kwargs)
        self._set_process_up(num_threads, flush_denormal, machine or MachineSettings())
        self.run_dir, self._output_dir = _chosen_dir(run_dir, output_dir, exp_name), output_dir
        self.save_replay, self.restore_replay = save_replay, restore_replay
        self._replay_folders: dict[Path, ReplayFolder] = {}
        with removed_if_refused(self.run_dir):
            user_callbacks = usable_callbacks(callbacks)
            metrics = MetricsWriter(best_metric, best_mode)
            package = self._callbacks(user_callbacks, metrics, video, enable_progress_bar)
            if enable_checkpointing:
                interval, weights_only = checkpoint_every_n_iterations, checkpoint_weights_only
                package.append(BestCheckpoint(self.run_dir, best_metric, best_mode, weights_only))
                if not kwargs.get("fast_dev_run"):  # a smoke test leaves none for `last`
                    package += self._later_checkpoints(interval, keep_checkpoints, weights_only)
            if init_from is not None:
                package.append(WarmStart(lambda: find_checkpoint(init_from, output_dir)))
            with readable_errors():
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
                    plugins=[*as_list(kwargs.pop("plugins", None)), AtomicCheckpointIO()],
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
        # The first process chose the run directory; the files of all replays belong there.
        filepath = self.strategy.broadcast(str(filepath))
        is_training = self.state.fn == "fit" and self.state.status == "running"  # so it is locked
        if is_training and self.run_dir in Path(filepath).parents:
            self._check_run_dir()
        data = getattr(self, "datamodule", None)
        has_closed = isinstance(data, RLDataModule) and data.collector is None
        if has_closed and self.state.fn == "fit" and not weights_only:
            rank_zero_warn(
                f"{filepath} lacks the states of envs and replay, which `fit` has closed: a run "
                "that resumes from it differs from an uninterrupted one. checkpoints/last.ckpt of "
                f"{shown(self.run_dir)} has them; with weights_only=True the file is smaller."
            )
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

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            "trainer.predict has no dataset to predict on: evaluate by trainer.validate(model, "
            "data), or act by lightning_rl.load_policy(checkpoint)."
        )

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


def _is_refusal(error: BaseException) -> bool:
    refusals = (ConfigurationError, MisconfigurationException)
    return isinstance(error, refusals) or isinstance(error.__cause__, refusals)


def _loggers(directory: Path, setting: Logger | list[Logger] | bool | None) -> list[Logger]:
    if setting is False:
        return []
    if setting is None or setting is True:
        setting = EnvStepTensorBoard(directory, name="", version="", default_hp_metric=False)
    loggers = setting if isinstance(setting, list) else [setting]
    for logger in loggers:
        omit_anonymous(logger)
    return [*loggers, EnvStepCSV(directory / "metrics.csv")]
