"""Record demonstrations, read and write datasets, and train on them."""

from lightning_rl.datasets.demonstrations import DatasetCollector as DatasetCollector
from lightning_rl.datasets.episode import Episode as Episode
from lightning_rl.datasets.episode import Episodes as Episodes
from lightning_rl.datasets.frames import ReturnFramesEnv as ReturnFramesEnv
from lightning_rl.datasets.frames import SuccessFramesEnv as SuccessFramesEnv
from lightning_rl.datasets.label import LabelSettings as LabelSettings
from lightning_rl.datasets.label import label_dataset as label_dataset
from lightning_rl.datasets.minari import write_minari as write_minari
from lightning_rl.datasets.mixed_replay import MixedReplay as MixedReplay
from lightning_rl.datasets.reader import read_episodes as read_episodes
from lightning_rl.datasets.record import Recorded as Recorded
from lightning_rl.datasets.record import Recorder as Recorder
from lightning_rl.datasets.replays import read_replay as read_replay
from lightning_rl.datasets.replays import write_replay as write_replay
from lightning_rl.datasets.writer import EpisodeWriter as EpisodeWriter
