"""A distance that gymnasium-robotics 1.2.1 to 1.4.2 rewards with a wrong sign."""

import torch
from torch import Tensor

from lightning_rl.extensions.managers import EnvView


def palm_to_handle(env: EnvView) -> Tensor:
    """Return the distance between the palm and the handle in m, [M]."""
    return torch.linalg.vector_norm(env.state["observation"][:, 35:38], dim=1)
