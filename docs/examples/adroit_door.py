"""A distance that gymnasium-robotics 1.2.1 to 1.4.2 rewards with a wrong sign."""

from torch import Tensor

from lightning_rl.extensions.managers import EnvView


def palm_to_handle(env: EnvView) -> Tensor:
    """Return the distance between the palm and the handle in m, [M]."""
    offset: Tensor = env.state["observation"][:, 35:38]
    return offset.square().sum(1).sqrt()
