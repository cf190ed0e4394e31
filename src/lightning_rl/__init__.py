"""Reinforcement learning for embodied agents, structured by PyTorch Lightning."""

import warnings
from typing import Any

from lightning_rl.system import registration  # noqa: F401  # register the tasks with Gymnasium
from lightning_rl.system.lazy import lazy_names
from lightning_rl.system.moved import add_moved_modules

add_moved_modules()

__all__, _get = lazy_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from lightning_rl.checkpoints.registry import present_path

        if (present := present_path(f"{__name__}.{name}")) != f"{__name__}.{name}":
            warnings.warn(f"{name} is now called {present}.", FutureWarning, stacklevel=2)
            return _get(present.rpartition(".")[2])
    return _get(name)
