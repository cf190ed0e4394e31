"""Envs: the contract, the Gymnasium and EnvPool adapters, batched torch envs, tasks, probes."""

from lightning_rl.envs.envpool_env import EnvPoolEnv
from lightning_rl.envs.gymnasium_env import GymnasiumEnv
from lightning_rl.envs.probes import ActionProbe, TimeLimitProbe, ValueProbe
from lightning_rl.envs.tasks import CartPole, PointMass, PushCube
from lightning_rl.envs.torch_env import TorchEnv
from lightning_rl.envs.vector_env import RestoreError, VectorEnv

__all__ = [
    "ActionProbe",
    "CartPole",
    "EnvPoolEnv",
    "GymnasiumEnv",
    "PointMass",
    "PushCube",
    "RestoreError",
    "TimeLimitProbe",
    "TorchEnv",
    "ValueProbe",
    "VectorEnv",
]
