"""Say what is minimised: a loss, the parameters that it moves, and what moves them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl.optim.learning_rate import LearningRateSchedule
from lightning_rl.optim.statistics import NonFiniteGuard, UpdateStatistics

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters.

In YAML `{class_path: torch.optim.AdamW, init_args: {weight_decay: 0.01}}`.
"""

Loss = Callable[[TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""Returns the loss of samples [B] and scalars to report, all of them averages over the samples."""


@dataclass
class Objective:
    """One of the losses of an algorithm, with all that its optimizer steps need.

    An algorithm makes its objectives in `configure_objectives`, by `Algorithm.objective`, which
    knows the settings that most have in common.

    Attributes:
        name: of the optimizer, and before `loss`, `grad_norm` and `learning_rate` in the charts
            (`critic_loss`); empty for the only one, or the main one.
        owner: the module whose method the loss is, and which holds the parameters. A parameter of
            it that is not among `parameters` is left alone, whatever of it the loss reads.
        loss: is minimised.
        prepare: does what needs a whole minibatch [B] at once, such as normalising; without
            gradients.
        groups: the parameters, in groups as an optimizer takes them; a group may have `lr_scale`.
        max_grad_norm: bound on the norm of the gradient of all of them; infinity for none.
        schedule: sets the learning rate.
        make_optimizer: makes the optimizer.
        guard: tells which steps to skip.
        micro_batch_size: samples that go through the network at once; None for as many as are fast.
    """

    name: str
    owner: nn.Module
    loss: Loss
    prepare: Callable[[TensorDict], TensorDict]
    groups: list[dict[str, Any]]
    max_grad_norm: float
    schedule: LearningRateSchedule
    make_optimizer: OptimizerFactory
    guard: NonFiniteGuard
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        self.statistics = UpdateStatistics()
        wanted = {id(parameter) for group in self.groups for parameter in group["params"]}
        # In the owner's order, which is the same on all ranks, however the groups are made.
        self.parameters = [
            parameter
            for parameter in self.owner.parameters()
            if id(parameter) in wanted and parameter.requires_grad
        ]

    def label(self, scalar: str) -> str:
        """Return the name under which a scalar that each objective has is reported."""
        return f"{self.name}_{scalar}" if self.name else scalar
