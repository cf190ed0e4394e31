"""Base class of on-policy algorithms: rewards, values, minibatches, early stop by KL."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.action_parts import add_part_weights, part_weights_over_ranks
from lightning_rl.algorithms.base import Algorithm
from lightning_rl.algorithms.checks import (
    check_batch_size,
    check_first_ratio,
    check_prepared_fields,
    check_sequences,
)
from lightning_rl.algorithms.off_policy_correction import Correction, OffPolicyCorrection
from lightning_rl.algorithms.rollout_evaluation import states_of
from lightning_rl.algorithms.sequence_sampler import (
    Sampler,
    SequenceLength,
    SequenceSampler,
    most_minibatches,
    steps_of,
)
from lightning_rl.kwargs import OnPolicyAlgorithmKwargs, RolloutAlgorithmKwargs, Unpack
from lightning_rl.optim.update import LearningRateSchedule, Objective
from lightning_rl.policies import Policy, RewardNormalizer
from lightning_rl.rollout.contract import discounted_reward, flat_transitions, loss_fields
from lightning_rl.system import ranks
from lightning_rl.system.errors import check_range
from lightning_rl.system.lightning_private import trainer_of

GATHER_BYTES = 2**22
"""Bytes of the samples that one gather copies for several minibatches."""


class RolloutAlgorithm(Algorithm):
    """An algorithm that trains on each rollout once, in several passes; any policy may have acted.

    A subclass writes `training_step` and `loss`.

    Args:
        policy: the policy to train.
        n_epochs: passes over a rollout.
        batch_size: transitions per minibatch and process; the last minibatch of a pass is smaller
            if `batch_size` does not divide N*T.
        sequence_length: steps of truncated backpropagation through time, for a policy with a
            memory; `rollout` for whole rollouts. A minibatch is `batch_size // sequence_length`
            sequences, at least one. Default: 32.
        burn_in: steps before each sequence, without gradients, in which the policy recomputes its
            state from a stored state.
        kwargs: see `Algorithm`.
    """

    uses_replay = False

    def __init__(
        self,
        policy: Policy,
        *,
        n_epochs: int = 10,
        batch_size: int = 64,
        sequence_length: SequenceLength = None,
        burn_in: int = 0,
        **kwargs: Unpack[RolloutAlgorithmKwargs],
    ) -> None:
        super().__init__(policy, batch_size=batch_size, **kwargs)
        check_sequences(policy, sequence_length, burn_in)
        check_range("n_epochs", n_epochs, minimum=1)
        self.n_epochs = n_epochs
        self.sequence_length: SequenceLength = sequence_length
        self.burn_in = burn_in

    @abstractmethod
    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch [B], and scalars to log; see `Algorithm.objective`."""

    def prepare(self, minibatch: TensorDict) -> TensorDict:
        """Prepare a whole minibatch [B], without gradients; several ranks: `prepared_fields`."""
        return add_part_weights(minibatch)

    def prepared_fields(
        self, flat: TensorDict, order: Tensor, sizes: Sequence[int]
    ) -> dict[str, Tensor]:
        """Return fields [S] of all minibatches of an update: `prepare` for several processes.

        Args:
            flat: [M], the transitions of this rank.
            order: [S], indices of the drawn samples of all passes.
            sizes: number of samples of this rank in each minibatch.
        """
        return part_weights_over_ranks(flat, order, sizes)

    def passes(
        self, rollout: TensorDict, keys: Sequence[str], mask: Tensor | None
    ) -> Iterator[Iterator[TensorDict]]:
        """Yield minibatches [B] of each pass over a rollout [N, T+1], of steps in a mask [N, T]."""
        sampler = make_sampler(self.policy, rollout, keys, mask, self.sequence_length, self.burn_in)
        return epochs(sampler, self.n_epochs, self.batch_size, self.generator, self.prepared_fields)

    def configure_objectives(self) -> list[Objective]:
        return [self.objective(self.loss, prepare=self.prepare)]

    def minibatches_per_iteration(self) -> int:
        size = (self.data.num_envs, self.data.buffer_size, self.batch_size)
        return self.n_epochs * most_minibatches(self.policy, *size, self.sequence_length)

    @property
    def sequence_steps(self) -> int:
        """Steps L of a sequence."""
        return steps_of(self.sequence_length, self.data.buffer_size)

    def recompute_states(self, rollout: TensorDict) -> None:
        """Replace the states of a rollout [N, T+1], except the first, by those of the weights."""
        rollout["state"] = states_of(self.policy, rollout)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            check_batch_size(self.batch_size, self.data.num_envs * self.data.buffer_size)
            if ranks.world_size() > 1:
                check_prepared_fields(type(self), RolloutAlgorithm)


class OnPolicyAlgorithm(RolloutAlgorithm):
    """An algorithm that trains on each rollout once, in several passes.

    Args:
        policy: the policy to train.
        lr_schedule: `constant`; `linear`, to zero at the end of the budget; or `adaptive`: divided
            by 1.5 if the KL of an epoch exceeds twice `desired_kl`, multiplied by 1.5 if the KL is
            below half of it, within 1e-5 and 1e-2 (extended to include `learning_rate`).
        desired_kl: target KL of the adaptive schedule.
        gamma: discount per env step.
        normalize_reward: scale rewards by the running standard deviation of the discounted return,
            clipped to ±10.
        target_kl: end the update after an epoch whose mean KL exceeds this; null for never.
        off_policy_correction: correction for stale rollouts of an `AsyncCollector`: `decoupled`,
            `loglinear`, `vtrace` (needs a critic) or `bypass`; see `OffPolicyCorrection`.
        behavior_weight_cap: stale samples with a larger importance weight are ignored.
        kwargs: see `RolloutAlgorithm`.

    Attributes:
        may_be_stale: whether rollouts may come from older weights; `correction` then applies.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        lr_schedule: Literal["constant", "linear", "adaptive"] = "constant",
        desired_kl: float = 0.01,
        gamma: float = 0.99,
        normalize_reward: bool = False,
        target_kl: float | None = None,
        off_policy_correction: Correction = "decoupled",
        behavior_weight_cap: float = 2.0,
        **kwargs: Unpack[OnPolicyAlgorithmKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("desired_kl", desired_kl, above=0)
        check_range("gamma", gamma, minimum=0, maximum=1)
        check_range("target_kl", target_kl, above=0)
        self.lr_schedule = lr_schedule
        self.desired_kl = desired_kl
        self.gamma = gamma
        self.target_kl = target_kl
        self.correction = OffPolicyCorrection(
            off_policy_correction, behavior_weight_cap, joint_ratio=policy.joint_ratio
        )
        self.may_be_stale = False
        if normalize_reward:
            self.reward_normalizer = RewardNormalizer()
        self._ratio_checked = False

    @property
    def trains_actor(self) -> bool:
        """Whether the current update trains the actor, so that its KL adapts the learning rate."""
        return True

    @property
    def correction_fields(self) -> tuple[str, ...]:
        """Extra fields that the off-policy correction needs in a minibatch."""
        return self.correction.fields if self.may_be_stale else ()

    # --- helpers of training_step ---

    def policy_action_mask(self, rollout: TensorDict) -> Tensor | None:
        """Return a mask [N, T] of steps with the policy's own action; None: all steps."""
        other = [rollout[key] for key in ("intervened", "padding") if key in rollout.keys()]
        return ~torch.stack(other).any(0)[:, :-1] if other else None

    def rewards(self, rollout: TensorDict) -> Tensor:
        """Return the rewards [N, T] for training, scaled if `normalize_reward` is set."""
        reward = discounted_reward(rollout, self.gamma)
        if self.reward_normalizer is None:
            return reward
        return self.reward_normalizer(reward)  # type: ignore[no-any-return]  # nn.Module

    def correct_staleness(self, rollout: TensorDict) -> None:
        """Write the fields of the off-policy correction into a stale rollout [N, T+1]."""
        if not self.may_be_stale:
            return
        for name, value in self.correction.add_fields(self.policy, rollout).items():
            self.statistics.set(name, value)

    def minibatches(
        self, rollout: TensorDict, keys: Sequence[str], mask: Tensor | None = None
    ) -> Iterator[TensorDict]:
        """Yield shuffled minibatches [B] of `n_epochs` passes; `target_kl` may stop it earlier.

        If `keys` include `sample_log_prob`, the first call of a run checks that the policy
        reproduces these log-probs.

        Args:
            rollout: [N, T+1].
            keys: the fields that the loss reads; the policy's extra fields are added.
            mask: [N, T], true for transitions to train on; interventions and padding are left out.

        Raises:
            ConfigurationError: if the first ratio of the run is not 1.
        """
        policy_mask = self.policy_action_mask(rollout)
        if policy_mask is not None:
            mask = policy_mask if mask is None else mask & policy_mask
        # All ranks decide alike: a rank that stops alone leaves the other ranks waiting.
        if mask is not None and not ranks.agree(bool(mask.any())):
            return
        is_due = not self._ratio_checked and trainer_of(self) is not None
        if is_due and "sample_log_prob" in keys and self.data.acted_by_policy:
            self._ratio_checked = check_first_ratio(self.policy, rollout)
        statistics = self.main_objective.statistics
        for epoch in self.passes(rollout, keys, mask):
            # `target_kl` judges the steps of this epoch alone.
            first = len(statistics)
            yield from epoch
            if self._stops_early(first):
                return

    def _stops_early(self, first: int) -> bool:
        """Adapt the learning rate to the epoch's KL; return whether the KL ends the update."""
        if self.target_kl is None and self.lr_schedule != "adaptive":
            return False
        objective = self.main_objective
        kl = objective.statistics.mean_since("approx_kl", first)
        if self.trains_actor:
            objective.schedule.adapt(self.update.optimizer, kl)
        return self.target_kl is not None and kl > self.target_kl

    # --- hooks of Lightning and `Algorithm` ---

    def schedule_from(self, learning_rate: float) -> LearningRateSchedule:
        return LearningRateSchedule(self.lr_schedule, learning_rate, self.desired_kl)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._ratio_checked = False

    def on_train_start(self) -> None:
        # The collector exists only from the start of training.
        super().on_train_start()
        self.may_be_stale = self.data.max_staleness > 0

    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.may_be_stale and self.policy.evaluates_sequences:
            # Older weights computed the stored states: recompute them with the current weights.
            self.recompute_states(batch)


def make_sampler(
    policy: Policy,
    rollout: TensorDict,
    keys: Sequence[str],
    mask: Tensor | None,
    length: SequenceLength,
    burn_in: int,
) -> Sampler:
    """Return the minibatches' source: transitions of a rollout [N, T+1]; sequences for a memory.

    `keys` name the fields that the loss reads besides the policy's extra fields, `mask` [N, T] the
    transitions to train on. `length` and `burn_in`: see `RolloutAlgorithm`.
    """
    fields = loss_fields(rollout, keys, policy.extra_fields)
    if not policy.evaluates_sequences:
        return TransitionSampler(flat_transitions(rollout, fields), mask)
    return SequenceSampler(rollout, fields, mask, length, burn_in)


class TransitionSampler(Sampler):
    """Sample single transitions `flat` [M] where a mask [N, T] is true; None for all."""

    def __init__(self, flat: TensorDict, mask: Tensor | None = None) -> None:
        self.flat, self.varies = flat, mask is not None
        self._counted = None if mask is None else mask.t().flatten().nonzero().flatten()

    def __len__(self) -> int:
        return len(self.flat) if self._counted is None else len(self._counted)

    def units_per_minibatch(self, batch_size: int) -> int:
        return batch_size

    def samples(self, units: Tensor) -> Tensor:
        return units if self._counted is None else self._counted[units]

    def minibatches(
        self, parts: Sequence[Tensor], fields: Mapping[str, Tensor] | None = None
    ) -> Iterator[TensorDict]:
        if not parts:
            return
        # One gather for several minibatches, and a split, is faster than one gather each.
        sample_bytes = self.flat.bytes() / len(self.flat)
        size = max(1, max(len(units) for units in parts))
        together = max(1, int(GATHER_BYTES / (sample_bytes * size)))
        done = 0
        for first in range(0, len(parts), together):
            group = parts[first : first + together]
            samples = gather(self.flat, self.samples(torch.cat(list(group))))
            for key, value in (fields or {}).items():
                samples[key] = value[done : done + len(samples)]
            done += len(samples)
            yield from samples.split([len(units) for units in group])


def epochs(
    sampler: Sampler,
    n_epochs: int,
    batch_size: int,
    generator: torch.Generator,
    prepare: Callable[[TensorDict, Tensor, Sequence[int]], dict[str, Tensor]],
) -> Iterator[Iterator[TensorDict]]:
    """Yield one iterator of minibatches [M] per pass; each pass has all samples, in random order.

    The last minibatch of a pass may be smaller than `batch_size`; all are smaller if sequences do
    not divide `batch_size`. All communication between processes happens before the first pass;
    `prepare` computes fields of the drawn samples.
    """
    size = sampler.units_per_minibatch(batch_size)
    if ranks.world_size() == 1:
        for _ in range(n_epochs if len(sampler) else 0):  # lazily: the update may stop early
            yield sampler.minibatches(_shuffled(sampler, generator).split(size))
        return
    orders = [_shuffled(sampler, generator) for _ in range(n_epochs)]
    # Masks differ between ranks: all ranks take as many minibatches as the fullest rank.
    count = ranks.max_over_ranks(-(-len(sampler) // size)) if sampler.varies else None
    if count == 0:
        return
    parts = [o.split(size) if count is None else o.tensor_split(count) for o in orders]
    samples = [[sampler.samples(units) for units in epoch] for epoch in parts]
    sizes = [len(rows) for epoch in samples for rows in epoch]
    fields = prepare(sampler.flat, torch.cat([rows for epoch in samples for rows in epoch]), sizes)
    sampler.flat = sampler.flat.exclude(*fields)
    done = 0
    for units, of_epoch in zip(parts, samples, strict=True):
        end = done + sum(len(rows) for rows in of_epoch)
        yield sampler.minibatches(units, {key: value[done:end] for key, value in fields.items()})
        done = end


def _shuffled(sampler: Sampler, generator: torch.Generator) -> Tensor:
    return torch.randperm(len(sampler), generator=generator, device=sampler.flat.device)


def gather(data: TensorDict, index: Tensor) -> TensorDict:
    """Return the samples [B] at an index [B]; faster than TensorDict's indexing."""

    def select(value: Any) -> Any:
        if isinstance(value, TensorDict):
            return gather(value, index)
        return value.index_select(0, index)  # takes a third of the time of value[index]

    return TensorDict(
        {key: select(value) for key, value in data.items()}, index.shape, device=data.device
    )
