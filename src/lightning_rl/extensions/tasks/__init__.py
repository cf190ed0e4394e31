"""Batched torch tasks, on any device."""

from lightning_rl.extensions.tasks.base import Pictures as Pictures
from lightning_rl.extensions.tasks.cart_pole import CartPole as CartPole
from lightning_rl.extensions.tasks.gymnasium_tasks import GymnasiumTask as GymnasiumTask
from lightning_rl.extensions.tasks.gymnasium_tasks import GymnasiumVectorTask as GymnasiumVectorTask
from lightning_rl.extensions.tasks.point_mass import PointMass as PointMass
from lightning_rl.extensions.tasks.push_blocks import PushBlocks as PushBlocks
from lightning_rl.extensions.tasks.push_cube import PushCube as PushCube
from lightning_rl.extensions.tasks.swing_up import CartPoleSwingUp as CartPoleSwingUp
