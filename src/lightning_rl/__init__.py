"""Reinforcement learning for embodied agents, structured by PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_rl import registration  # noqa: F401  # Gymnasium shall know the tasks

if TYPE_CHECKING:
    from lightning_rl.algorithms import (
        GRPO,
        PPO,
        SAC,
        TD3,
        Algorithm,
        BehaviorCloning,
        GripperSAC,
        OffPolicyAlgorithm,
        OnPolicyAlgorithm,
    )
    from lightning_rl.buffers import Replay, ReplayBuffer
    from lightning_rl.collectors import AsyncCollector, Collector, SyncCollector
    from lightning_rl.data import RLDataModule
    from lightning_rl.envs import (
        ActionChunk,
        CartPole,
        EnvPoolEnv,
        GymnasiumEnv,
        PointMass,
        PushBlocks,
        PushCube,
        TorchEnv,
        VectorEnv,
        check_env,
    )
    from lightning_rl.errors import ConfigurationError
    from lightning_rl.offline import Demonstrations, MixedReplay
    from lightning_rl.policies import (
        ActorCritic,
        ActorOnly,
        Backbone,
        CustomVLA,
        DeterministicActorCritic,
        GripperActorCritic,
        Policy,
        PolicyWrapper,
        QActorCritic,
        SlowPolicy,
        SquashedActorCritic,
        TinyVLA,
        TransformersBackbone,
        VLAPolicy,
        load_vla_model,
    )
    from lightning_rl.trainer import RLTrainer

_HOMES = {
    "GRPO": "algorithms",
    "PPO": "algorithms",
    "SAC": "algorithms",
    "TD3": "algorithms",
    "OffPolicyAlgorithm": "algorithms",
    "QActorCritic": "policies",
    "SquashedActorCritic": "policies",
    "DeterministicActorCritic": "policies",
    "GripperActorCritic": "policies",
    "GripperSAC": "algorithms",
    "MixedReplay": "offline",
    "ActionChunk": "envs",
    "ActorCritic": "policies",
    "ActorOnly": "policies",
    "Algorithm": "algorithms",
    "Backbone": "policies",
    "BehaviorCloning": "algorithms",
    "CartPole": "envs",
    "Demonstrations": "offline",
    "PushBlocks": "envs",
    "TinyVLA": "policies",
    "TransformersBackbone": "policies",
    "load_vla_model": "policies",
    "VLAPolicy": "policies",
    "AsyncCollector": "collectors",
    "Collector": "collectors",
    "ConfigurationError": "errors",
    "CustomVLA": "policies",
    "EnvPoolEnv": "envs",
    "GymnasiumEnv": "envs",
    "OnPolicyAlgorithm": "algorithms",
    "PointMass": "envs",
    "Policy": "policies",
    "PolicyWrapper": "policies",
    "PushCube": "envs",
    "RLDataModule": "data",
    "Replay": "buffers",
    "ReplayBuffer": "buffers",
    "RLTrainer": "trainer",
    "SlowPolicy": "policies",
    "SyncCollector": "collectors",
    "TorchEnv": "envs",
    "VLAObservation": "envs",
    "VectorEnv": "envs",
    "check_env": "envs",
}

__all__ = [
    "GRPO",
    "PPO",
    "SAC",
    "TD3",
    "ActionChunk",
    "ActorCritic",
    "ActorOnly",
    "Algorithm",
    "AsyncCollector",
    "Backbone",
    "BehaviorCloning",
    "CartPole",
    "Collector",
    "ConfigurationError",
    "CustomVLA",
    "Demonstrations",
    "DeterministicActorCritic",
    "EnvPoolEnv",
    "GripperActorCritic",
    "GripperSAC",
    "GymnasiumEnv",
    "MixedReplay",
    "OffPolicyAlgorithm",
    "OnPolicyAlgorithm",
    "PointMass",
    "Policy",
    "PolicyWrapper",
    "PushBlocks",
    "PushCube",
    "QActorCritic",
    "RLDataModule",
    "RLTrainer",
    "Replay",
    "ReplayBuffer",
    "SlowPolicy",
    "SquashedActorCritic",
    "SyncCollector",
    "TinyVLA",
    "TorchEnv",
    "TransformersBackbone",
    "VLAObservation",
    "VLAPolicy",
    "VectorEnv",
    "check_env",
    "load_vla_model",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `rl-cli --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_rl' has no attribute '{name}'")
    return getattr(import_module(f"lightning_rl.{_HOMES[name]}"), name)
