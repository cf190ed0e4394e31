"""Data module of a run: the envs, the collector, the replay, and the evaluation's seeds."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch.utils.data import IterableDataset

from lightning_rl.buffers import ReadInterrupted, Replay, ReplayFactory
from lightning_rl.buffers.replay_files import REPLAY_FOLDER
from lightning_rl.collectors import Collector, CollectorContext, EpisodeSettings, SyncCollector
from lightning_rl.collectors.evaluation import EpisodeSeeds
from lightning_rl.collectors.first_episodes import FirstEpisodes, epoch_iterations
from lightning_rl.compiled.choice import StepsCompileDecision
from lightning_rl.envs import VectorEnv
from lightning_rl.envs.events import Event
from lightning_rl.envs.factories import (
    EnvFactory,
    check_no_pauses,
    check_one_arm,
    checked_info_fields,
    env_factory,
    make_env,
    tell_first_levels,
)
from lightning_rl.envs.watch import EnvTimeoutError, EnvWatch
from lightning_rl.policies import Policy
from lightning_rl.rollout.contract import validate
from lightning_rl.system import ranks
from lightning_rl.system.construction import NamedSettings
from lightning_rl.system.errors import ConfigurationError, check_range, require
from lightning_rl.system.extensions import HOOKS, function_at
from lightning_rl.system.phases import phases_of
from lightning_rl.training.collected_states import CollectedStates

if TYPE_CHECKING:
    EnvLike = EnvFactory | str
else:
    # The command line resolves this annotation: it would take a string as the name of a class.
    EnvLike = EnvFactory


class CollectorFactory(Protocol):
    """Makes a collector; in YAML, the class and its own settings."""

    def __call__(self, context: CollectorContext, /) -> Collector:
        """Make the collector."""


class ActingAlgorithm(Protocol):
    """The part of the algorithm that the data module uses."""

    policy: Policy
    episode_settings: EpisodeSettings
    env_steps: int

    def choose_step_compilation(self) -> StepsCompileDecision: ...


MOST_ENVS = 2**20
"""Maximum of `num_envs`, because a larger number would fill the memory."""


TEST_SEEDS = 100_000
"""`test` begins so many seeds after `validate`, which never plays as many episodes."""


class RolloutDataset(IterableDataset[TensorDict]):
    """One rollout per training step, collected on demand.

    The dataset has a length, because Lightning prefetches one batch from a loader without a length:
    each rollout would then be one update too old.

    Attributes:
        collect_seconds: seconds that the last rollout took.
        on_interrupt: called if the collector was interrupted and has no rollout ready, before the
            iteration ends.
    """

    def __init__(self, collector: Collector, iterations_per_epoch: int) -> None:
        self.collector = collector
        self.iterations_per_epoch = iterations_per_epoch
        self.collect_seconds = 0.0
        self.on_interrupt: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self.iterations_per_epoch

    def __iter__(self) -> Iterator[TensorDict]:
        for _ in range(len(self)):
            start = time.perf_counter()
            try:
                rollout = self.collector.collect()
            except ReadInterrupted:
                self.on_interrupt()
                return
            validate(rollout)
            self.collect_seconds = time.perf_counter() - start
            yield rollout


def _most_actions(env: VectorEnv) -> int | None:
    """Return the most actions of an episode; None without a time limit."""
    limit = env.max_episode_steps
    # Rounded up: the last action may execute fewer env steps.
    return None if limit is None else -(-limit // env.steps_per_action)


def _check_ranges(
    num_envs: int, env_timeout_s: float | None, seed: int | None, eval_seed: int | None
) -> None:
    check_range("data.num_envs", num_envs, minimum=1, maximum=MOST_ENVS)
    check_range("data.env_timeout_s", env_timeout_s, above=0)
    check_range("data.seed", seed, minimum=0)
    check_range("data.eval_seed", eval_seed, minimum=0)


class RLDataModule(LightningDataModule, NamedSettings):
    """Own the envs, the collector and the replay, and pass rollouts to the trainer.

    Args:
        env: the training env: an env class, a `partial` or a function that makes it from
            `num_envs`; in Python also the id of a Gymnasium env or the name of a task. Required
            unless `offline`.
        num_envs: N, envs stepped in parallel by each process.
        buffer_size: T, steps per env in a rollout.
        total_env_steps: budget in env steps, over all processes: training stops after the iteration
            that reaches it.
        collector: the collector class and its settings.
        replay: the replay buffer of an off-policy algorithm.
        iterations_per_epoch: iterations (a rollout and its update) per epoch; each epoch ends with
            an evaluation and a checkpoint. Default: a twentieth of the budget.
        num_eval_episodes: episodes per evaluation, one per seed, divided among the processes.
        num_eval_envs: parallel evaluation envs per process, without effect on the result. Default:
            one per episode.
        eval_seed: seed of the first evaluation episode; `test` begins 100,000 seeds later. Default:
            10,000 + 1,000 times the run's seed, so that runs of other seeds play other episodes.
        eval_deterministic: evaluate with the mode of the policy's distribution. If false, each
            episode samples its actions from a generator seeded with its own seed, with one policy
            call per episode and step.
        eval_env: the evaluation env, in the forms of `env`. Default: the training env.
        max_eval_episode_steps: env steps after which an evaluation episode is truncated. Default:
            the env's time limit; if it has none, the steps per env in an epoch, at least 1,000.
        env_timeout_s: maximum seconds for creation, a reset or a step of the N envs, also in
            evaluations (see `EnvWatch`); null for no limit, if a person takes part.
        events: changes of the training envs' state by name, such as pushes or other physical
            parameters, for envs of terms, such as a `Task`; see `Event`.
        eval_events: the same for the evaluation envs. Default: none.
        extra_fields: entries of the info of each env step that rollouts and replays store, as
            float32: {name: shape}, such as {tip_speed: [], contact_force: [3]}. An algorithm reads
            them as `info/<name>`.
        random_first_episode_length: begin the first episode of each training env at a random step
            below the time limit, so that time-outs of the envs do not coincide.
        seed: seed of envs, sampling and shuffling. Default: the seed of `seed_everything`.
        offline: train on the dataset of the collector, `DatasetCollector`, alone. The env, if there
            is one, is only stepped in evaluations; without one there are none, and the dataset
            gives the spaces.

    Raises:
        ConfigurationError: if a number is out of range, or if the env rejects its settings.
    """

    collector: Collector | None = None
    dataset: RolloutDataset | None = None
    replay: Replay | None = None
    _eval_env: VectorEnv | None = None

    def __init__(
        self,
        env: EnvLike | None = None,
        num_envs: int = 8,
        *,
        buffer_size: int = 128,
        total_env_steps: int = 1_000_000,
        collector: CollectorFactory = SyncCollector,
        replay: ReplayFactory | None = None,
        iterations_per_epoch: int | None = None,
        num_eval_episodes: int = 10,
        num_eval_envs: int | None = None,
        eval_seed: int | None = None,
        eval_deterministic: bool = True,
        eval_env: EnvLike | None = None,
        max_eval_episode_steps: int | None = None,
        env_timeout_s: float | None = 300.0,
        seed: int | None = None,
        events: dict[str, Event | None] | None = None,
        eval_events: dict[str, Event | None] | None = None,
        extra_fields: dict[str, list[int]] | None = None,
        random_first_episode_length: bool = False,
        offline: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {
            "num_envs": num_envs,
            "buffer_size": buffer_size,
            "total_env_steps": total_env_steps,
            "iterations_per_epoch": iterations_per_epoch,
            "num_eval_episodes": num_eval_episodes,
            "num_eval_envs": num_eval_envs,
            "max_eval_episode_steps": max_eval_episode_steps,
        }.items():
            require(value is None or value >= 1, f"data.{name} must be at least 1, got {value}.")
        _check_ranges(num_envs, env_timeout_s, seed, eval_seed)
        self.num_envs, self.buffer_size = num_envs, buffer_size
        self.total_env_steps, self._iterations_per_epoch = total_env_steps, iterations_per_epoch
        self.num_eval_episodes, self.eval_deterministic = num_eval_episodes, eval_deterministic
        self.num_eval_envs = min(num_eval_envs or num_eval_episodes, num_eval_episodes)
        self.seed = torch.initial_seed() % 2**31 if seed is None else seed
        self.eval_seed = (10_000 + 1_000 * self.seed) % 2**31 if eval_seed is None else eval_seed
        self._max_eval_episode_steps = max_eval_episode_steps
        self.offline, self._random_first_episodes = offline, random_first_episode_length
        self._spaces = function_at(HOOKS["offline_env"])(collector) if offline else None
        require(env is not None or offline, "Missing setting: data.env, or data.offline: true.")
        self._make_env = env_factory(self._spaces if env is None else env, "data.env")
        other = None if eval_env is None else env_factory(eval_env, "data.eval_env")
        self._make_eval_env = other or self._make_env
        self._events, self._eval_events = events, eval_events
        self._extra_fields = checked_info_fields(extra_fields or {})
        self._make_collector, self._make_replay = collector, replay
        self.states = CollectedStates()
        self.calls = EnvWatch("the training", env_timeout_s, self._fail_collector)
        self.eval_calls = EnvWatch("the evaluation", env_timeout_s)
        self._env: VectorEnv | None = self.new_env()
        self._steps_per_action = self._env.steps_per_action
        self.max_episode_actions = _most_actions(self._env)
        self.observation_space = self._env.single_observation_space
        self.action_space = self._env.single_action_space

    def _fail_collector(self, error: Exception) -> bool:
        return self.collector is not None and self.collector.fail(error)

    @property
    def env_name(self) -> str:
        """Id or class of the training env, within its wrappers."""
        env: Any = self._env
        while hasattr(env, "env"):
            env = env.env
        return str(getattr(env, "id", type(env).__name__))

    @property
    def _make_training_env(self) -> Callable[[int], VectorEnv]:
        changes: Any = {
            "events": self._events,
            "extra_fields": self._extra_fields,
            "random_first_episodes": self._random_first_episodes,
        }
        # No lambda: a remote collector pickles it.
        return partial(make_env, self._make_env, setting="data.env", **changes)

    def new_env(self, calls: EnvWatch | None = None) -> VectorEnv:
        """Make another training env, timed by `calls`; the caller closes it."""
        # An offline run only reads the spaces of this env.
        num_envs = 1 if self.offline else self.num_envs
        return (calls or self.calls).make(self._make_training_env, num_envs)

    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments, with resolved seeds and with factories as envs."""
        other_env = self._make_eval_env is not self._make_env
        return {
            "env": self._make_env if self.has_env else None,
            "num_envs": self.num_envs,
            "buffer_size": self.buffer_size,
            "total_env_steps": self.total_env_steps,
            "collector": self._make_collector,
            "replay": self._make_replay,
            "iterations_per_epoch": self._iterations_per_epoch,
            "num_eval_episodes": self.num_eval_episodes,
            "num_eval_envs": self.num_eval_envs,
            "eval_seed": self.eval_seed,
            "eval_deterministic": self.eval_deterministic,
            "eval_env": self._make_eval_env if other_env else None,
            "max_eval_episode_steps": self._max_eval_episode_steps,
            "env_timeout_s": self.calls.timeout_s,
            "seed": self.seed,
            "events": self._events,
            "eval_events": self._eval_events,
            "extra_fields": {name: list(shape) for name, shape in self._extra_fields.items()},
            "random_first_episode_length": self._random_first_episodes,
            "offline": self.offline,
        }

    @property
    def has_env(self) -> bool:
        """Whether there is a training env, and not only the spaces of a dataset."""
        return self._make_env is not self._spaces

    def setup(self, stage: str) -> None:
        """Turn evaluations during training off if there is no env."""
        # Before Lightning reads the limit, to make the loader of the evaluation.
        if stage == "fit" and self._make_eval_env is self._spaces:
            cast(Any, self.trainer).limit_val_batches = 0

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            f"{cls.__name__} cannot be loaded from a checkpoint: create it, and pass the "
            "checkpoint to the trainer, trainer.fit(model, data, ckpt_path=...) or "
            "trainer.validate(...)."
        )

    @property
    def env_steps_per_iteration(self) -> int:
        """Env steps of this process per iteration: N * T * env steps per action."""
        return self.num_envs * self.buffer_size * self._steps_per_action

    @property
    def total_iterations(self) -> int:
        """Iterations until all processes reach the budget; the last one may exceed it."""
        return -(-self.total_env_steps // (self.env_steps_per_iteration * ranks.world_size()))

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations per epoch; the default depends on the number of processes."""
        of_all = self.env_steps_per_iteration * ranks.world_size()
        return self._iterations_per_epoch or epoch_iterations(self.total_env_steps, of_all)

    @property
    def max_eval_episode_steps(self) -> int:
        """Env steps after which an evaluation episode is truncated."""
        if self._max_eval_episode_steps is not None:
            return self._max_eval_episode_steps
        if self.eval_env.max_episode_steps is not None:
            # The env's own limit ends the episodes.
            return FirstEpisodes.MAX_STEPS
        return FirstEpisodes.endless_limit(
            num_envs=self.num_envs,
            buffer_size=self.buffer_size,
            total_env_steps=self.total_env_steps,
            iterations_per_epoch=self._iterations_per_epoch,
            steps_per_action=self._steps_per_action,
            processes=ranks.world_size(),
        )

    @property
    def max_staleness(self) -> int:
        """Largest lag of a rollout behind the learner at its update, in updates."""
        return self.collector.max_staleness if self.collector is not None else 0

    @property
    def may_drop_rollouts(self) -> bool:
        """Whether the collector may drop a rollout before its update."""
        return self.collector is not None and self.collector.may_drop_rollouts

    @property
    def reports_success(self) -> bool:
        """Whether the env reports the success of an episode."""
        return self.collector is not None and self.collector.reports_success

    @property
    def acted_by_policy(self) -> bool:
        """Whether the policy chooses the actions of the rollouts."""
        return self.collector is not None and self.collector.acted_by_policy

    @property
    def eval_env_reports_success(self) -> bool:
        """Whether the evaluation env is known to report success, from training on the same env."""
        return self.reports_success and self.evaluates_on_the_training_env

    @property
    def evaluates_on_the_training_env(self) -> bool:
        """Whether the evaluation uses the same kind of env as the training."""
        return self._make_eval_env is self._make_env

    def publish(self) -> None:
        """Tell the collector that the policy has new weights."""
        if self.collector is not None:
            self.collector.publish()

    @property
    def eval_env(self) -> VectorEnv:
        """The evaluation env, separate from the training env and created on first access.

        Raises:
            ConfigurationError: if its spaces differ from the training env's.
        """
        if self._eval_env is None:
            share = -(-self.num_eval_episodes // ranks.world_size())
            count = min(self.num_eval_envs, share)
            self._eval_env = self.eval_calls.make(
                lambda n: make_env(self._make_eval_env, n, "data.eval_env", self._eval_events),
                count,
            )
            self._eval_env.stop_interventions()  # evaluate the policy without interventions
            check_no_pauses(self._eval_env)
            for kind in ("observation", "action"):
                space = getattr(self, f"{kind}_space")
                other = getattr(self._eval_env, f"single_{kind}_space")
                require(
                    space == other,
                    f"The {kind} space of data.eval_env is {other}, but the policy was made for "
                    f"{space}, the space of data.env. Evaluate on an env with the same spaces.",
                )
        return self._eval_env

    def show_evaluation(self) -> None:
        """Play the evaluation's episodes one after another, in a window.

        Raises:
            ConfigurationError: if the env has no window.
        """
        self.num_eval_envs = 1
        env = self.eval_env
        with self.eval_calls("show"):
            env.show()

    def train_dataloader(self) -> RolloutDataset:
        assert self.trainer is not None
        # Not in `setup`: only now the policy is on its device, with the weights of a resumed run.
        learner = cast(ActingAlgorithm, self.trainer.lightning_module)
        # A second `fit`: `close` has ended the first env.
        if self._env is None:
            self._env = self.new_env()
        evaluates = self.trainer.limit_val_batches != 0 and self.evaluates_on_the_training_env
        # Refuse an unsuitable env before a collector is built around it.
        check_one_arm(self._env, evaluates)
        check_no_pauses(self._env)
        tell_first_levels(self._env, evaluates)
        self._check_first_episodes(learner)
        self.collector = self._make_collector(
            CollectorContext(
                *(self._env, learner.policy, self.buffer_size, self.seed_for("collector")),
                episode_settings=learner.episode_settings,
                phase=phases_of(cast(Any, self.trainer).profiler),
                calls=self.calls,
                make_env=partial(self._make_training_env, self.num_envs),
                compilation=learner.choose_step_compilation(),
                env_steps_before=learner.env_steps,
            )
        )
        if self._make_replay is not None:
            goals = self._env.goals
            self.replay = self._make_replay(
                self.observation_space,
                learner.policy.replay_action_space,
                self.num_envs,
                learner.policy.version.device,
                self.seed_for("replay"),
                directory=Path(getattr(self.trainer, "run_dir", self.trainer.default_root_dir)),
                **({} if goals is None else {"goals": goals}),
            )
            self.replay.check_rate(self._env.known_fps)
            if not getattr(self.trainer, "save_replay", True):
                rank_zero_warn(
                    "trainer.save_replay is false: checkpoints hold no replay. A resumed run "
                    "starts with an empty replay, and performance may drop until it is filled."
                )
        # Before the first rollout, and once the objects exist that take the states.
        restores_replay = getattr(self.trainer, "restore_replay", True)
        # Offline the first rollout, the whole dataset, fills the replay.
        is_resumed = learner.env_steps > 0 and not self.offline
        self.states.restore(self.collector, self.replay, restores_replay, is_resumed)
        if self.collector.in_background and cast(Any, self.trainer).enable_validation:
            _ = self.eval_env  # created now, to avoid a fork while the collector's thread runs
        self.dataset = RolloutDataset(self.collector, self.iterations_per_epoch)
        return self.dataset

    def _check_first_episodes(self, learner: ActingAlgorithm) -> None:
        name = type(learner).__name__
        cause = "data.offline: true" if self.offline else f"{name}, which resets at each rollout"
        resets = self.offline or learner.episode_settings.reset_every_rollout
        require(
            not (self._random_first_episodes and resets),
            f"data.random_first_episode_length has no effect with {cause}: remove it.",
        )

    def val_dataloader(self) -> EpisodeSeeds:
        return EpisodeSeeds(self.eval_seed, self.num_eval_episodes, self.num_eval_envs)

    def test_dataloader(self) -> EpisodeSeeds:
        first = self.eval_seed + TEST_SEEDS
        return EpisodeSeeds(first, self.num_eval_episodes, self.num_eval_envs)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        # Batches are already where the algorithm reads them.
        return batch

    def seed_for(self, purpose: str) -> int:
        """Derive a seed for one purpose and this rank."""
        # The bytes of the purpose, because `hash` differs between processes.
        entropy = [self.seed, *purpose.encode()]
        if ranks.rank() > 0:  # rank 0 uses the streams of a single-process run
            entropy += [256 + ranks.rank()]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0] % 2**31)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of collectors and, within `states.replay_saved_to`, of replays."""
        return self.states.state_dict(self.collector, self.replay)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.trainer is not None
        folder = Path(str(self.trainer.ckpt_path)).parent / REPLAY_FOLDER
        self.states.load_state_dict(state_dict, folder)

    def close(self) -> None:
        """Stop the collector and close the envs; may be called more than once."""
        if self.collector is not None:
            self.collector.close()
        for env, calls in ((self._env, self.calls), (self._eval_env, self.eval_calls)):
            # A lost env hangs: to close it would wait for ever.
            if env is not None and not calls.is_lost:
                try:
                    with calls("close"):
                        env.close()
                except EnvTimeoutError:
                    raise
                except Exception as error:  # the run is complete, or has an error of its own
                    rank_zero_warn(
                        f"{type(env).__name__} raised {type(error).__name__} in close: {error}. "
                        "Correct the env; the files of the run are whole."
                    )
            calls.close()
        self.collector, self.replay = None, None
        self._env, self._eval_env = None, None
        # What `validate`, `test` or a refused `fit` has loaded is not for the next run.
        self.states = CollectedStates()

    def teardown(self, stage: str) -> None:
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        self.close()
