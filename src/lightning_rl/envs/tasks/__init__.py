"""Batched torch tasks, on any device."""

from lightning_rl.envs.tasks.base import Pictures as Pictures
from lightning_rl.envs.tasks.cart_pole import CartPole as CartPole
from lightning_rl.envs.tasks.gymnasium_tasks import GymnasiumTask as GymnasiumTask
from lightning_rl.envs.tasks.gymnasium_tasks import GymnasiumVectorTask as GymnasiumVectorTask
from lightning_rl.envs.tasks.point_mass import PointMass as PointMass
from lightning_rl.envs.tasks.push_blocks import PushBlocks as PushBlocks
from lightning_rl.envs.tasks.push_cube import PushCube as PushCube
from lightning_rl.envs.tasks.swing_up import CartPoleSwingUp as CartPoleSwingUp
