"""The interface of the networks of LeRobot's directories."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import gymnasium
from torch import Tensor, nn

from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.extensions.vla.heads import ActionHead, Level, Statistics


@dataclass(frozen=True)
class Exploration:
    """How a policy draws actions in training; None for the default of its kind.

    Args:
        log_prob_level: granularity of the log-prob, see `VLAPolicy`.
        log_std_init: ACT: initial log standard deviation around the chunk, in normalised units.
            Default: -2.
        noise: SmolVLA: `sde` or `learnt`, see `FlowSettings`. Default: `sde`.
        noise_level: SmolVLA: see `FlowSettings`. Default: 0.5.
    """

    log_prob_level: Level = "token"
    log_std_init: float | None = None
    noise: Literal["sde", "learnt"] | None = None
    noise_level: float | None = None


class Network(nn.Module, ABC):
    """The network of a LeRobot policy.

    Attributes:
        summary_size: E.
        obs_steps: consecutive observations that it reads.
        max_actions: largest number of actions of a chunk.
        action_steps: number of actions that LeRobot executes of a chunk.
        any_size: whether pictures may have any size.
        vocabulary: upper bound (exclusive) of instruction tokens; None without instructions.
    """

    summary_size: int
    obs_steps: int = 1
    max_actions: int
    action_steps: int
    any_size: bool = False
    vocabulary: int | None = None

    @abstractmethod
    def parts(self) -> dict[str, nn.Module]:
        """Return the modules with weights of the directory, by the prefix of LeRobot's names."""

    @abstractmethod
    def forward(self, inputs: Mapping[str, Tensor]) -> Features: ...

    @abstractmethod
    def head(
        self, space: gymnasium.spaces.Box, exploration: Exploration, statistics: Statistics
    ) -> ActionHead:
        """Return the head for chunks of `space`, [K, A]; `statistics`: see `action_bounds`."""
