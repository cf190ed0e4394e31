"""Collectors: who steps the env with the policy."""

from lightning_rl.collectors.asynchronous import AsyncCollector
from lightning_rl.collectors.base import Collector, SyncCollector
from lightning_rl.collectors.loop import CollectorContext, EpisodePlan
from lightning_rl.collectors.ray import RayCollector

__all__ = [
    "AsyncCollector",
    "Collector",
    "CollectorContext",
    "EpisodePlan",
    "RayCollector",
    "SyncCollector",
]
