"""Reinforcement learning for embodied agents, structured by PyTorch Lightning."""

from typing import Any

from lightning_rl.system import registration  # noqa: F401  # register the tasks with Gymnasium
from lightning_rl.system.lazy import lazy_names

__all__, _get = lazy_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except AttributeError as error:
        from lightning_rl.checkpoints.registry import renamed

        raise AttributeError(f"{error}{renamed(name)}") from None
