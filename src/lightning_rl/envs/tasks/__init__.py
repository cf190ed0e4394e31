"""Tasks in torch, batched, on any device."""

from lightning_rl.envs.tasks.base import Pictures
from lightning_rl.envs.tasks.cart_pole import CartPole
from lightning_rl.envs.tasks.gymnasium_tasks import GymnasiumTask, GymnasiumVectorTask
from lightning_rl.envs.tasks.point_mass import PointMass
from lightning_rl.envs.tasks.push_blocks import PushBlocks
from lightning_rl.envs.tasks.push_cube import PushCube
from lightning_rl.envs.tasks.terms import (
    ActionTerm,
    DeltaPosition,
    Force,
    Position,
    Velocity,
)

__all__ = [
    "ActionTerm",
    "CartPole",
    "DeltaPosition",
    "Force",
    "GymnasiumTask",
    "GymnasiumVectorTask",
    "Pictures",
    "PointMass",
    "Position",
    "PushBlocks",
    "PushCube",
    "Velocity",
]
