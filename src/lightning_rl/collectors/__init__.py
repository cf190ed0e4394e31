"""Collectors: who steps the env with the policy."""

from lightning_rl.collectors.asynchronous import AsyncCollector
from lightning_rl.collectors.base import Collector, EpisodePlan
from lightning_rl.collectors.demonstrations import Demonstrations
from lightning_rl.collectors.sync import SyncCollector

__all__ = ["AsyncCollector", "Collector", "Demonstrations", "EpisodePlan", "SyncCollector"]
