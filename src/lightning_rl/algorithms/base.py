"""Base class of algorithms: optimizer steps, counters, checkpoints, evaluation."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from lightning.pytorch import LightningModule
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.algorithms.checkpoint_checks import check_optimizer_state, with_own_settings
from lightning_rl.algorithms.checks import (
    check_all_parameters_move,
    check_policy,
    check_replay_is_used,
    check_run,
    check_statistics_of_ranks,
    check_whole_minibatches,
    checked_optimizer,
    warn_of_unreached,
)
from lightning_rl.algorithms.evaluation import Evaluation, play
from lightning_rl.algorithms.learner import Learner
from lightning_rl.algorithms.rollout_evaluation import write_values
from lightning_rl.algorithms.run_state import RunState
from lightning_rl.algorithms.training_data import TrainingData
from lightning_rl.buffers import Replay
from lightning_rl.checkpoints.building import SavedRun
from lightning_rl.checkpoints.format import STATE_KEY, read_checkpoint
from lightning_rl.collectors import EpisodeSettings
from lightning_rl.collectors.evaluation import Episode, Watcher, logged_values
from lightning_rl.compiled.choice import CompileDecision, Setting, StepsCompileDecision
from lightning_rl.optim.lightning_hooks import LightningHooks
from lightning_rl.optim.objective_checks import WHOLE
from lightning_rl.optim.update import (
    LearningRateSchedule,
    Loss,
    Objective,
    OptimizerFactory,
    ScheduleKind,
    Update,
)
from lightning_rl.optim.update_sequence import UpdateSequence
from lightning_rl.policies import Policy, RewardNormalizer
from lightning_rl.policies.normalization import lacks_statistics
from lightning_rl.policies.weights import check_weights_are_numbers
from lightning_rl.rollout.contract import check_finite, check_time, env_steps_in, without_padding
from lightning_rl.rollout.masks import check_allowed
from lightning_rl.system import ranks
from lightning_rl.system.construction import Configurable
from lightning_rl.system.errors import ConfigurationError, check_range, require
from lightning_rl.system.lightning_private import counter_of_steps
from lightning_rl.system.phases import PhaseTimer, no_phases, phases_of
from lightning_rl.system.saved_runs import find_checkpoint
from lightning_rl.system.sharded import ShardingStrategy
from lightning_rl.system.streams import restore_generator

RankState = dict[str, Tensor | None]
"""State of one rank: random streams, and the unfinished returns of its envs."""


class Algorithm(LightningModule, ABC, Configurable):
    """Base class: a policy and its training; evaluation plays one episode per seed.

    A subclass writes `training_step`, and lists its losses in `configure_objectives`. Most
    subclasses derive from `OnPolicyAlgorithm` or `OffPolicyAlgorithm`.

    A training step is one iteration: one rollout and all its optimizer steps (manual optimization).
    `trainer.global_step` counts iterations.

    Args:
        policy: the policy to train.
        learning_rate: initial learning rate.
        lr_schedule: `constant`, or `linear`, to zero at the end of the budget.
        batch_size: transitions per minibatch and process.
        max_grad_norm: bound on the norm of the whole gradient; null for none.
        optimizer: makes the optimizer. Default: Adam with eps 1e-5 and `learning_rate`.
        max_nonfinite_steps: the run fails after this many consecutive optimizer steps were skipped
            because a loss or gradient was not finite.
        compile: compile the update. Compiling takes about 10 s at the
            start of a run (3 s if cached), and needs a C++ compiler (on a GPU Triton). If compiling
            fails, the update runs uncompiled with a warning. `auto` compiles if the budget has
            enough minibatches (`PAYS_FROM`), and prints the decision. A resumed run keeps its
            decision.

    Attributes:
        update: `self.update(minibatch)` takes an optimizer step on the main objective with a
            minibatch [B]; the step is skipped if loss or gradient is not finite.
        updates: the same for all objectives, by name: `self.updates["critic"](minibatch)`.
        env_steps: env steps trained on so far, over all ranks.
        metrics: metrics of the last iteration, by name.
        evaluation: summary of the last evaluation (see `summarize`), with `env_steps` and
            `deterministic`.
    """

    episode_settings = EpisodeSettings()
    """How rollouts start and end episodes, and which steps take random actions."""

    adam_eps = 1e-5
    """Eps of the default Adam."""

    gamma: float
    """Discount per env step; a subclass with a `reward_normalizer` sets it."""

    uses_replay = True
    """Whether the algorithm reads `replay`. If not, a config with `data.replay` is refused."""

    def __init__(
        self,
        policy: Policy,
        *,
        learning_rate: float = 3e-4,
        lr_schedule: Literal["constant", "linear"] = "constant",
        batch_size: int = 64,
        max_grad_norm: float | None = 0.5,
        optimizer: OptimizerFactory | None = None,
        max_nonfinite_steps: int = 10,
        compile: Setting = "auto",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_policy(self, policy)
        check_range("learning_rate", learning_rate, above=0)
        check_range("batch_size", batch_size, minimum=1)
        check_range("max_grad_norm", max_grad_norm, above=0)
        check_range("max_nonfinite_steps", max_nonfinite_steps, minimum=1)
        self.policy = policy
        self.learning_rate = learning_rate
        self.lr_schedule: ScheduleKind = lr_schedule
        self.batch_size, self.max_grad_norm = batch_size, max_grad_norm
        self.make_optimizer = optimizer
        self.max_nonfinite_steps = max_nonfinite_steps
        self.compile_update = compile
        self.step_compilation = StepsCompileDecision(False, None)  # see `choose_step_compilation`
        self._learner: Learner | None = None
        self.updates: dict[str, Update] = {}
        self.update: Update  # with `updates`, see `attach_learner`
        self._sequence_of: Callable[..., UpdateSequence]  # `Learner.sequence`
        self.reward_normalizer: RewardNormalizer | None = None
        self.env_steps = 0
        self.statistics = IterationScalars()
        self.metrics: dict[str, float] = {}
        self.evaluation: dict[str, Any] = {}
        self._evaluation = Evaluation()
        self.generator = torch.Generator()
        self._earlier_counts: dict[str, dict[str, Any]] = {}  # of the objectives of earlier fits
        self._run_state = RunState(self)

    @property
    def data(self) -> TrainingData:
        """The data module of the trainer."""
        return cast(TrainingData, self.trainer.datamodule)  # type: ignore[attr-defined]  # set by `fit`

    @property
    def phase(self) -> PhaseTimer:
        """Time a phase of an iteration for the trainer's profiler."""
        return no_phases if self._learner is None else self._learner.phase

    @property
    def replay(self) -> Replay:
        """The replay buffer of the data module.

        Raises:
            ConfigurationError: if `data.replay` is not set.
        """
        replay = self.data.replay
        if replay is None:
            raise ConfigurationError(
                f"{type(self).__name__} needs a replay buffer, but data.replay is not set. Set "
                "data.replay: {class_path: ...}, or pass replay=... to RLDataModule."
            )
        return replay

    @property
    def iterations_done(self) -> int:
        """Completed iterations of the run, with those before a resumption (unlike `batch_idx`)."""
        return int(self.trainer.global_step)

    # --- losses and optimizer steps ---

    @abstractmethod
    def configure_objectives(self) -> list[Objective]:
        """Return the losses, each made by `objective`."""

    def objective(
        self,
        loss: Loss,
        *modules: torch.nn.Module,
        name: str = "",
        prepare: Any = None,
        groups: list[dict[str, Any]] | None = None,
        learning_rate: float | None = None,
        max_grad_norm: float | None = None,
        optimizer: OptimizerFactory | None = None,
        forwarded_scalars: Sequence[str] = (),
        whole_minibatches: bool = False,
    ) -> Objective:
        """Return a loss with its own optimizer; arguments default to the algorithm's settings.

        Args:
            loss: takes a minibatch [B]; returns the loss and scalars to log. All of them must be
                means over samples, because micro-batches are averaged. A compiled loss is traced
                once: no Python decision may depend on the values of tensors.
            modules: modules to train. Default: the policy, unless `groups` is given.
            name: name of the objective, if there are several; empty for the main one.
            prepare: prepares a whole minibatch [B] before the loss, without gradients.
            groups: parameter groups of the optimizer; a group may have `lr_scale`, a factor of the
                learning rate.
            learning_rate: initial learning rate.
            max_grad_norm: bound on the norm of the gradient.
            optimizer: makes the optimizer.
            forwarded_scalars: names of logged scalars that later losses of `update_in_turn` read,
                each as a field [B] of the minibatch.
            whole_minibatches: do not split minibatches into micro-batches, because the loss needs
                all samples together, for example for batch statistics.

        Raises:
            ConfigurationError: if `whole_minibatches` is set and the policy has a
                `micro_batch_size`.
        """
        if modules:
            groups = [{"params": [p for m in modules for p in m.parameters() if p.requires_grad]}]
        limit = self.max_grad_norm if max_grad_norm is None else max_grad_norm
        rate = self.learning_rate if learning_rate is None else learning_rate
        return Objective(
            name=name,
            owner=self,
            loss=loss,
            prepare=prepare or torch.nn.Identity(),
            groups=self.policy.parameter_groups() if groups is None else groups,
            max_grad_norm=math.inf if limit is None else limit,
            schedule=self.schedule_from(rate),
            make_optimizer=optimizer or self.make_optimizer or _adam(rate, self.adam_eps),
            max_nonfinite_steps=self.max_nonfinite_steps,
            micro_batch_size=self._micro_batch_size(name, whole_minibatches),
            forwarded_scalars=forwarded_scalars,
        )

    def _micro_batch_size(self, name: str, whole_minibatches: bool) -> int | None:
        size: int | None = getattr(self.policy, "micro_batch_size", None)
        require(
            size is None or not whole_minibatches,
            f"The loss{f' {name!r}' if name else ''} of {type(self).__name__} needs whole "
            f"minibatches, and policy.micro_batch_size={size} would split them. Remove "
            "micro_batch_size, and lower batch_size if memory runs out.",
        )
        return WHOLE if whole_minibatches else size

    def schedule_from(self, learning_rate: float) -> LearningRateSchedule:
        """Return the learning rate schedule for an initial learning rate."""
        return LearningRateSchedule(self.lr_schedule, learning_rate)

    @cached_property
    def objectives(self) -> dict[str, Objective]:
        """The losses, by name."""
        objectives = {objective.name: objective for objective in self.configure_objectives()}
        for name, counts in self._earlier_counts.items():
            if name in objectives:
                objectives[name].statistics.load_state_dict(counts)
        return objectives

    @property
    def main_objective(self) -> Objective:
        """The objective without a name, wherever it is listed; if all have names, the first."""
        return self.objectives.get("") or next(iter(self.objectives.values()))

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run so far, over all objectives."""
        return sum(objective.statistics.applied for objective in self.objectives.values())

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped because a loss or gradient was not finite."""
        return sum(objective.statistics.skipped for objective in self.objectives.values())

    def attach_learner(self, learner: Learner) -> None:
        """Set the learner that takes the optimizer steps; `fit` calls this."""
        self._learner = learner
        self.updates = learner.updates
        # An earlier `fit` may have ended within an iteration.
        self.statistics = IterationScalars()
        for objective in self.objectives.values():
            objective.statistics.begin()
        # An algorithm that does not train has none.
        self.update = self.updates[self.main_objective.name] if self.updates else cast(Any, None)
        self._sequence_of = learner.sequence

    @property
    def learner(self) -> Learner:
        """The updates and compiled graphs of `fit`.

        Raises:
            RuntimeError: before `fit` starts.
        """
        if self._learner is None:
            raise RuntimeError(f"{type(self).__name__} has no optimizer before `fit` starts.")
        return self._learner

    def evaluate_values(
        self, rollout: TensorDict, value_of: Callable[[TensorDict], Tensor] | None = None
    ) -> None:
        """Write `value` [N, T+1], and `final_value` for steps that a time limit truncated.

        `value_of` returns values [B], instead of the policy.
        """
        # Not by a graph: it takes a fifth of compiling, for one pass per rollout.
        write_values(self.policy, rollout, value_of, value_of)

    def finish_iteration(self, rollout: TensorDict) -> None:
        """End an update with `rollout` [N, T+1]: update normalizers, policy version and metrics.

        Raises:
            FloatingPointError: after `max_nonfinite_steps` consecutive skipped steps.
        """
        reported = self.learner.finish_iteration(lambda: _named_sources(rollout, self.policy))
        if not self._run_state.observed:
            self._observe(rollout)
        self.policy.version += 1
        if self._run_state.policy_numbers is not None:
            self._run_state.policy_numbers.check()
        self.data.publish()
        self.env_steps += int(ranks.sum_over_ranks(torch.tensor(env_steps_in(rollout))))
        self.metrics = self._metrics_of_iteration(reported)
        # In manual optimization Lightning counts only the steps of its own optimizers.
        if self.learner.iterations is not None:
            self.learner.iterations.increment_ready()
            self.learner.iterations.increment_completed()

    def _observe(self, rollout: TensorDict) -> None:
        if type(self.policy).update_normalization is Policy.update_normalization:
            return
        # Leaving out padding copies the rollout, which is slow with pictures.
        steps = without_padding(rollout)
        if "padding" not in rollout.keys() or ranks.agree(steps.batch_size[1] > 0):
            self.policy.update_normalization(steps)
            if ranks.world_size() > 1 and self.policy.version == 0:
                check_statistics_of_ranks(self.policy)

    def _metrics_of_iteration(self, reported: list[dict[str, float]]) -> dict[str, float]:
        parts = [*reported, self.statistics.means(), self.learner.learning_rates()]
        steps = {"optimizer_steps": self.optimizer_steps, "skipped_steps": self.skipped_steps}
        parts.append({name: float(count) for name, count in steps.items()})
        metrics: dict[str, float] = {}
        for part in parts:
            for key, value in part.items():
                name = key if "/" in key else f"train/{key}"
                if name in metrics:
                    raise ConfigurationError(
                        f"Two values of an iteration have the chart name {name}: let a loss of "
                        f"{type(self).__name__} report '{key}' under another name."
                    )
                metrics[name] = value
        return metrics

    # --- Lightning's hooks of training ---

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value like Lightning; in means over an epoch each iteration counts once."""
        # Lightning would look for the number of samples in a rollout, or in a list of seeds.
        super().log(name, value, *args, **kwargs | {"batch_size": kwargs.get("batch_size") or 1})

    def configure_optimizers(self) -> list[Optimizer]:
        objectives = self.objectives.values()
        check_all_parameters_move(self, objectives)
        check_whole_minibatches(objectives)
        optimizers = [checked_optimizer(loss) for loss in objectives]
        for optimizer in optimizers:
            optimizer.register_load_state_dict_pre_hook(check_optimizer_state)
            optimizer.register_load_state_dict_pre_hook(with_own_settings)
        return optimizers

    def setup(self, stage: str) -> None:
        # `validate` and `test` load a checkpoint, too: only the call that loads it may resume.
        self._run_state.resumed = {}
        self.policy.set_precision(str(self.trainer.precision))
        if stage == "fit":
            check_run(self.trainer, self.policy)
            # Settings and frozen parameters may have changed since the last `fit`.
            self._earlier_counts = {
                name: objective.statistics.state_dict()
                for name, objective in self.__dict__.pop("objectives", {}).items()
            }

    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardingStrategy) and self.policy.sharding is None:
            strategy.shard(self.policy, self.compile_update)
            self.compile_update = False

    def on_fit_start(self) -> None:
        check_weights_are_numbers(self.policy)
        # The update has its own random stream; a checkpoint restores its state later.
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(self.data.seed_for("shuffle"))
        if self.policy.sharding is not None:
            self.policy.sharding.check(self, list(self.objectives.values()))
        self.attach_learner(
            Learner(
                self,
                self.objectives,
                self.trainer.optimizers,
                self.choose_compilation(),
                LightningHooks(self) if LightningHooks.overrides_minibatch_hooks(self) else None,
                phases_of(cast(Any, self.trainer).profiler),
                counter_of_steps(self.trainer),
                self.policy.sharding,
            )
        )

    def target_networks(self) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
        """Return pairs of a target network and its source network."""
        return []

    def checks(self, data: Any) -> Sequence[tuple[str, str, str, str]]:
        """Return findings of `rl-cli check` on this algorithm: (topic, level, text, cure) each."""
        return ()

    def choose_compilation(self) -> CompileDecision:
        """Decide whether to compile the update, by the settings and the checkpoint."""
        saved = self._run_state.resumed.get("computing")
        return CompileDecision(self.compile_update, self._minibatches(), saved, self._on_gpu)

    def choose_step_compilation(self) -> StepsCompileDecision:
        """Decide whether to compile the steps of a batched torch env."""
        steps = self.data.buffer_size * self._iterations_of_run()
        saved_decision = (self._run_state.resumed.get("computing") or {}).get("steps")
        self.step_compilation = StepsCompileDecision(
            self.compile_update, steps, saved_decision, self._on_gpu
        )
        return self.step_compilation

    @property
    def _on_gpu(self) -> bool:
        return self.trainer.strategy.root_device.type == "cuda"

    def _minibatches(self) -> int | None:
        each = self.minibatches_per_iteration()
        return None if each is None else each * self._iterations_of_run()

    def _iterations_of_run(self) -> int:
        trainer = self.trainer
        iterations = self.data.total_iterations
        if trainer.max_steps >= 0:  # max_steps counts iterations
            iterations = min(iterations, trainer.max_steps)
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            iterations = min(iterations, trainer.max_epochs * self.data.iterations_per_epoch)
        return iterations

    def minibatches_per_iteration(self) -> int | None:
        """Return the largest number of minibatches per update; None: unknown, do not compile."""
        return None

    def on_train_start(self) -> None:
        check_replay_is_used(self, self.data.replay)
        compilation = self.learner.compilation
        if not compilation.compiled:
            compilation.print_decision()  # a compiled update reports after its first graph
        self._run_state.start()

    def on_train_end(self) -> None:
        warn_of_unreached(self, {name: update.optimizer for name, update in self.updates.items()})

    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        check_time(batch)
        check_finite(batch)
        if self.policy.masks_actions:
            check_allowed(batch, self.policy.action_space)
        staleness, allowed = self.staleness(batch), self.data.max_staleness
        if staleness > allowed:
            raise RuntimeError(
                f"The rollout was collected {staleness} updates ago, but only {allowed} are "
                "allowed: the data loader must have a length and must not prefetch rollouts."
            )
        horizon = self.data.total_iterations * self.data.env_steps_per_iteration
        horizon *= ranks.world_size()
        self.learner.check_trained()
        self.learner.set_learning_rates(self.env_steps, horizon)
        self.policy.put_in_eval_mode()
        # A copy is made in training mode, in which dropout acts and a batch has statistics.
        for target, source in self.target_networks():
            if target.training != source.training:  # `train` visits every module
                target.train(source.training)
        # An iteration may be many passes over a dataset: without its statistics, the first one
        # would train on inputs that the policy never reads again.
        self._run_state.observed = not self.data.acted_by_policy and lacks_statistics(self.policy)
        if self._run_state.observed:
            self._observe(batch)
        if self.reward_normalizer is not None:
            self.reward_normalizer.observe_rollout(batch, self.gamma)

    def staleness(self, rollout: TensorDict) -> int:
        """Return the age of the oldest step of a rollout [N, T+1], in updates."""
        return int(self.policy.version - rollout["policy_version"][:, :-1].min())

    # --- checkpoints ---

    def rank_state(self) -> RankState:
        """Return the state of this rank for the checkpoint."""
        returns = {} if self.reward_normalizer is None else self.reward_normalizer.rank_state()
        streams = {"shuffle": self.generator.get_state(), "torch": torch.get_rng_state()}
        return streams | returns

    def load_rank_state(self, state: RankState | None) -> None:
        """Restore the state of this rank; None if the number of ranks has changed."""
        if self.reward_normalizer is not None:
            self.reward_normalizer.load_rank_state(state or {})
        if state is None:
            return
        shuffle, torch_stream = state["shuffle"], state["torch"]
        assert shuffle is not None
        assert torch_stream is not None
        restore_generator(self.generator, shuffle, "order of minibatches")
        torch.set_rng_state(torch_stream.cpu())

    def compilation_state(self) -> dict[str, Any] | None:
        """Return the decisions on compilation, for the checkpoint; None before `fit`."""
        if self._learner is None:
            return None
        return self._learner.compilation.state() | {"steps": self.step_compilation.state()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[STATE_KEY] = self._run_state.save()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._run_state.load(checkpoint)

    def after_warm_start(self) -> None:
        """Copy the policy that `trainer.init_from` has loaded into targets and references."""

    def warm_start(self, checkpoint: dict[str, Any]) -> None:
        """Load weights, normalizers and counters; random streams and episodes start fresh.

        Raises:
            ConfigurationError: if the checkpoint has another policy or algorithm, or weights that
                are not finite.
        """
        self.on_load_checkpoint(checkpoint)
        self.load_state_dict(checkpoint["state_dict"])
        check_weights_are_numbers(self.policy, "the checkpoint")
        self._run_state.resumed = {}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # Lightning's settings would unpickle it
        cls,
        checkpoint_path: str | Path,
        map_location: torch.device | str = "cpu",
        trust_code: bool = False,
        output_dir: str | Path = "outputs",
        **kwargs: Any,
    ) -> Self:
        """Rebuild the algorithm of a checkpoint with its policy, ready to act.

        Read the checkpoint as data, with the checks of `rl-cli`. Restore weights, normalizers and
        counters, but not the optimizer.

        Args:
            checkpoint_path: a file, a run directory (its last checkpoint), or `last` or `best` of
                the newest run.
            map_location: the device of all tensors.
            trust_code: import any class that the checkpoint names. Default: only classes of this
                package, `torch.optim` and `gymnasium`.
            output_dir: the folder of runs in which `last` and `best` are searched.
            kwargs: constructor arguments that replace the run's, such as `policy`.

        Raises:
            ConfigurationError: if the file cannot be read, has another class, names classes that
                are not trusted, or does not say how to make the policy.
        """
        path = find_checkpoint(str(checkpoint_path), output_dir)
        content = read_checkpoint(path)
        module: Self = SavedRun(path, content, trust_code).algorithm(cls, kwargs)
        module.warm_start(content)
        return module.to(map_location).eval()

    # --- evaluation ---

    def play(self, seeds: list[int], watchers: Sequence[Watcher] = ()) -> list[Episode]:
        """Play one episode per seed in the evaluation env; equal seeds give equal episodes."""
        return play(self.policy, self.data, seeds, watchers)

    def watch_next(self, watcher: Watcher) -> None:
        """Call `watcher` at each step of the next batch of evaluation episodes."""
        self._evaluation.watchers.append(watcher)

    def validation_step(self, seeds: list[int], batch_idx: int) -> None:
        if batch_idx == 0:
            self._evaluation.begin()
        self._evaluation.play_batch(self.play, self.policy.sharding, seeds)

    def on_validation_epoch_end(self) -> None:
        self.evaluation = self._evaluation.summary(self.data) | {"env_steps": self.env_steps}
        # For checkpoint monitors; `MetricsWriter` logs over env steps.
        self.log_dict(logged_values(self.evaluation), logger=False)

    def test_step(self, seeds: list[int], batch_idx: int) -> None:
        self.validation_step(seeds, batch_idx)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()


class IterationScalars:
    """One value per iteration and name, averaged over ranks and read in one transfer."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor | float] = {}

    def set(self, name: str, value: Tensor | float) -> None:
        """Set a scalar []."""
        self._values[name] = value

    def means(self) -> dict[str, float]:
        """Return the means over ranks without names that are NaN on all ranks, and clear them."""
        scalars, self._values = self._values, {}
        if not scalars:
            return {}
        device = next((v.device for v in scalars.values() if isinstance(v, Tensor)), None)
        values = torch.stack([torch.as_tensor(v, device=device).float() for v in scalars.values()])
        is_number = ~values.isnan()
        total, count = ranks.sum_over_ranks(torch.stack([values.where(is_number, 0.0), is_number]))
        means = zip(scalars, (total / count).tolist(), strict=True)
        return {name: mean for name, mean in means if not math.isnan(mean)}


def _named_sources(rollout: TensorDict, policy: Policy) -> dict[str, Tensor]:
    names = (
        "observation",
        "action",
        "reward",
        "sample_log_prob",
        "value",
        "final_value",
        "advantage",
        "return",
    )
    flat = rollout[:, :-1].select(*names, strict=False).flatten_keys(".")
    return dict(flat.items()) | {f"parameter {name}": p for name, p in policy.named_parameters()}


def _adam(learning_rate: float, eps: float) -> OptimizerFactory:
    return partial(torch.optim.Adam, lr=learning_rate, eps=eps, fused=True)
