"""Reinforcement learning for embodied agents, structured by PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_rl import registration  # noqa: F401  # Gymnasium shall know the tasks

if TYPE_CHECKING:
    from lightning_rl.algorithms import GRPO, PPO, Algorithm
    from lightning_rl.collectors import AsyncCollector, Collector, SyncCollector
    from lightning_rl.data import RLDataModule
    from lightning_rl.envs import (
        CartPole,
        EnvPoolEnv,
        GymnasiumEnv,
        PointMass,
        PushCube,
        TorchEnv,
        VectorEnv,
    )
    from lightning_rl.errors import ConfigurationError
    from lightning_rl.policies import ActorCritic, ActorOnly, Policy, SlowPolicy
    from lightning_rl.trainer import RLTrainer

_HOMES = {
    "GRPO": "algorithms",
    "PPO": "algorithms",
    "ActorCritic": "policies",
    "ActorOnly": "policies",
    "Algorithm": "algorithms",
    "CartPole": "envs",
    "AsyncCollector": "collectors",
    "Collector": "collectors",
    "ConfigurationError": "errors",
    "EnvPoolEnv": "envs",
    "GymnasiumEnv": "envs",
    "PointMass": "envs",
    "Policy": "policies",
    "PushCube": "envs",
    "RLDataModule": "data",
    "RLTrainer": "trainer",
    "SlowPolicy": "policies",
    "SyncCollector": "collectors",
    "TorchEnv": "envs",
    "VectorEnv": "envs",
}

__all__ = [
    "GRPO",
    "PPO",
    "ActorCritic",
    "ActorOnly",
    "Algorithm",
    "AsyncCollector",
    "CartPole",
    "Collector",
    "ConfigurationError",
    "EnvPoolEnv",
    "GymnasiumEnv",
    "PointMass",
    "Policy",
    "PushCube",
    "RLDataModule",
    "RLTrainer",
    "SlowPolicy",
    "SyncCollector",
    "TorchEnv",
    "VectorEnv",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `rl-cli --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_rl' has no attribute '{name}'")
    return getattr(import_module(f"lightning_rl.{_HOMES[name]}"), name)
