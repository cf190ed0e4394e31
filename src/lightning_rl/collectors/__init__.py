"""Collectors: step the envs with the policy."""

from lightning_rl.collectors.asynchronous import AsyncCollector as AsyncCollector
from lightning_rl.collectors.base import Collector as Collector
from lightning_rl.collectors.base import SyncCollector as SyncCollector
from lightning_rl.collectors.context import CollectorContext as CollectorContext
from lightning_rl.collectors.context import EpisodeSettings as EpisodeSettings
from lightning_rl.system.lazy import names_of

__getattr__ = names_of("lightning_rl")  # classes of extensions lay here in earlier versions
