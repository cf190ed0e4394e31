"""Turn values of discrete actions into probabilities that explore."""

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_rl.policies.distributions.base import NEVER, Categorical, Fields

Exploration = Literal["epsilon", "boltzmann"]
"""How a policy with action values explores, see `ExploringCategorical`."""


class ExploringCategorical(Categorical):
    """Probabilities of n actions, from their values.

    `epsilon`: epsilon / n for each allowed action, and 1 - epsilon more for the best one.
    `boltzmann`: softmax(Q / temperature).

    Args:
        num_actions: n.
        rule: `epsilon` or `boltzmann`.

    Attributes:
        amount: [], epsilon or the temperature, a buffer that collectors and checkpoints get.
    """

    amount: Tensor

    def __init__(self, num_actions: int, rule: Exploration) -> None:
        super().__init__([num_actions], ())
        self.rule = rule
        self.register_buffer("amount", torch.tensor(0.05))

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        fields = super().sample(output, noise, state)
        if noise is None:  # with epsilon = 1 all actions have the same probability
            fields["action"] = output.argmax(-1)
        return fields

    def _log_probs(self, output: Tensor) -> Tensor:
        if self.rule == "boltzmann":
            return super()._log_probs(output / self.amount)
        # A mask gives forbidden actions the value NEVER.
        allowed = output > NEVER / 2
        share = self.amount / allowed.sum(-1, keepdim=True).clamp(min=1)
        best = nn.functional.one_hot(output.argmax(-1), self.num_choices)
        probs = share * allowed + (1 - self.amount) * best
        return torch.where(probs > 0, probs.log(), NEVER).unsqueeze(-2)
