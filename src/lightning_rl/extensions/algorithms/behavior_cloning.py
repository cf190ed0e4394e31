"""Behavior cloning of demonstrations, and DAgger with a teacher policy."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Algorithm, ConfigurationError, Policy, RolloutAlgorithm
from lightning_rl.extend import ranks
from lightning_rl.extend.algorithms import weigh_parts
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.rollout import (
    add_transition_field,
    flat_transitions,
    map_tree,
)
from lightning_rl.extensions.algorithms.teacher import Teacher
from lightning_rl.extensions.datasets.demonstrations import DatasetCollector
from lightning_rl.extensions.datasets.episode import CODES, CONDITION
from lightning_rl.functional import advantage_weight
from lightning_rl.kwargs import BehaviorCloningKwargs, Unpack

MOST_WEIGHT = 20.0
"""Largest weight of a step, before scaling to mean 1."""

DROPOUT = 0.2
"""Default share of steps whose condition is dropped."""


class BehaviorCloning(RolloutAlgorithm):
    """Maximize the log-prob of demonstrated actions, or minimize the loss of a flow.

    It needs `data.collector: DatasetCollector`. An iteration is `n_epochs` passes over all
    demonstrations; each of their steps counts as an env step of the budget. PPO or GRPO can start
    from the checkpoint (`trainer.init_from`).

    With a `teacher`, the policy (the student) acts, and the teacher labels each step with its own
    action: the student learns to recover from its mistakes. The teacher may read observation keys
    that the student does not. With `data.replay: ReplayBuffer`, minibatches come from the last
    `capacity` labelled steps instead of the newest rollout.

    Source: Pomerleau 1991, "Efficient Training of Artificial Neural Networks for Autonomous
    Navigation"; Ross, Gordon and Bagnell 2011, "A Reduction of Imitation Learning and Structured
    Prediction to No-Regret Online Learning" (DAgger). Differs from DAgger: training continues from
    the last weights, on the newest rollout or on the replay, not on all steps so far.

    Args:
        policy: the policy to train; a critic is not trained.
        ent_coef: weight of the entropy bonus.
        advantage_temperature: T of advantage-weighted regression: each step has the weight
            exp(advantage / T), at most 20, scaled to mean 1. The dataset needs the labels of
            `rl-cli label`, whose returns lie in [-1, 0]; 0.05 is usual. Default: equal weights.
        condition_dropout: share of the steps of a pass that train without their condition, for a
            `ConditionedPolicy`. Default: 0.2.
        prefix_steps: for a policy with `real_time.method: conditioned`: the most actions of a chunk
            that the policy is given; each sample draws a number from 0 to this one.
        teacher: checkpoint (a file, or a run directory) of a trained policy, of any algorithm, or a
            list of checkpoints; null for training on demonstrations.
        teacher_key: with several teachers, the observation key with one number per teacher; the
            teacher with the largest number labels the step.
        teacher_env_steps: env steps, over all processes, in which the share of the teacher's
            actions falls from 1 to 0; with 0 only the student acts.
        trust_code: import any class that the teacher's checkpoint names.
        kwargs: see `RolloutAlgorithm`.

    Raises:
        ConfigurationError: for a number out of range.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        ent_coef: float = 0.0,
        advantage_temperature: float | None = None,
        condition_dropout: float | None = None,
        prefix_steps: int = 0,
        teacher: str | list[str] | None = None,
        teacher_key: str | None = None,
        teacher_env_steps: int = 0,
        trust_code: bool = False,
        **kwargs: Unpack[BehaviorCloningKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("ent_coef", ent_coef, minimum=0)
        require(
            policy.has_entropy or ent_coef == 0,
            f"ent_coef={ent_coef:g} needs an entropy, but the entropy of {type(policy).__name__} "
            "is unknown: set ent_coef: 0, or give the flow noise: learnt.",
        )
        check_range("advantage_temperature", advantage_temperature, above=0)
        check_range("condition_dropout", condition_dropout, minimum=0, maximum=1)
        check_range("teacher_env_steps", teacher_env_steps, minimum=0)
        conditioned = CONDITION in policy.extra_fields
        require(
            conditioned or condition_dropout is None,
            f"condition_dropout={condition_dropout} is for a ConditionedPolicy, and the policy is "
            f"a {type(policy).__name__}: remove it, or wrap the policy.",
        )
        default = DROPOUT if conditioned else 0.0
        self.condition_dropout = default if condition_dropout is None else condition_dropout
        self.advantage_temperature = advantage_temperature
        real_time = getattr(policy, "real_time", None)
        require(
            (prefix_steps > 0) == (real_time is not None and real_time.method == "conditioned"),
            f"prefix_steps={prefix_steps} trains the input of real_time.method: conditioned, but "
            f"the policy's real_time is {real_time}: set both or neither.",
        )
        if prefix_steps:
            most = policy.action_space.shape[0] - 1  # type: ignore[index]  # of chunks
            check_range("prefix_steps", prefix_steps, minimum=1, maximum=most)
        self.prefix_steps = prefix_steps
        require(
            teacher is not None or (teacher_env_steps == 0 and teacher_key is None),
            f"teacher_env_steps is {teacher_env_steps} and teacher_key is {teacher_key}, but there "
            "is no teacher. Set teacher: PATH, or remove these settings.",
        )
        self.ent_coef = ent_coef
        self.teacher = teacher
        self.teacher_key = teacher_key
        self.teacher_env_steps = teacher_env_steps
        # Demonstrations come from their dataset in each pass; only labelled steps fill a replay.
        self.uses_replay = teacher is not None
        self.trust_code = trust_code
        self._teacher: Teacher | None = None  # while it trains

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return  # evaluation needs no teacher
        if self.teacher is not None:
            paths = [self.teacher] if isinstance(self.teacher, str) else self.teacher
            policies = [
                Algorithm.load_from_checkpoint(path, trust_code=self.trust_code).policy
                for path in paths
            ]
            self._teacher = Teacher(policies, self.policy, self.teacher_env_steps, self.teacher_key)
            # While collecting, the mixer lets the teacher act in a share of the steps.
            self.episode_settings = replace(self.episode_settings, mixer=self._teacher.mixed)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self._teacher is not None:
            # The teacher is no submodule: checkpoints do not hold it, and Lightning does not move
            # it.
            for policy in self._teacher.policies:
                policy.to(self.device)

    def on_train_start(self) -> None:
        super().on_train_start()
        data, collector = self.data, getattr(self.data, "collector", None)
        if self.teacher is not None:
            require(
                self.data.acted_by_policy,
                "A teacher labels the states that the student visits, but "
                f"{type(collector).__name__} does not run the policy. Set data.collector: "
                "SyncCollector, or remove the teacher.",
            )
            # With chunks an iteration has more env steps than actions.
            single_steps = data.num_envs * data.buffer_size == data.env_steps_per_iteration
            require(
                self.data.replay is None
                or (single_steps and self.policy.replay_action_space == self.policy.action_space),
                "The replay of BehaviorCloning stores labels of single actions, but "
                f"{type(self.policy).__name__} has chunks or replaces actions. Remove data.replay.",
            )
        elif collector is not None and not isinstance(collector, DatasetCollector):
            raise ConfigurationError(
                f"BehaviorCloning needs demonstrations, but {type(collector).__name__} collects "
                "the policy's own actions. Set data.collector: {class_path: DatasetCollector}, or "
                "set model.teacher."
            )

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        teacher = self._teacher
        if teacher is not None:
            rollout = self.labelled(rollout, teacher)
        if len(rollout.batch_size) != 2 or rollout.batch_size[1] < 2:
            raise ValueError(
                "BehaviorCloning needs a rollout of batch shape [num_envs, steps + 1], got "
                f"{list(rollout.batch_size)}: pass the rollout of the buffer."
            )
        padding = rollout.get("padding", torch.zeros_like(rollout["done"]))
        mask = ~padding[:, :-1]
        add_transition_field(rollout, "weight", self._weight(rollout, mask))
        if self.policy.evaluates_sequences:  # demonstrations contain no states
            self.recompute_states(rollout)
        if self.data.replay is None:
            if teacher is None and "executed" in rollout.keys():
                rollout = rollout.copy().set("executed", _demonstrated(rollout["executed"]))
            fields = self._fields(rollout, mask)
            passes = self.passes(rollout, fields, mask)
            minibatches: Iterator[TensorDict] = chain.from_iterable(passes)
        else:
            minibatches = self._replayed(rollout)
        for minibatch in minibatches:
            self._drop_condition(minibatch)
            if self.prefix_steps:
                size = minibatch.batch_size
                steps = torch.empty(size, device=self.device).uniform_(generator=self.generator)
                minibatch["prefix_steps"] = (steps * (self.prefix_steps + 1)).long()
            noise = self.policy.draw_clone_noise(minibatch.batch_size, self.generator)
            # Draw here, not in the loss: a compiled loss cannot use a generator.
            self.update(minibatch.set("clone_noise", noise) if noise.numel() else minibatch)
        self.finish_iteration(rollout)

    def _replayed(self, rollout: TensorDict) -> Iterator[TensorDict]:
        """Store a labelled rollout [N, T+1], and yield minibatches [B] of the replay."""
        count = self.minibatches_per_iteration()
        # Remove the executed actions: the replay would store them instead of the labels.
        unlearnt = ["executed_action"] + ([] if self.policy.evaluates_sequences else ["state"])
        self.replay.extend(rollout.exclude(*unlearnt))
        if self.policy.evaluates_sequences:
            length = self.sequence_steps
            sequences = max(1, self.batch_size // length)
            batches = self.replay.sequences(count, sequences, length, burn_in=self.burn_in)
        else:
            batches = self.replay.batches(count, self.batch_size)
        for batch in batches:
            minibatch = batch.select("observation", "action", "sequences", strict=False)
            fields = self.policy.fields_of(minibatch["action"]) | {
                "weight": torch.ones(len(batch), device=self.device)
            }
            yield minibatch.update(fields)

    def _weight(self, rollout: TensorDict, mask: Tensor) -> Tensor:
        """Return the weight [N, T] of each step: 0 for padding, mean 1 over the others."""
        counted = mask.float()
        if self.advantage_temperature is None:
            return counted
        advantage = rollout.get("advantage", None)
        require(
            advantage is not None and bool(advantage[:, :-1][mask].isfinite().all()),
            f"advantage_temperature={self.advantage_temperature} needs an advantage for each "
            "step, but the demonstrations have none. Label the dataset with rl-cli label PATH, "
            "or remove advantage_temperature.",
        )
        scale = 1.0 / self.advantage_temperature
        weight = advantage_weight(advantage[:, :-1], scale, MOST_WEIGHT) * counted
        # The mean is over all ranks, because the gradients of the ranks are averaged.
        total, count = ranks.sum_over_ranks(torch.stack((weight.sum(), counted.sum())))
        scaled: Tensor = weight * (count / total)
        return scaled

    def _drop_condition(self, minibatch: TensorDict) -> None:
        if self.condition_dropout > 0:
            condition = minibatch[CONDITION]
            # Training without the condition, too, is what guidance needs in acting.
            uniform = torch.rand(condition.shape, generator=self.generator, device=condition.device)
            dropped = uniform < self.condition_dropout
            minibatch[CONDITION] = condition.masked_fill(dropped, CODES["absent"])

    def labelled(self, rollout: TensorDict, teacher: Teacher) -> TensorDict:
        """Return a rollout [N, T+1] with the teacher's actions instead of the executed actions."""
        share = torch.tensor(teacher.share(self.env_steps), device=rollout.device)
        self.statistics.set("teacher_share", share)
        envs, slots = rollout.batch_size
        if teacher.has_memory:
            actions = list(teacher.actions_along(rollout))
        else:
            # The bootstrap slot gets a label, too: the labels then have the shape of the rollout.
            observations = flat_transitions(rollout, ["observation"], bootstrap=True)
            batches = observations.split(teacher.micro_batch_size or len(observations))
            actions = [teacher.actions(batch.get("observation")) for batch in batches]
        action = map_tree(lambda *parts: torch.cat(parts), *actions)
        labels = TensorDict({"action": action, **self.policy.fields_of(action)}, [slots * envs])
        # A shallow copy: the collector's rollout keeps its executed actions.
        relabelled: TensorDict = rollout.copy()
        return relabelled.update(labels.unflatten(0, (slots, envs)).transpose(0, 1))

    def rank_state(self) -> dict[str, Tensor | None]:
        teacher = self._teacher
        return super().rank_state() | ({} if teacher is None else teacher.memory)

    def load_rank_state(self, state: dict[str, Tensor | None] | None) -> None:
        super().load_rank_state(state)
        if state is not None and self._teacher is not None:
            saved = ((name, value) for name, value in state.items() if name.startswith("teacher"))
            self._teacher.memory = {n: v for n, v in saved if v is not None}

    FIELDS = ("observation", "action", "sample_log_prob", "weight")
    """The fields of a rollout that the loss reads, besides the policy's extra fields."""

    def _fields(self, rollout: TensorDict, mask: Tensor) -> tuple[str, ...]:
        if "executed" not in rollout.keys():
            return self.FIELDS
        in_parts = rollout["sample_log_prob"].dim() > mask.dim()
        require(
            in_parts
            or self.policy.counts_executed
            or bool(rollout["executed"][:, :-1][mask].all()),
            f"{type(self.policy).__name__} has one log-prob for a whole chunk, but the last "
            "actions of some chunks were not executed: an episode ended before, or execute is "
            "less than chunk_size. Cloning would include the actions that were not executed. "
            "Return log-probs per action (extra_fields), or mask actions by executed [B, K] in "
            "evaluate_actions, and set counts_executed.",
        )
        return (*self.FIELDS, "executed")

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of samples [B], and scalars to log."""
        outputs = self.policy.clone_loss(minibatch)
        weight = weigh_parts(minibatch["weight"], outputs["clone_loss"], minibatch)
        clone_loss = (weight * outputs["clone_loss"]).mean()
        scalars = {
            "flow_loss" if "clone_noise" in minibatch.keys() else "negative_log_prob": clone_loss
        }
        if not self.policy.has_entropy:
            return clone_loss, scalars
        entropy = (weight * outputs["entropy"]).mean()
        return clone_loss - self.ent_coef * entropy, scalars | {"entropy": entropy}


def _demonstrated(executed: Tensor) -> Tensor:
    """Return which actions of each chunk [N, T+1, K] lie within its episode, one per row.

    The demonstrator did them all. In real time a policy executes also actions of a chunk after its
    first `execute`, while it computes the next chunk.
    """
    remaining = executed.sum(-1).flip(1).cumsum(1).flip(1)
    return torch.arange(executed.shape[-1], device=executed.device) < remaining[..., None]
