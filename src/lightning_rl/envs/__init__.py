"""Envs: the contract, action chunks, adapters of others, batched torch envs, tasks, probes."""

from lightning_rl.envs.chunks import ActionChunk, HoldsRows
from lightning_rl.envs.gymnasium.adapter import GymnasiumEnv
from lightning_rl.envs.gymnasium.envpool_env import EnvPoolEnv
from lightning_rl.envs.people.devices import Gamepad, Keyboard, SpaceMouse
from lightning_rl.envs.people.intervention import Intervention, InterventionSource, Said, Script
from lightning_rl.envs.probes import (
    ActionProbe,
    TimeLimitProbe,
    ValueProbe,
)
from lightning_rl.envs.tasks import CartPole, PointMass, PushBlocks, PushCube
from lightning_rl.envs.torch.rsl_rl_env import RslRlVecEnv
from lightning_rl.envs.torch.tensor_simulator import TensorSimulator
from lightning_rl.envs.torch.torch_env import TorchEnv
from lightning_rl.envs.vector_env import RestoreError, VectorEnv, VectorEnvWrapper
from lightning_rl.envs.wrappers.action_mask import ActionMask
from lightning_rl.envs.wrappers.condition import Conditioned
from lightning_rl.envs.wrappers.encoded import EncodedObservations
from lightning_rl.envs.wrappers.hide import HideEntries
from lightning_rl.envs.wrappers.penalty import PenaltyTerms
from lightning_rl.envs.wrappers.vla_observation import VLAObservation
from lightning_rl.rollout.structured_actions import FlatAction

__all__ = [
    "ActionChunk",
    "ActionMask",
    "ActionProbe",
    "CartPole",
    "Conditioned",
    "EncodedObservations",
    "EnvPoolEnv",
    "FlatAction",
    "Gamepad",
    "GymnasiumEnv",
    "HideEntries",
    "HoldsRows",
    "Intervention",
    "InterventionSource",
    "Keyboard",
    "PenaltyTerms",
    "PointMass",
    "PushBlocks",
    "PushCube",
    "RestoreError",
    "RslRlVecEnv",
    "Said",
    "Script",
    "SpaceMouse",
    "TensorSimulator",
    "TimeLimitProbe",
    "TorchEnv",
    "VLAObservation",
    "ValueProbe",
    "VectorEnv",
    "VectorEnvWrapper",
]
