"""Give an algorithm everything but its loss.

Values, minibatches, the optimizer step, counters, evaluation.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl import ranks
from lightning_rl.algorithms.checks import (
    check_before_fit,
    check_checkpoint,
    check_first_ratio,
    check_rollout,
)
from lightning_rl.algorithms.epochs import epochs
from lightning_rl.algorithms.evaluated import EvaluatedModule
from lightning_rl.algorithms.gradients import Gradients
from lightning_rl.algorithms.hooks import MINIBATCH_HOOKS, MinibatchHooks
from lightning_rl.algorithms.parts import add_part_weights, loss_fields, part_weights_over_ranks
from lightning_rl.algorithms.passes import write_values
from lightning_rl.algorithms.schedule import LearningRateSchedule
from lightning_rl.algorithms.staleness import Correction, StaleData
from lightning_rl.algorithms.state import RankState, load_counters, load_rank_state, training_state
from lightning_rl.algorithms.update import (
    NonFiniteGuard,
    UpdateStatistics,
    count_iteration,
    named_sources,
)
from lightning_rl.checkpoint_format import STATE_KEY, WEIGHTS, header
from lightning_rl.collectors import EpisodePlan
from lightning_rl.errors import check_range
from lightning_rl.phases import PhaseTimer, no_phases, phases_of
from lightning_rl.policies import Policy, RewardNormalizer
from lightning_rl.rollout import (
    discount_of,
    discounted_reward,
    env_steps_in,
    flat_transitions,
    without_padding,
)

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters.

In YAML `{class_path: torch.optim.AdamW, init_args: {weight_decay: 0.01}}`.
"""


class Algorithm(EvaluatedModule):
    """A policy and a way to improve it.

    A subclass writes `training_step`, which reads top to bottom.

    Lightning's automatic optimization is off: a training step is one iteration, that is one rollout
    and its whole update of many optimizer steps, and `trainer.global_step` counts iterations.

    Args:
        policy: what is trained.
        learning_rate: initial learning rate.
        lr_schedule: `constant`; `linear`, to zero at the end of the budget; or `adaptive`, divided
            by 1.5 where the KL of an epoch exceeds twice `desired_kl` and multiplied by 1.5 where
            it is below half of it, between 1e-5 and 1e-2 (and `learning_rate`, if that is beyond).
        desired_kl: of the adaptive schedule.
        n_epochs: passes over a rollout.
        batch_size: transitions per minibatch, of each process; the last one of a pass is smaller
            where it does not divide N*T.
        gamma: discount per env step.
        max_grad_norm: bound on the norm of the whole gradient; null for none.
        normalize_reward: scale rewards by the running standard deviation of the discounted return,
            clipped to ±10.
        optimizer: where not given, Adam with eps 1e-5. Its learning rate is `learning_rate`.
        target_kl: end the update before the next epoch once an epoch's average KL exceeds it; null
            for never.
        off_policy_correction: what is done about rollouts of older weights, which an
            `AsyncCollector` gives: `decoupled`, `loglinear`, `vtrace` (with a critic) or `bypass`;
            see `StaleData`.
        behavior_weight_cap: the largest weight of a stale sample that counts.
        max_nonfinite_steps: optimizer steps in a row that may be skipped for a loss or gradient
            that is not finite, before the run ends.
        compile: compile loss, backward pass, clipping and Adam to one graph, and the values of a
            rollout to another. Takes some 10 s when a run begins, and a C++ compiler (on a GPU
            Triton); where that fails, a warning says why, and the update runs uncompiled.

    Raises:
        ConfigurationError: for a number out of range.
    """

    plan = EpisodePlan()
    """How the episodes of a rollout begin and end."""

    def __init__(
        self,
        policy: Policy,
        learning_rate: float = 3e-4,
        lr_schedule: Literal["constant", "linear", "adaptive"] = "constant",
        desired_kl: float = 0.01,
        n_epochs: int = 10,
        batch_size: int = 64,
        gamma: float = 0.99,
        max_grad_norm: float | None = 0.5,
        normalize_reward: bool = False,
        optimizer: OptimizerFactory | None = None,
        target_kl: float | None = None,
        off_policy_correction: Correction = "decoupled",
        behavior_weight_cap: float = 2.0,
        max_nonfinite_steps: int = 10,
        compile: bool = False,
    ) -> None:
        super().__init__(policy)
        self.automatic_optimization = False
        check_range("learning_rate", learning_rate, above=0)
        check_range("desired_kl", desired_kl, above=0)
        check_range("n_epochs", n_epochs, least=1)
        check_range("batch_size", batch_size, least=1)
        check_range("gamma", gamma, least=0, most=1)
        check_range("max_grad_norm", max_grad_norm, above=0)
        check_range("target_kl", target_kl, above=0)
        check_range("max_nonfinite_steps", max_nonfinite_steps, least=1)
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.gamma = gamma
        self.max_grad_norm = max_grad_norm
        self.target_kl = target_kl
        self.stale = StaleData(off_policy_correction, behavior_weight_cap)
        self.stale.joint_ratio = policy.joint_ratio
        self.make_optimizer = optimizer
        self.schedule = LearningRateSchedule(lr_schedule, learning_rate, desired_kl)
        self.reward_normalizer = RewardNormalizer() if normalize_reward else None
        self.optimizer_steps = 0
        self.statistics = UpdateStatistics()
        self.guard = NonFiniteGuard(max_nonfinite_steps)
        self.metrics: dict[str, float] = {}
        self.generator = torch.Generator()
        self._restored: list[RankState] | None = None
        self._ratio_checked = False
        self.compile_loss = compile
        self.phase: PhaseTimer = no_phases
        self._value_of: Callable[[TensorDict], Tensor] | None = None
        self._hooks: MinibatchHooks  # made by on_fit_start, as is the next
        self._gradients: Gradients

    @property
    def iterations_done(self) -> int:
        """How many iterations of the run came before this one, those before a resumption included.

        For what is annealed; the second argument of `training_step` counts within an epoch.
        """
        return int(self.trainer.global_step)

    @property
    def trains_actor(self) -> bool:
        """Whether the update under way is to move the actor: else its KL says nothing of the rate.

        Of a subclass that leaves it where it is for some iterations.
        """
        return True

    # --- what training_step is made of ---

    def rewards(self, rollout: TensorDict) -> Tensor:
        """Return the rewards [N, T] to learn from: scaled, with `normalize_reward`."""
        reward = discounted_reward(rollout, self.gamma)
        if self.reward_normalizer is None:
            return reward
        return self.reward_normalizer(reward)  # type: ignore[no-any-return]  # nn.Module

    def evaluate_values(self, rollout: TensorDict) -> None:
        """Write `value` [N, T+1], and `final_value` where only the time ran out."""
        write_values(self.policy, rollout, self._value_of)

    def minibatches(
        self, rollout: TensorDict, keys: Sequence[str], mask: Tensor | None = None
    ) -> Iterator[TensorDict]:
        """Yield the minibatches [B] of `n_epochs` passes, freshly shuffled.

        It ends early, after a pass, where `target_kl` says so. Before the first of a run the policy
        has to give its actions the log-probs that it chose them by, if `keys` ask for these.

        Args:
            rollout: [N, T+1].
            keys: the fields that the loss reads; the policy's own come beside them.
            mask: [N, T]; where it is false, a transition is left out.

        Raises:
            ConfigurationError: where the first ratio of the run would not be 1.
        """
        self._check_first_ratio(rollout, keys)
        flat = flat_transitions(rollout, loss_fields(rollout, keys, self.policy.extra_fields))
        drawing = (self.n_epochs, self.batch_size, self.generator, self.drawn_fields)
        for epoch in epochs(flat, mask, *drawing):
            first = len(self.statistics)
            yield from epoch
            if self._stops_early(first):
                return

    def _check_first_ratio(self, rollout: TensorDict, keys: Sequence[str]) -> None:
        """Check it once in a run, where the loss takes a ratio of the policy's own actions."""
        if self._ratio_checked or self._trainer is None:
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
        """Do what needs the whole minibatch [B] at once, such as normalising; no gradients."""
        return add_part_weights(minibatch)

    def drawn_fields(
        self, flat: TensorDict, order: Tensor, sizes: Sequence[int]
    ) -> dict[str, Tensor]:
        """With several processes, return what needs the whole of each minibatch.

        Each rank has a part of a minibatch, of which `prepare` then sees no more.

        Args:
            flat: [M], the transitions of this rank.
            order: [S], indices of those that are drawn, in all passes.
            sizes: of the parts that follow each other in it, one for each minibatch.

        Returns:
            Fields [S] of the samples drawn, by name.
        """
        weight = part_weights_over_ranks(flat, order, sizes)
        return {} if weight is None else {"part_weight": weight}

    def optimizer_update(self, minibatch: TensorDict) -> None:
        """Step down the loss, unless it or its gradient is not finite; keep the statistics."""
        names, scalars = self._gradients(minibatch, self._hooks.backward)
        if self.guard.passes(names, scalars):
            if not self._gradients.stepped:
                with self.phase("optimizer"):
                    self._hooks.step(self.trainer.optimizers[0])
            self.optimizer_steps += 1
            self.statistics.add(names, scalars)

    def correct_staleness(self, rollout: TensorDict) -> None:
        """Write what `stale` needs to know of the policy that this update begins at."""
        for name, value in self.stale.add_fields(self.policy, rollout).items():
            self.statistics.set(name, value)

    def _stops_early(self, first: int) -> bool:
        """Adapt the rate to the KL of an epoch; tell whether that KL ends the update.

        The epoch began with minibatch `first`.
        """
        if self.target_kl is None and self.schedule.kind != "adaptive":
            return False
        kl = self.statistics.mean_since("approx_kl", first)
        if self.trains_actor:
            self.schedule.adapt(self.trainer.optimizers[0], kl)
        return self.target_kl is not None and kl > self.target_kl

    def finish_iteration(self, rollout: TensorDict) -> None:
        """Close an update: normaliser statistics, policy version, counters and metrics.

        Raises:
            FloatingPointError: after `max_nonfinite_steps` skipped steps in a row, naming what was
                not finite.
        """
        if self.guard.exhausted:
            raise FloatingPointError(self.guard.message(named_sources(rollout, self.policy)))
        self._gradients.settle()
        if type(self.policy).update_normalization is not Policy.update_normalization:
            # Padding is left out by a copy, which takes time where there are pictures.
            self.policy.update_normalization(without_padding(rollout))
        self.policy.version += 1
        self.data.publish()
        steps = torch.tensor(env_steps_in(rollout))
        self.env_steps += int(ranks.sum_over_ranks(steps))
        means = self.statistics.means()
        self.metrics = {key if "/" in key else f"train/{key}": means[key] for key in means}
        self.metrics |= {
            "train/learning_rate": self.trainer.optimizers[0].param_groups[0]["lr"],
            "train/optimizer_steps": float(self.optimizer_steps),
            "train/skipped_steps": float(self.guard.skipped),
        }
        count_iteration(self)

    # --- Lightning's hooks ---

    def configure_optimizers(self) -> Optimizer:
        """Make the optimizer; its learning rate is set by the schedule."""
        groups = self.policy.parameter_groups()
        if self.make_optimizer is not None:
            return self.make_optimizer(groups)
        return torch.optim.Adam(groups, lr=self.schedule.initial, eps=1e-5, fused=True)

    def setup(self, stage: str) -> None:
        """Check the settings against the data, as soon as both are known."""
        super().setup(stage)
        if stage == "fit":
            check_before_fit(self.trainer, self.batch_size, self.data)

    def on_fit_start(self) -> None:
        """Seed the shuffling, apart from every other random stream.

        A checkpoint's state is taken up afterwards.
        """
        self.phase = phases_of(cast(Any, self.trainer).profiler)
        self._ratio_checked = False
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(self.data.seed_for("shuffle"))
        self.schedule.horizon = (
            self.data.total_iterations * self.data.env_steps_per_iteration * ranks.world_size()
        )
        self._hooks = MinibatchHooks(self)
        if self.compile_loss and self._hooks.in_use:
            rank_zero_warn(
                "compile: true has no effect: a callback or the module overrides one of "
                f"{', '.join(MINIBATCH_HOOKS)}, which a compiled update does not call."
            )
        compiled = self.compile_loss and not self._hooks.in_use
        self._gradients = Gradients(
            self, self.max_grad_norm, compile=compiled, optimizer=self.trainer.optimizers[0]
        )
        self._value_of = self._gradients.values if compiled else None

    def on_train_start(self) -> None:
        """Take up the random streams of a checkpoint, after all else that might draw from them."""
        if self._restored is not None:
            load_rank_state(self, self._restored)
            self._restored = None

    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        """Refuse a rollout that is too old, and get ready to learn from it.

        That is: the learning rate, the policy in eval mode, the statistics of the rewards.

        Raises:
            RuntimeError: where the rollout is staler than the collector promises.
            FloatingPointError: where the env returned what is not a number.
        """
        check_rollout(batch)
        staleness = self.staleness(batch)
        allowed = self.data.max_staleness
        if staleness > allowed:
            raise RuntimeError(
                f"The rollout was collected {staleness} updates ago, {allowed} are allowed: the "
                "loader must have a length "
                "and hand out each rollout when it is asked for."
            )
        self.stale.active = allowed > 0
        self.schedule.apply(self.trainer.optimizers[0], self.env_steps)
        self.policy.put_in_eval_mode()
        if self.reward_normalizer is not None:
            continues = batch.get("continues", None)
            self.reward_normalizer.observe(
                discounted_reward(batch, self.gamma),
                batch["done"][:, :-1],
                discount=discount_of(batch, self.gamma),
                continues=None if continues is None else continues[:, 0],
            )

    def staleness(self, rollout: TensorDict) -> int:
        """Return how many updates the oldest step of a rollout lags the learner."""
        return int(self.policy.version - rollout["policy_version"][:, :-1].min())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add counters and random streams."""
        checkpoint[STATE_KEY] = header() | training_state(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up counters; random streams wait until training starts.

        Raises:
            ConfigurationError: where the checkpoint is not one of ours, is one of another policy,
                or holds too little to train on from.
        """
        saved = check_checkpoint(self, checkpoint)
        self.env_steps = saved["env_steps"]
        if saved["kind"] == WEIGHTS:
            return
        self._restored = load_counters(self, saved)

    def begin_with(self, checkpoint: dict[str, Any]) -> None:
        """Take up weights, normalisers and counters; random streams and episodes begin anew.

        Raises:
            ConfigurationError: where the checkpoint is one of another policy or algorithm.
        """
        self.on_load_checkpoint(checkpoint)
        self.load_state_dict(checkpoint["state_dict"])
        self._restored = None

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # Lightning's settings would unpickle it
        cls,
        checkpoint_path: str | Path,
        map_location: torch.device | str = "cpu",
        trust_code: bool = False,
        output_dir: str | Path = "outputs",
        **kwargs: Any,
    ) -> Self:
        """Make the algorithm of a checkpoint again, with its policy, ready to act.

        Weights, normalisers and counters are those of the checkpoint; `fit` would begin with a new
        optimizer. The checkpoint is data, and passes the checks of `rl-cli`: nothing of Lightning's
        own way is left, which imports what the file names.

        Args:
            checkpoint_path: a file, a run directory (then its last checkpoint), or `last` or `best`
                of the newest run.
            map_location: the device of all tensors.
            trust_code: import whatever classes the checkpoint names. Without it only those of this
                package, `torch.optim` and `gymnasium` count.
            output_dir: where runs are looked for, for `last` and `best`.
            kwargs: arguments of the constructor that replace those of the run, such as `policy`.

        Raises:
            ConfigurationError: for a file that cannot be read, one of another class, one that names
                other classes, and one of a run in Python that could not say how its policy is made.
        """
        # Upwards, at the call alone: what is made here is made of all that lies above.
        from lightning_rl.loading import load_algorithm

        arguments = (checkpoint_path, map_location, trust_code, output_dir, kwargs)
        return cast(Self, load_algorithm(cls, *arguments))
