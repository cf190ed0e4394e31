"""Teach a policy to do what was demonstrated."""

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.base import Algorithm
from lightning_rl.algorithms.parts import spread
from lightning_rl.collectors import Demonstrations
from lightning_rl.errors import ConfigurationError, check_range
from lightning_rl.policies import Policy
from lightning_rl.rollout import add_transition_field


class BehaviorCloning(Algorithm):
    """Maximise the log-prob of demonstrated actions.

    It needs `data.collector: Demonstrations`; an iteration is `n_epochs` passes over all of them,
    and an env step of the budget is one step of a demonstration that was learnt from. Its
    checkpoint is what reinforcement learning begins with: `trainer.init_from` of PPO or GRPO.

    Source: Pomerleau 1991, "Efficient Training of Artificial Neural Networks for Autonomous
    Navigation".

    Args:
        policy: what is taught; a critic is left alone.
        ent_coef: weight of the entropy bonus.
        kwargs: see `Algorithm`.
    """

    def __init__(self, policy: Policy, ent_coef: float = 0.0, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        check_range("ent_coef", ent_coef, least=0)
        self.ent_coef = ent_coef

    def on_train_start(self) -> None:
        """Refuse what the policy itself has done."""
        super().on_train_start()
        collector = getattr(self.data, "collector", None)
        if collector is not None and not isinstance(collector, Demonstrations):
            raise ConfigurationError(
                f"BehaviorCloning learns from demonstrations, and {type(collector).__name__} gives "
                "what the policy does itself: set data.collector: {class_path: Demonstrations}."
            )

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        """Take some passes over the demonstrations, a rollout [N, T+1]."""
        mask = ~rollout["padding"][:, :-1]
        add_transition_field(rollout, "weight", mask.float())
        for minibatch in self.minibatches(rollout, self.fields, mask):
            self.optimizer_update(minibatch)
        self.finish_iteration(rollout)

    @property
    def fields(self) -> tuple[str, ...]:
        """What the loss reads of a rollout, beside the policy's own fields."""
        return ("observation", "action", "sample_log_prob", "weight")

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of samples [B], and scalars to report."""
        new = self.policy.evaluate_actions(minibatch)
        weight = spread(minibatch["weight"], new["sample_log_prob"], minibatch)
        negative_log_prob = -(weight * new["sample_log_prob"]).mean()
        entropy = (weight * new["entropy"]).mean()
        loss = negative_log_prob - self.ent_coef * entropy
        return loss, {"negative_log_prob": negative_log_prob, "entropy": entropy}
