"""Film the episodes of evaluations."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rl import Algorithm, ConfigurationError, RLDataModule, VectorEnv
from lightning_rl.extend.collectors import VideoSettings
from lightning_rl.extend.envs import EnvTimeoutError, one_picture
from lightning_rl.extend.errors import reason_of
from lightning_rl.extend.files import write_atomically
from lightning_rl.extensions.videos.film import Film, require_video_packages

SLOWEST = 4.0
"""Minimum frames per second; slower films play faster than real time."""

FIRST_GUESS = 0.02
"""Estimated seconds per frame before the first film."""


class VideoRecorder(Callback):
    """Write `videos/eval_<env steps>.mp4` and `best_...`, and films of `validate` and `test`.

    The film shows the episodes of the evaluation itself; results do not change. A thread encodes it
    during training. TensorBoard, and each logger with a `log_video` method, such as `WandbLogger`,
    receive the film.

    If the env cannot be rendered or the disk cannot be written, a training run continues without
    films, with one warning; `validate`, `test` and `play` raise a `ConfigurationError`.

    Args:
        directory: the run directory.
        settings: which evaluations are filmed, and how.

    Attributes:
        stage: prefix of the film's name for `RLTrainer.play`.

    Raises:
        ConfigurationError: if a package of the extra `video` is missing.
    """

    stage: str | None = None

    def __init__(self, directory: Path, settings: VideoSettings) -> None:
        require_video_packages()
        self.directory = directory / "videos"
        self.settings = settings
        self._clock = _TimeShare(settings.max_share)
        self._film: Film | None = None
        self._seeds: list[int] = []
        self._broken = False
        self._training = True
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[float] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Render once, to report problems early and to load the renderer before timing."""
        if trainer.is_global_zero:
            self._attempt(lambda: self.draw_once(_data_of(trainer)))
        self._clock = _TimeShare(self.settings.max_share)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: list[int],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx > 0 or trainer.sanity_checking or not trainer.is_global_zero:
            return
        self._seeds, self._film = list(batch), None
        training = self._training = trainer.state.fn == "fit"
        # Count by epochs, which continue in a resumed run.
        evaluations = trainer.current_epoch // (trainer.check_val_every_n_epoch or 1)
        is_due = not training or evaluations % self.settings.every_n_evaluations == 0
        if is_due and (not training or self._clock.allows()):
            watch_next = cast(Algorithm, pl_module).watch_next  # films only the first batch
            self._attempt(lambda: watch_next(self._begin(trainer, pl_module)))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        # On all ranks: Lightning's comparison is a collective.
        best = self.settings.at_best and trainer.state.fn == "fit" and _is_best(trainer)
        if not trainer.is_global_zero:
            return
        command = self.stage or str(getattr(trainer.state.fn, "value", ""))
        stage = "eval" if trainer.state.fn == "fit" else command
        if self._film is not None:
            self._attempt(lambda: self._finish(trainer, pl_module, stage, best))
        elif best and self._clock.allows():
            self._attempt(lambda: self._play_again(trainer, pl_module))
        if trainer.state.fn != "fit":
            self._close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._film = None
        self._close()

    def _close(self) -> None:
        self._attempt(self._wait)
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    on_test_batch_start = on_validation_batch_start
    on_test_end = on_validation_end

    def _attempt(self, action: Callable[[], object]) -> None:
        """Run an action and count its time; after an error, continue training without films."""
        if self._broken:
            return
        began, spent = time.perf_counter(), self._clock.spent
        try:
            action()
        except EnvTimeoutError:
            raise  # the env is lost for the evaluation too
        except Exception as error:  # renderers fail in many ways, none of which may end training
            self._broken, self._film = True, None
            reason = reason_of(error)
            if not self._training:
                raise ConfigurationError(
                    f"The requested film cannot be made: {reason} (Without a film: --video false.)"
                ) from error
            rank_zero_warn(f"No more videos: {reason}")
        self._clock.spent = spent + time.perf_counter() - began  # includes nested attempts

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> Callable[..., None]:
        algorithm, env = cast(Algorithm, pl_module), _data_of(trainer).eval_env
        calls = _data_of(trainer).eval_calls
        with calls("make_renderable"):
            env.make_renderable()
        settings = self.settings
        count = min(settings.num_envs, len(self._seeds))
        capacity = settings.max_frames
        if trainer.state.fn == "fit":
            capacity = self._clock.frames(capacity)
        # Expect episodes as long as in the last evaluation, to render fewer frames.
        expected = max(algorithm.evaluation.get("lengths", [0])[:count])
        stride = max(round(env.render_fps / settings.fps), -(-expected // capacity), 1)
        film = self._film = Film(count, stride, capacity)
        visible, ends = set(range(count)), dict[int, int]()

        def watch(lengths: Tensor, returns: Tensor, running: Tensor) -> None:
            rows = [i for i, runs in enumerate(running[:count].tolist()) if runs]
            for i in set(range(count)) - ends.keys() - set(rows):
                ends[i] = int(lengths[i])
            if visible:
                step = int(lengths[rows].max()) if rows else max(ends.values())
                self._attempt(lambda: look(step, returns, rows))

        def look(step: int, returns: Tensor, rows: list[int]) -> None:
            with calls("render"):
                pictures = env.film(rows, film.stride)  # within a chunk of actions
                if not pictures and rows and film.wants(step):
                    pictures[step] = dict(zip(rows, _pictures(env, rows), strict=True))
            for moment in sorted(pictures):
                if film.wants(moment):
                    show(moment, pictures[moment], returns)
                    film.take()
            if visible and not rows:
                show(step, {}, returns)
                # The last frame shows the ends of all episodes.
                film.take(last=True)

        def show(step: int, pictures: dict[int, np.ndarray], returns: Tensor) -> None:
            for i in sorted(visible):
                status = f"step {step}" if i in pictures else f"ended at step {ends[i]}"
                film.show(i, pictures.get(i), f"return {returns[i]:.1f}   {status}")
            visible.intersection_update(pictures)

        return watch

    def _finish(self, trainer: Trainer, pl_module: LightningModule, stage: str, best: bool) -> None:
        assert self._film is not None
        film, self._film = self._film, None
        self._clock.frames_made += len(film.frames)
        # One film at a time: the thread reads the frames of the former film.
        self._wait()
        steps = cast(Algorithm, pl_module).env_steps
        fps, real = self.settings.fps, _data_of(trainer).eval_env.render_fps / film.stride
        rate = min(fps, max(real, min(SLOWEST, fps)))
        names = [f"{stage}_{steps}.mp4", *([f"best_{steps}.mp4"] if best else [])]
        # Loggers get films of training only.
        loggers = trainer.loggers if trainer.state.fn == "fit" else []
        boards = [x for x in loggers if hasattr(x, "log_animation") or hasattr(x, "log_video")]
        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="video")
        self._writing = self._writer.submit(
            _write, film, rate, [self.directory / name for name in names], boards, steps
        )

    def _play_again(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cast(Algorithm, pl_module).play(self._seeds, [self._begin(trainer, pl_module)])
        if self._film is not None:
            self._finish(trainer, pl_module, "best", False)

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            # Encoding takes CPU time from the training, too.
            self._clock.spent_behind += writing.result()

    @staticmethod
    def draw_once(data: RLDataModule) -> np.ndarray:
        """Return a picture of the evaluation's first env after a reset: uint8 [H, W, 3]."""
        env, calls = data.eval_env, data.eval_calls
        with calls("make_renderable"):
            env.make_renderable()
        with calls("reset"):
            env.reset(seed=data.eval_seed)
        with calls("render"):
            return _pictures(env, [0])[0]


def _data_of(trainer: Trainer) -> RLDataModule:
    return cast(Any, trainer).datamodule  # type: ignore[no-any-return]  # set by `fit`


def _write(
    film: Film, fps: float, paths: list[Path], boards: list[Logger], env_steps: int
) -> float:
    # CPU time of this thread: a wait for the disk costs the training nothing.
    began = time.thread_time()
    for path in paths:
        write_atomically(path, lambda file: film.write(file, fps))
        if path.name.startswith("best_"):
            # After the new film is complete: a kill leaves one at least.
            for older in set(path.parent.glob("best_*.mp4")) - {path}:
                older.unlink()
    height, width, _ = film.frames[0].shape
    board: Any  # `EnvStepTensorBoard`, or a logger with `log_video(key, videos, step)` as of wandb
    for board in boards:
        if hasattr(board, "log_animation"):
            board.log_animation("eval/video", film.gif(fps), height, width, env_steps)
        else:
            board.log_video("eval/video", [str(paths[0])], step=env_steps)
    return time.thread_time() - began


def _pictures(env: VectorEnv, rows: list[int]) -> list[np.ndarray]:
    return [one_picture(type(env).__name__, picture) for picture in env.render(rows)]


class _TimeShare:
    """Compute how many frames a share of the time allows; None for no limit."""

    def __init__(self, share: float | None) -> None:
        self.share = share
        self.spent = self.spent_behind = 0.0
        self.frames_made = 0
        self._began = time.perf_counter()

    def total(self) -> float:
        return self.spent + self.spent_behind

    def left(self) -> float:
        assert self.share is not None
        return self.share * (time.perf_counter() - self._began) - self.total()

    def allows(self) -> bool:
        return self.share is None or self.spent == 0.0 or self.left() > 0.0

    def frames(self, limit: int) -> int:
        if self.share is None:
            return limit
        cost = self.total() / self.frames_made if self.frames_made else FIRST_GUESS
        return int(min(limit, max(VideoSettings.fewest_frames, self.left() / cost)))


def _is_best(trainer: Trainer) -> bool:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            current = trainer.callback_metrics.get(callback.monitor)
            return current is not None and callback.check_monitor_top_k(trainer, current)
    return False
