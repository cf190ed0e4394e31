"""Teach a policy to do what was demonstrated."""

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.action_parts import (
    add_part_weights,
    part_weights_over_ranks,
    weigh_parts,
)
from lightning_rl.algorithms.base import Algorithm
from lightning_rl.algorithms.checks import check_batch_size, check_sequences
from lightning_rl.algorithms.minibatches import epochs
from lightning_rl.algorithms.rollout_evaluation import states_of
from lightning_rl.algorithms.sequence_cut import SequenceLength, drawing_of, most_minibatches
from lightning_rl.errors import ConfigurationError, check_range
from lightning_rl.offline import Demonstrations
from lightning_rl.optim.update import Objective
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
        n_epochs: passes over the demonstrations in an iteration.
        ent_coef: weight of the entropy bonus.
        sequence_length: steps in a row that the gradients of a policy with a memory go through,
            `rollout` for all of a demonstration; 32 where not given. See `OnPolicyAlgorithm`.
        burn_in: steps before each sequence, likewise.
        kwargs: see `Algorithm`.

    Raises:
        ConfigurationError: for a number out of range.
    """

    uses_replay = False

    def __init__(
        self,
        policy: Policy,
        n_epochs: int = 10,
        ent_coef: float = 0.0,
        sequence_length: SequenceLength = None,
        burn_in: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        check_sequences(policy, sequence_length, burn_in)
        check_range("n_epochs", n_epochs, least=1)
        check_range("ent_coef", ent_coef, least=0)
        self.n_epochs = n_epochs
        self.ent_coef = ent_coef
        self.sequence_length: SequenceLength = sequence_length
        self.burn_in = burn_in

    def configure_objectives(self) -> list[Objective]:
        """Return the one loss, of the whole policy."""
        return [self.objective(self.loss, prepare=add_part_weights)]

    def minibatches_per_iteration(self) -> int:
        """Return how many `n_epochs` passes have; fewer where episodes end early."""
        size = (self.data.num_envs, self.data.buffer_size, self.batch_size)
        return self.n_epochs * most_minibatches(self.policy, *size, self.sequence_length)

    def setup(self, stage: str) -> None:
        """Check the settings against the data, as soon as both are known."""
        super().setup(stage)
        if stage == "fit":
            check_batch_size(self.batch_size, self.data.num_envs * self.data.buffer_size)

    def on_train_start(self) -> None:
        """Refuse what the policy itself has done.

        Raises:
            ConfigurationError: where `data.collector` is another than `Demonstrations`.
        """
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
        if self.policy.evaluates_sequences:  # of what was demonstrated nobody has stored any
            rollout["state"] = states_of(self.policy, rollout)
        what = (self.FIELDS, mask, self.sequence_length, self.burn_in)
        drawing = drawing_of(self.policy, rollout, *what)
        how = (self.n_epochs, self.batch_size, self.generator, part_weights_over_ranks)
        for epoch in epochs(drawing, *how):
            for minibatch in epoch:
                self.update(minibatch)
        self.finish_iteration(rollout)

    FIELDS = ("observation", "action", "sample_log_prob", "weight")
    """What the loss reads of a rollout, beside the policy's own fields."""

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of samples [B], and scalars to report."""
        new = self.policy.evaluate_actions(minibatch)
        weight = weigh_parts(minibatch["weight"], new["sample_log_prob"], minibatch)
        negative_log_prob = -(weight * new["sample_log_prob"]).mean()
        entropy = (weight * new["entropy"]).mean()
        loss = negative_log_prob - self.ent_coef * entropy
        return loss, {"negative_log_prob": negative_log_prob, "entropy": entropy}
