"""Read a MuJoCo model, and describe what a backend computes with it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

STATE = ("time", "qpos", "qvel", "act")
"""Tensors of a state that a simulation step reads and writes, each [N, size]."""

RECOMPUTED = ("body_mass", "body_inertia", "body_ipos", "body_pos", "qpos0", "dof_armature")
"""Fields of a model from which MuJoCo computes others (`mj_setConst`)."""


class Physics(ABC):
    """N worlds of one model."""

    @abstractmethod
    def step(self, state: Mapping[str, Tensor], ctrl: Tensor) -> dict[str, Tensor]:
        """Return state."""

    @abstractmethod
    def sense(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return sensordata."""
