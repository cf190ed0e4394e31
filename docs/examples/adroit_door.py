"""The distance that AdroitHandDoor rewards with a wrong sign (gymnasium-robotics 1.2.1 to 1.4.2)."""

from torch import Tensor

from lightning_rl.extensions.managers import EnvView


def palm_to_handle(env: EnvView) -> Tensor:
    """Return the distance between the palm and the handle in m, [M]."""
    offset: Tensor = env.state["observation"][:, 35:38]
    return offset.norm(dim=1)
