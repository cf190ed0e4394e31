"""Record demonstrations, read and write datasets, and train on them."""

from lightning_rl.extensions.datasets.demonstrations import DatasetCollector as DatasetCollector
from lightning_rl.extensions.datasets.episode import Episode as Episode
from lightning_rl.extensions.datasets.episode import Episodes as Episodes
from lightning_rl.extensions.datasets.frames import ReturnFramesEnv as ReturnFramesEnv
from lightning_rl.extensions.datasets.frames import SuccessFramesEnv as SuccessFramesEnv
from lightning_rl.extensions.datasets.label import LabelSettings as LabelSettings
from lightning_rl.extensions.datasets.label import label_dataset as label_dataset
from lightning_rl.extensions.datasets.minari import write_minari as write_minari
from lightning_rl.extensions.datasets.mixed_replay import MixedReplay as MixedReplay
from lightning_rl.extensions.datasets.reader import read_episodes as read_episodes
from lightning_rl.extensions.datasets.record import RecordedEpisode as RecordedEpisode
from lightning_rl.extensions.datasets.record import Recorder as Recorder
from lightning_rl.extensions.datasets.replays import read_replay as read_replay
from lightning_rl.extensions.datasets.replays import write_replay as write_replay
from lightning_rl.extensions.datasets.writer import EpisodeWriter as EpisodeWriter
