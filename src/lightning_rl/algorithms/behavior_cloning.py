"""Behavior cloning of demonstrations, and DAgger with a teacher policy."""

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.action_parts import (
    add_part_weights,
    part_weights_over_ranks,
    weigh_parts,
)
from lightning_rl.algorithms.base import Algorithm
from lightning_rl.algorithms.checks import check_batch_size, check_entropy, check_sequences
from lightning_rl.algorithms.on_policy import epochs, make_sampler
from lightning_rl.algorithms.rollout_evaluation import states_of
from lightning_rl.algorithms.sequence_sampler import SequenceLength, most_minibatches
from lightning_rl.datasets import Demonstrations
from lightning_rl.functional import advantage_weight
from lightning_rl.optim.update import Objective, micro_batches
from lightning_rl.policies import Policy
from lightning_rl.policies.conditioned import CODES, CONDITION
from lightning_rl.policies.teacher import Teacher
from lightning_rl.rollout.contract import (
    add_transition_field,
    check_time,
    flat_transitions,
    map_tree,
    time_major,
)
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, check_range, require

DROPOUT = 0.2
"""Default share of steps whose condition is dropped."""


class BehaviorCloning(Algorithm):
    """Maximize the log-prob of demonstrated actions, or minimize the loss of a flow.

    It needs `data.collector: Demonstrations`. An iteration is `n_epochs` passes over all
    demonstrations; each of their steps counts as an env step of the budget. PPO or GRPO can
    continue from the checkpoint (`trainer.init_from`).

    With a `teacher`, the policy (the student) acts, and the teacher labels each step with its own
    action, so that the student learns to recover from its own mistakes. The teacher may read
    observation keys that the student's `actor_keys` leave out.

    Source: Pomerleau 1991, "Efficient Training of Artificial Neural Networks for Autonomous
    Navigation"; Ross, Gordon and Bagnell 2011, "A Reduction of Imitation Learning and Structured
    Prediction to No-Regret Online Learning" (DAgger). Differs from DAgger: an iteration trains
    on the newest rollout alone, not on all rollouts so far.

    Args:
        policy: the policy to train; a critic is not trained.
        n_epochs: passes over the demonstrations, or over a rollout, per iteration.
        ent_coef: weight of the entropy bonus.
        advantage_temperature: T of advantage-weighted regression: each step has the weight
            exp(advantage / T), at most 20, scaled to mean 1. The dataset needs the labels of
            `rl-cli label`, whose returns lie in [-1, 0]; 0.05 is usual. Default: equal weights.
        condition_dropout: share of the steps whose condition is replaced by absent, in each pass,
            for a `ConditionedPolicy`. Default: 0.2.
        sequence_length: steps of truncated backpropagation through time, for a policy with a
            memory; `rollout` for whole demonstrations. Default: 32. See `OnPolicyAlgorithm`.
        burn_in: steps before each sequence, see `OnPolicyAlgorithm`.
        teacher: checkpoint (a file, or a run directory) of a trained policy, of any algorithm; null
            for training on demonstrations.
        teacher_env_steps: env steps, over all processes, in which the share of the teacher's
            actions falls from 1 to 0; with 0 only the student acts.
        trust_code: import any class that the teacher's checkpoint names.
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
        advantage_temperature: float | None = None,
        condition_dropout: float | None = None,
        sequence_length: SequenceLength = None,
        burn_in: int = 0,
        teacher: str | None = None,
        teacher_env_steps: int = 0,
        trust_code: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        check_sequences(policy, sequence_length, burn_in)
        check_range("n_epochs", n_epochs, least=1)
        check_entropy(policy, ent_coef)
        check_range("advantage_temperature", advantage_temperature, above=0)
        check_range("condition_dropout", condition_dropout, least=0, most=1)
        check_range("teacher_env_steps", teacher_env_steps, least=0)
        conditioned = CONDITION in policy.extra_fields
        require(
            conditioned or condition_dropout is None,
            f"condition_dropout={condition_dropout} is for a ConditionedPolicy, and the policy is "
            f"a {type(policy).__name__}: remove it, or wrap the policy.",
        )
        default = DROPOUT if conditioned else 0.0
        self.condition_dropout = default if condition_dropout is None else condition_dropout
        self.advantage_temperature = advantage_temperature
        require(
            teacher is not None or teacher_env_steps == 0,
            f"teacher_env_steps is {teacher_env_steps}, but there is no teacher. Set teacher: "
            "PATH, or remove teacher_env_steps.",
        )
        self.n_epochs = n_epochs
        self.ent_coef = ent_coef
        self.sequence_length: SequenceLength = sequence_length
        self.burn_in = burn_in
        self.teacher = teacher
        self.teacher_env_steps = teacher_env_steps
        self.trust_code = trust_code

    def configure_objectives(self) -> list[Objective]:
        return [self.objective(self.loss, prepare=add_part_weights)]

    def minibatches_per_iteration(self) -> int:
        size = (self.data.num_envs, self.data.buffer_size, self.batch_size)
        return self.n_epochs * most_minibatches(self.policy, *size, self.sequence_length)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return  # evaluation needs no teacher
        check_batch_size(self.batch_size, self.data.num_envs * self.data.buffer_size)
        if self.teacher is not None:
            taught_by = Algorithm.load_from_checkpoint(self.teacher, trust_code=self.trust_code)
            teacher = Teacher(taught_by.policy, self.policy, self.teacher_env_steps)
            self.episode_settings = replace(self.episode_settings, teacher=teacher)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.episode_settings.teacher is not None:
            self.episode_settings.teacher.policy.to(self.device)

    def on_train_start(self) -> None:
        super().on_train_start()
        collector = getattr(self.data, "collector", None)
        if self.teacher is not None:
            require(
                self.data.acted_by_policy,
                "A teacher labels the states that the student visits, but "
                f"{type(collector).__name__} does not run the policy. Set data.collector: "
                "SyncCollector, or remove the teacher.",
            )
        elif collector is not None and not isinstance(collector, Demonstrations):
            raise ConfigurationError(
                f"BehaviorCloning needs demonstrations, but {type(collector).__name__} collects "
                "the policy's own actions. Set data.collector: {class_path: Demonstrations}, or "
                "set model.teacher."
            )

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        check_time(rollout)
        teacher = self.episode_settings.teacher
        if teacher is not None:
            rollout = self.labelled(rollout, teacher)
        padding = rollout.get("padding", torch.zeros_like(rollout["done"]))
        mask = ~padding[:, :-1]
        add_transition_field(rollout, "weight", self._weight(rollout, mask))
        if self.policy.evaluates_sequences:  # demonstrations contain no states
            rollout["state"] = states_of(self.policy, rollout)
        what = (self._fields(rollout, mask), mask, self.sequence_length, self.burn_in)
        sampler = make_sampler(self.policy, rollout, *what)
        how = (self.n_epochs, self.batch_size, self.generator, part_weights_over_ranks)
        for epoch in epochs(sampler, *how):
            for minibatch in epoch:
                self._drop_condition(minibatch)
                noise = self.policy.draw_clone_noise(minibatch.batch_size, self.generator)
                # Here and not in the loss: a compiled loss cannot draw from a generator.
                self.update(minibatch.set("clone_noise", noise) if noise.numel() else minibatch)
        self.finish_iteration(rollout)

    def _weight(self, rollout: TensorDict, mask: Tensor) -> Tensor:
        """Return the weight [N, T] of each step: 0 for padding, mean 1 over the others."""
        counted = mask.float()
        if self.advantage_temperature is None:
            return counted
        advantage = rollout.get("advantage", None)
        require(
            advantage is not None and bool(advantage[:, :-1][mask].isfinite().all()),
            f"advantage_temperature={self.advantage_temperature} needs the advantage of each step, "
            "and the demonstrations do not have it: label the dataset, rl-cli label PATH, or "
            "remove advantage_temperature.",
        )
        weight = advantage_weight(advantage[:, :-1], self.advantage_temperature) * counted
        total, count = ranks.sum_over_ranks(torch.stack((weight.sum(), counted.sum())))
        return weight * (count / total)

    def _drop_condition(self, minibatch: TensorDict) -> None:
        if self.condition_dropout > 0:
            condition = minibatch[CONDITION]
            drawn = torch.rand(condition.shape, generator=self.generator, device=condition.device)
            dropped = drawn < self.condition_dropout
            minibatch[CONDITION] = condition.masked_fill(dropped, CODES["absent"])

    def labelled(self, rollout: TensorDict, teacher: Teacher) -> TensorDict:
        """Return a rollout [N, T+1] with the teacher's actions instead of the executed ones."""
        share = torch.tensor(teacher.share(self.env_steps), device=rollout.device)
        self.statistics.set("teacher_share", share)
        seen = flat_transitions(rollout, ["observation"], bootstrap=True)
        batches = micro_batches(seen, teacher.policy.micro_batch_size)
        actions = [teacher.actions(batch.get("observation")) for batch, _ in batches]
        action = map_tree(lambda *parts: torch.cat(parts), *actions)
        labels = TensorDict({"action": action, **self.policy.fields_of(action)}, seen.batch_size)
        envs, slots = rollout.batch_size
        relabelled: TensorDict = rollout.copy()
        return relabelled.update(time_major(labels.unflatten(0, (slots, envs))))

    FIELDS = ("observation", "action", "sample_log_prob", "weight")
    """The fields of a rollout that the loss reads, besides the policy's extra fields."""

    def _fields(self, rollout: TensorDict, mask: Tensor) -> tuple[str, ...]:
        """Return the fields of a rollout [N, T+1] that the loss reads; with chunks also `executed`.

        Raises:
            ConfigurationError: if the loss would clone actions that were not executed.
        """
        if "executed" not in rollout.keys():
            return self.FIELDS
        in_parts = rollout["sample_log_prob"].dim() > mask.dim()
        require(
            in_parts
            or self.policy.counts_executed
            or bool(rollout["executed"][:, :-1][mask].all()),
            f"{type(self.policy).__name__} has one log-prob for a whole chunk, and of some chunks "
            "the last actions were not executed: an episode ended before, or execute is less than "
            "chunk_size. They would be cloned as if demonstrated. Give log-probs per action "
            "(extra_fields), or leave out what executed [B, K] says in evaluate_actions, and set "
            "counts_executed.",
        )
        return (*self.FIELDS, "executed")

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of samples [B], and scalars to log."""
        result = self.policy.clone_loss(minibatch)
        weight = weigh_parts(minibatch["weight"], result["clone_loss"], minibatch)
        clone_loss = (weight * result["clone_loss"]).mean()
        scalars = {
            "flow_loss" if "clone_noise" in minibatch.keys() else "negative_log_prob": clone_loss
        }
        if not self.policy.has_entropy:
            return clone_loss, scalars
        entropy = (weight * result["entropy"]).mean()
        return clone_loss - self.ent_coef * entropy, scalars | {"entropy": entropy}
