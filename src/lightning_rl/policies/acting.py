"""Act through a rollout: one action per env step, the rest of the rollout's fields in one pass."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from lightning_rl.policies.precision import autocast
from lightning_rl.rollout import step_views

if TYPE_CHECKING:
    from lightning_rl.policies.base import Policy


class RolloutActor(ABC):
    """Acts on the storage of a rollout, slot by slot.

    A policy chooses the kind (`Policy.rollout_actor`), by what is fastest for it.
    """

    @abstractmethod
    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        """Take up the policy's weights as they are now, for slot `start` and those that follow.

        Their noise is drawn from `generator`, here or as they come.
        """

    @abstractmethod
    def act(self, t: int) -> None:
        """Write the action of slot `t`, from its observation."""

    @abstractmethod
    def finish(self, start: int, stop: int) -> None:
        """Write what the policy stores beside the actions, where `act` has not.

        For slots `start` to `stop` - 1, which were acted on with the present weights.
        """


class StepwiseActor(RolloutActor):
    """Calls the policy at each step: works for every policy, on every device.

    Args:
        policy: acts.
        rollout: batch shape [N, T+1], written in place.
    """

    def __init__(self, policy: "Policy", rollout: TensorDict) -> None:
        self._policy = policy
        self._steps = step_views(rollout)
        self._generator: torch.Generator | None = None
        self._precision = autocast(policy.version.device, policy.autocast_dtype)

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        """See `RolloutActor.begin`."""
        self._policy.eval()
        self._generator = generator

    def act(self, t: int) -> None:
        """See `RolloutActor.act`."""
        with self._precision:
            self._policy(self._steps[t], generator=self._generator)

    def finish(self, start: int, stop: int) -> None:
        """See `RolloutActor.finish`: nothing is left to write."""
