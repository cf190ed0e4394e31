"""Settings of the films of evaluations, which the extension `videos` makes."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_rl.system.errors import check_range


@dataclass
class VideoSettings:
    """Which evaluations are filmed, and how.

    Args:
        every_n_evaluations: film every n-th evaluation of a training run, and always `validate` and
            `test`.
        at_best: keep a film of the evaluation of `best.ckpt` as `best_<env steps>.mp4`. If this
            evaluation was not filmed, its episodes are played again.
        num_envs: number of episodes shown side by side, from the first seed on.
        fps: maximum frames per second; fewer if the env is slower.
        max_frames: maximum frames of a film; longer episodes show every second, fourth, ... step.
        max_share: maximum fraction of the training time for films, which then have fewer, evenly
            spaced frames; null for no limit. Does not apply to `validate` and `test`.
    """

    fewest_frames: ClassVar[int] = 8
    """Minimum frames of a film, even if `max_share` allows fewer; later films are then delayed."""

    every_n_evaluations: int = 1
    at_best: bool = True
    num_envs: int = 2
    fps: float = 30.0
    max_frames: int = 200
    max_share: float | None = 0.05

    def __post_init__(self) -> None:
        check_range("trainer.video.every_n_evaluations", self.every_n_evaluations, minimum=1)
        check_range("trainer.video.num_envs", self.num_envs, minimum=1)
        check_range("trainer.video.fps", self.fps, above=0)
        check_range("trainer.video.max_frames", self.max_frames, minimum=self.fewest_frames)
        check_range("trainer.video.max_share", self.max_share, above=0, maximum=1)
