"""Parts of collectors: the stepping loop, evaluation, statistics."""

from lightning_rl.collectors.context import EpisodeSettings as EpisodeSettings
from lightning_rl.collectors.evaluation import action_function as action_function
from lightning_rl.collectors.evaluation import logged_values as logged_values
from lightning_rl.collectors.evaluation import summarize as summarize
from lightning_rl.collectors.evaluation import wilson_interval as wilson_interval
from lightning_rl.collectors.first_episodes import FirstEpisodes as FirstEpisodes
from lightning_rl.collectors.loop import RolloutLoop as RolloutLoop
from lightning_rl.system.process import Computing as Computing
from lightning_rl.training.videos import VideoSettings as VideoSettings

__all__: list[str]
