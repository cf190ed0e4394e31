"""Give an on-policy algorithm everything but its loss: rewards, values, minibatches, KL stop."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.action_parts import add_part_weights, part_weights_over_ranks
from lightning_rl.algorithms.base import Algorithm, RankState
from lightning_rl.algorithms.checks import (
    check_batch_size,
    check_drawn_fields,
    check_first_ratio,
    check_sequences,
)
from lightning_rl.algorithms.off_policy_correction import Correction, OffPolicyCorrection
from lightning_rl.algorithms.rollout_evaluation import states_of, write_values
from lightning_rl.algorithms.sequence_cut import (
    Drawing,
    SequenceCut,
    SequenceLength,
    most_minibatches,
)
from lightning_rl.compiled.update import CompiledValues
from lightning_rl.optim.learning_rate import LearningRateSchedule
from lightning_rl.optim.update import Objective
from lightning_rl.policies import Policy, RewardNormalizer
from lightning_rl.rollout.contract import discounted_reward, flat_transitions, loss_fields
from lightning_rl.system import ranks
from lightning_rl.system.errors import check_range
from lightning_rl.system.lightning_private import trainer_of

Draw = Callable[[TensorDict, Tensor, Sequence[int]], dict[str, Tensor]]
"""Makes fields of the samples drawn: see `OnPolicyAlgorithm.drawn_fields`."""

GATHER_BYTES = 2**22
"""How much is gathered at once for minibatches."""


class OnPolicyAlgorithm(Algorithm):
    """An algorithm that learns from each rollout once, in several passes over it.

    A subclass writes `training_step` and `loss`.

    Args:
        policy: what is trained.
        lr_schedule: `constant`; `linear`, to zero at the end of the budget; or `adaptive`, divided
            by 1.5 where the KL of an epoch exceeds twice `desired_kl` and multiplied by 1.5 where
            it is below half of it, between 1e-5 and 1e-2 (and `learning_rate`, if that is beyond).
        desired_kl: of the adaptive schedule.
        n_epochs: passes over a rollout.
        batch_size: transitions per minibatch, of each process; the last one of a pass is smaller
            where it does not divide N*T.
        gamma: discount per env step.
        normalize_reward: scale rewards by the running standard deviation of the discounted return,
            clipped to ±10.
        target_kl: end the update before the next epoch once an epoch's average KL exceeds it; null
            for never.
        off_policy_correction: what is done about rollouts of older weights, which an
            `AsyncCollector` gives: `decoupled`, `loglinear`, `vtrace` (with a critic) or `bypass`;
            see `OffPolicyCorrection`.
        behavior_weight_cap: the largest weight of a stale sample that counts.
        sequence_length: steps in a row that the gradients of a policy with a memory go through,
            beginning with the state that was stored; `rollout` for all of a rollout's. A minibatch
            is `batch_size // sequence_length` such sequences, at least one. 32 where not given.
        burn_in: steps before each sequence, through which the policy as it is now finds the state
            that the sequence begins with, without gradients, from the one that was stored.
        kwargs: see `Algorithm`.

    Attributes:
        may_be_stale: whether rollouts may be of older weights, so that `correction` is asked.

    Raises:
        ConfigurationError: for a number out of range.
    """

    uses_replay = False

    def __init__(
        self,
        policy: Policy,
        lr_schedule: Literal["constant", "linear", "adaptive"] = "constant",
        desired_kl: float = 0.01,
        n_epochs: int = 10,
        batch_size: int = 64,
        gamma: float = 0.99,
        normalize_reward: bool = False,
        target_kl: float | None = None,
        off_policy_correction: Correction = "decoupled",
        behavior_weight_cap: float = 2.0,
        sequence_length: SequenceLength = None,
        burn_in: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, batch_size=batch_size, **kwargs)
        check_sequences(policy, sequence_length, burn_in)
        check_range("desired_kl", desired_kl, above=0)
        check_range("n_epochs", n_epochs, least=1)
        check_range("gamma", gamma, least=0, most=1)
        check_range("target_kl", target_kl, above=0)
        self.lr_schedule = lr_schedule
        self.desired_kl = desired_kl
        self.n_epochs = n_epochs
        self.gamma = gamma
        self.target_kl = target_kl
        self.correction = OffPolicyCorrection(
            off_policy_correction, behavior_weight_cap, joint_ratio=policy.joint_ratio
        )
        self.sequence_length: SequenceLength = sequence_length
        self.burn_in = burn_in
        self.may_be_stale = False
        self.reward_normalizer = RewardNormalizer() if normalize_reward else None
        self._ratio_checked = False

    @property
    def trains_actor(self) -> bool:
        """Whether the update under way is to move the actor: else its KL says nothing of the rate.

        Of a subclass that leaves it where it is for some iterations.
        """
        return True

    @property
    def correction_fields(self) -> tuple[str, ...]:
        """What the correction wants a loss to read, beside what that reads anyway."""
        return self.correction.fields if self.may_be_stale else ()

    # --- what training_step is made of ---

    def chosen(self, rollout: TensorDict) -> Tensor | None:
        """Return where [N, T] bool the policy's own action was executed; None for everywhere.

        Of a step in which somebody took over, or nothing happened, the loss would learn what was
        never done.
        """
        other = [rollout[key] for key in ("intervened", "padding") if key in rollout.keys()]
        return ~torch.stack(other).any(0)[:, :-1] if other else None

    def rewards(self, rollout: TensorDict) -> Tensor:
        """Return the rewards [N, T] to learn from: scaled, with `normalize_reward`."""
        reward = discounted_reward(rollout, self.gamma)
        if self.reward_normalizer is None:
            return reward
        return self.reward_normalizer(reward)  # type: ignore[no-any-return]  # nn.Module

    def evaluate_values(self, rollout: TensorDict) -> None:
        """Write `value` [N, T+1], and `final_value` where only the time ran out."""
        graphs = self._graphs
        value_of = None if graphs is None else CompiledValues(self.policy, graphs)
        write_values(self.policy, rollout, value_of)

    def correct_staleness(self, rollout: TensorDict) -> None:
        """Write what the correction needs to know of the policy that this update begins at.

        Args:
            rollout: [N, T+1]; nothing is written where it cannot be stale.
        """
        if not self.may_be_stale:
            return
        for name, value in self.correction.add_fields(self.policy, rollout).items():
            self.statistics.set(name, value)

    def minibatches(
        self, rollout: TensorDict, keys: Sequence[str], mask: Tensor | None = None
    ) -> Iterator[TensorDict]:
        """Yield the minibatches [B] of `n_epochs` passes, freshly shuffled.

        It ends early, after a pass, where `target_kl` says so. Before the first of a run the policy
        has to give its actions the log-probs that it chose them by, if `keys` ask for these.

        Args:
            rollout: [N, T+1].
            keys: the fields that the loss reads; the policy's own come beside them.
            mask: [N, T]; where it is false, a transition is left out; so it is where the policy's
                action was not the one that was executed.

        Raises:
            ConfigurationError: where the first ratio of the run would not be 1.
        """
        chosen = self.chosen(rollout)
        if chosen is not None:
            mask = chosen if mask is None else mask & chosen
        if mask is not None and not ranks.agree(bool(mask.any())):
            return
        self._check_first_ratio(rollout, keys)
        drawing = drawing_of(self.policy, rollout, keys, mask, self.sequence_length, self.burn_in)
        statistics = self.objectives[""].statistics
        how = (self.n_epochs, self.batch_size, self.generator, self.drawn_fields)
        for epoch in epochs(drawing, *how):
            first = len(statistics)
            yield from epoch
            if self._stops_early(first):
                return

    def _check_first_ratio(self, rollout: TensorDict, keys: Sequence[str]) -> None:
        """Check it once in a run, where the loss takes a ratio of the policy's own actions."""
        if self._ratio_checked or trainer_of(self) is None:
            return
        if "sample_log_prob" in keys and self.data.acted_by_policy:
            self._ratio_checked = check_first_ratio(self.policy, rollout)

    @abstractmethod
    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch [B], and scalars to report.

        All of them averages over its samples: a large minibatch is given in parts, whose losses are
        averaged. Compiled, this is traced once: what depends on the values of tensors has to be a
        tensor operation.
        """

    def prepare(self, minibatch: TensorDict) -> TensorDict:
        """Do what needs the whole minibatch [B] at once, such as normalising; no gradients.

        With several processes `drawn_fields` does that instead.
        """
        return add_part_weights(minibatch)

    def drawn_fields(
        self, flat: TensorDict, order: Tensor, sizes: Sequence[int]
    ) -> dict[str, Tensor]:
        """With several processes, do what `prepare` does otherwise, for all minibatches at once.

        Each rank has a part of a minibatch.

        Args:
            flat: [M], the transitions of this rank.
            order: [S], indices of those that are drawn, in all passes.
            sizes: of the parts that follow each other in it, one for each minibatch.

        Returns:
            Fields [S] of the samples drawn, by name.
        """
        return part_weights_over_ranks(flat, order, sizes)

    def _stops_early(self, first: int) -> bool:
        """Adapt the rate to the KL of an epoch; tell whether that KL ends the update.

        The epoch began with minibatch `first`.
        """
        if self.target_kl is None and self.lr_schedule != "adaptive":
            return False
        objective = self.objectives[""]
        kl = objective.statistics.mean_since("approx_kl", first)
        if self.trains_actor:
            objective.schedule.adapt(self.optimizer_of(), kl)
        return self.target_kl is not None and kl > self.target_kl

    # --- what Lightning and `Algorithm` ask for ---

    def configure_objectives(self) -> list[Objective]:
        return [self.objective(self.loss, prepare=self.prepare)]

    def minibatches_per_iteration(self) -> int:
        """Return how many `n_epochs` passes have; fewer where samples are left out."""
        size = (self.data.num_envs, self.data.buffer_size, self.batch_size)
        return self.n_epochs * most_minibatches(self.policy, *size, self.sequence_length)

    def schedule_from(self, learning_rate: float) -> LearningRateSchedule:
        return LearningRateSchedule(self.lr_schedule, learning_rate, self.desired_kl)

    def setup(self, stage: str) -> None:
        """Check the settings against the data, as soon as both are known."""
        super().setup(stage)
        if stage == "fit":
            check_batch_size(self.batch_size, self.data.num_envs * self.data.buffer_size)

    def on_fit_start(self) -> None:
        """Begin a run, in which the first ratio is yet to be checked.

        Raises:
            ConfigurationError: where several processes have parts of a minibatch, and the algorithm
                prepares only whole ones.
        """
        super().on_fit_start()
        self._ratio_checked = False
        if ranks.world_size() > 1:
            check_drawn_fields(type(self), OnPolicyAlgorithm)

    def on_train_start(self) -> None:
        """Take up the random streams of a checkpoint; by now there is a collector to ask."""
        super().on_train_start()
        self.may_be_stale = self.data.max_staleness > 0

    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        """Take the rewards of a rollout [N, T+1] into the statistics that scale them.

        In one of older weights write the states that the policy as it is now comes to.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self.may_be_stale and self.policy.evaluates_sequences:
            # What older weights came to: values, ratios and sequences begin with what these do.
            batch["state"] = states_of(self.policy, batch)
        if self.reward_normalizer is not None:
            self.reward_normalizer.observe_rollout(batch, self.gamma)

    def rank_state(self) -> RankState:
        """Return what this rank has of its own, the returns under way of its envs among it."""
        normalizer = self.reward_normalizer
        return super().rank_state() | {"carry": None if normalizer is None else normalizer.carry}

    def load_rank_state(self, state: RankState | None) -> None:
        super().load_rank_state(state)
        if self.reward_normalizer is not None:
            self.reward_normalizer.carry = None if state is None else state["carry"]


def drawing_of(
    policy: Policy,
    rollout: TensorDict,
    keys: Sequence[str],
    mask: Tensor | None,
    length: SequenceLength,
    burn_in: int,
) -> Drawing:
    """Return what the minibatches of a rollout [N, T+1] are drawn from, as its policy wants it.

    Args:
        policy: is trained.
        rollout: [N, T+1].
        keys: the fields that the loss reads; the policy's own come beside them.
        mask: [N, T], true where a transition counts; None for everywhere.
        length: of the sequences, for a policy with a memory; see `OnPolicyAlgorithm`.
        burn_in: steps before each of them.
    """
    fields = loss_fields(rollout, keys, policy.extra_fields)
    if not policy.evaluates_sequences:
        return Transitions(flat_transitions(rollout, fields), mask)
    return SequenceCut(rollout, fields, mask, length, burn_in)


class Transitions(Drawing):
    """Each transition that counts is a unit.

    Args:
        flat: [M], the transitions of this rank, see `flat_transitions`.
        mask: [N, T], true where a transition counts; None for all.
    """

    def __init__(self, flat: TensorDict, mask: Tensor | None = None) -> None:
        self.flat, self.varies = flat, mask is not None
        self._counted = None if mask is None else mask.t().flatten().nonzero().flatten()

    def __len__(self) -> int:
        return len(self.flat) if self._counted is None else len(self._counted)

    def units_in(self, batch_size: int) -> int:
        return batch_size

    def samples(self, units: Tensor) -> Tensor:
        return units if self._counted is None else self._counted[units]

    def minibatches(
        self, parts: Sequence[Tensor], drawn: Mapping[str, Tensor] | None = None
    ) -> Iterator[TensorDict]:
        """Yield the samples, gathered for many minibatches at once: cutting them is cheaper."""
        if not parts:
            return
        sample_bytes = self.flat.bytes() / len(self.flat)
        size = max(1, max(len(units) for units in parts))
        together = max(1, int(GATHER_BYTES / (sample_bytes * size)))
        done = 0
        for first in range(0, len(parts), together):
            group = parts[first : first + together]
            samples = gather(self.flat, self.samples(torch.cat(list(group))))
            for key, value in (drawn or {}).items():
                samples[key] = value[done : done + len(samples)]
            done += len(samples)
            yield from samples.split([len(units) for units in group])


def epochs(
    drawing: Drawing, n_epochs: int, batch_size: int, generator: torch.Generator, draw: Draw
) -> Iterator[Iterator[TensorDict]]:
    """Yield the minibatches [M] of each of some passes: every sample once, in random order.

    With several processes what they have to exchange for it is exchanged before the first pass.

    Args:
        drawing: what they are drawn from.
        n_epochs: passes.
        batch_size: the most samples that a rank adds to a minibatch; the last of a pass is smaller
            where it does not divide them, and all are where sequences do not divide it.
        generator: draws the permutations, on the device of the rollout.
        draw: with several processes, makes fields of the samples drawn.
    """
    size = drawing.units_in(batch_size)
    if ranks.world_size() == 1:
        for _ in range(n_epochs if len(drawing) else 0):  # drawn as they come: it may end early
            yield drawing.minibatches(_shuffled(drawing, generator).split(size))
        return
    orders = [_shuffled(drawing, generator) for _ in range(n_epochs)]
    # Masks differ by rank, and all have to take part in as many minibatches as the fullest needs.
    count = ranks.max_over_ranks(-(-len(drawing) // size)) if drawing.varies else None
    if count == 0:
        return
    parts = [o.split(size) if count is None else o.tensor_split(count) for o in orders]
    samples = [[drawing.samples(units) for units in epoch] for epoch in parts]
    sizes = [len(one) for epoch in samples for one in epoch]
    drawn = draw(drawing.flat, torch.cat([one for epoch in samples for one in epoch]), sizes)
    drawing.flat = drawing.flat.exclude(*drawn)
    done = 0
    for units, of_epoch in zip(parts, samples, strict=True):
        end = done + sum(len(one) for one in of_epoch)
        yield drawing.minibatches(units, {key: value[done:end] for key, value in drawn.items()})
        done = end


def _shuffled(drawing: Drawing, generator: torch.Generator) -> Tensor:
    """Return all units [U] in random order."""
    return torch.randperm(len(drawing), generator=generator, device=drawing.flat.device)


def gather(data: TensorDict, index: Tensor) -> TensorDict:
    """Return the samples [B] at an index [B]; several times as fast as TensorDict's indexing."""

    def select(value: Any) -> Any:
        if isinstance(value, TensorDict):
            return gather(value, index)
        return value.index_select(0, index)  # a third of the time of value[index]

    return TensorDict(
        {key: select(value) for key, value in data.items()}, index.shape, device=data.device
    )
