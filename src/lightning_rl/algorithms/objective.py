"""Say what a loss has to offer to be differentiated."""

from typing import Protocol

from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.phases import PhaseTimer
from lightning_rl.policies import Policy


class Objective(Protocol):
    """What is minimised."""

    phase: PhaseTimer

    @property
    def policy(self) -> Policy:
        """Whose parameters are trained."""

    def prepare(self, minibatch: TensorDict) -> TensorDict:
        """Do what needs the whole minibatch at once, such as normalising."""

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and scalars to report, all averages over the samples given."""


def piece_size(objective: Objective) -> int | None:
    """Return `Policy.micro_batch_size` of what is trained."""
    return getattr(objective.policy, "micro_batch_size", None)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
