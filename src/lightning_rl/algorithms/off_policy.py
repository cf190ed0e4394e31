"""Base classes of off-policy algorithms: replay, number of updates, target networks, critics."""

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algorithms.base import Algorithm
from lightning_rl.algorithms.checks import (
    check_first_update,
    check_random_actions,
    check_random_shift,
    check_replayed,
    check_sequences,
    tell_random_actions,
)
from lightning_rl.algorithms.sequence_sampler import SEQUENCE_LENGTH
from lightning_rl.checkpoints.format import STATE_KEY
from lightning_rl.collectors import EpisodeSettings
from lightning_rl.functional import shift_pictures
from lightning_rl.kwargs import OffPolicyAlgorithmKwargs, QAlgorithmKwargs, Unpack
from lightning_rl.optim.update import Objective
from lightning_rl.policies import Policy
from lightning_rl.policies.networks.encoders import picture_keys
from lightning_rl.policies.normalization import ReturnNormalizer
from lightning_rl.policies.q_actor_critic import QActorCritic
from lightning_rl.rollout.contract import check_time, env_steps_in
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, check_range, require


class OffPolicyAlgorithm(Algorithm):
    """An algorithm that stores rollouts in a replay buffer and trains on samples of it.

    A subclass writes `training_step` and its losses.

    Args:
        policy: the policy to train.
        batch_size: transitions per minibatch and process.
        gamma: discount per env step.
        n_steps: env steps of n-step returns; fewer at the end of an episode.
        tau: rate of the soft target update after each update, in (0, 1]; null for an algorithm
            without target networks.
        updates_per_env_step: updates per env step of all processes, after `learning_starts`; may be
            below 1. A resumed run may change it.
        publish_every_updates: updates after which an asynchronous collector gets new weights,
            besides at the end of each iteration.
        random_env_steps: env steps, over all processes, with uniformly random actions at the start
            of a run.
        learning_starts: env steps before the first update, at least a minibatch. Default:
            `random_env_steps`.
        max_grad_norm: bound on the gradient norm of each objective; null for none.
        random_shift: largest random shift of the pictures of a minibatch, in pixels, vertically and
            horizontally, drawn per picture (4 is usual); 0 for none.
        sequence_length: steps of truncated backpropagation through time, for a policy with a
            memory. A minibatch is `batch_size // sequence_length` sequences, at least one. Default:
            32.
        burn_in: steps before each sequence, without gradients, in which the policy recomputes its
            state from a stored state.
        kwargs: see `Algorithm`.

    Raises:
        ConfigurationError: for a number out of range.
    """

    adam_eps = 1e-8

    trains_chunks: bool = False
    """Whether minibatches are `Replay.chunks`; a policy's state then only holds planned actions."""

    def __init__(
        self,
        policy: Policy,
        *,
        batch_size: int = 256,
        gamma: float = 0.99,
        n_steps: int = 1,
        tau: float | None = 0.005,
        updates_per_env_step: float = 1.0,
        publish_every_updates: int = 10,
        random_env_steps: int = 5_000,
        learning_starts: int | None = None,
        max_grad_norm: float | None = None,
        random_shift: int = 0,
        sequence_length: int | None = None,
        burn_in: int = 0,
        **kwargs: Unpack[OffPolicyAlgorithmKwargs],
    ) -> None:
        super().__init__(policy, batch_size=batch_size, max_grad_norm=max_grad_norm, **kwargs)
        check_sequences(policy, sequence_length, burn_in)
        kind, policy_name = type(self).__name__, type(policy).__name__
        require(
            policy.evaluates_sequences or self.trains_chunks or not policy.is_recurrent,
            f"{kind} trains a memory on sequences, but {policy_name} has a state, but cannot "
            "evaluate sequences (see Policy.evaluates_sequences). Use policy.init_args.memory: "
            f"{{class_path: LSTM}}, or train it with PPO or GRPO.",
        )
        check_range("gamma", gamma, minimum=0, maximum=1)
        check_range("n_steps", n_steps, minimum=1)
        check_range("tau", tau, above=0, maximum=1)
        check_range("updates_per_env_step", updates_per_env_step, above=0, maximum=10_000)
        check_range("publish_every_updates", publish_every_updates, minimum=1)
        check_random_actions(policy, random_env_steps)
        check_range("learning_starts", learning_starts, minimum=0)
        self.gamma, self.n_steps, self.tau = gamma, n_steps, tau
        self.updates_per_env_step = updates_per_env_step
        self.publish_every_updates = publish_every_updates
        self.random_env_steps = random_env_steps
        steps = random_env_steps if learning_starts is None else learning_starts
        setting = "random_env_steps" if learning_starts is None else "learning_starts"
        self._first_update = f"model.{setting}={steps}"
        self.learning_starts = max(steps, batch_size)
        self.sequence_length = SEQUENCE_LENGTH if sequence_length is None else sequence_length
        self.burn_in = burn_in
        self.random_shift = random_shift
        self._pictures = picture_keys(policy.observation_space)
        check_random_shift(policy, random_shift, self._pictures)
        self.episode_settings = EpisodeSettings(random_env_steps=random_env_steps)
        self._counted_from: tuple[int, int] | None = None  # env steps, updates
        self._updates_before = 0  # in earlier iterations
        # This iteration's updates and optimizer steps before the last minibatch; None before
        # `minibatches` is called.
        self._last_drawn: tuple[int, float] | None = None

    # --- helpers of training_step ---

    def minibatches(self, rollout: TensorDict) -> Iterator[TensorDict]:
        """Yield the minibatches [B] that are due after a fresh rollout [N, T+1].

        Each has `observation`, `action`, `reward` and `discount` over up to `n_steps` steps,
        `next_observation`, the fields of `noise_fields`, and for a memory also the sequences.
        """
        self._last_drawn = self._last_drawn or (0, math.inf)
        count = self.updates_due(rollout)
        if count == 0:
            return
        if self.policy.evaluates_sequences:
            size = self.num_sequences * self.sequence_length
            batches = self.replay.sequences(
                count,
                self.num_sequences,
                self.sequence_length,
                burn_in=self.burn_in,
                n_steps=self.n_steps,
                gamma=self.gamma,
            )
        else:
            size = self.batch_size
            draw = self.replay.chunks if self.trains_chunks else self.replay.batches
            batches = draw(count, size, n_steps=self.n_steps, gamma=self.gamma)
        parts = {k: value.split(size) for k, value in self.noise_fields(count * size).items()}
        shifts = self._drawn_shifts(count)
        for i, batch in enumerate(batches):
            if i > 0 and i % self.publish_every_updates == 0:
                # Otherwise an asynchronous collector would act with old weights during the whole
                # iteration.
                self.data.publish()
            for key, drawn_parts in parts.items():
                batch.set(key, drawn_parts[i])
            for path, sides, shift in shifts:
                batch.set(path, shift_pictures(batch.get(path), shift[i], sides))
            self._last_drawn = self.updates_done - self._updates_before, self._steps()
            yield batch

    def add_to_replay(self, rollout: TensorDict) -> None:
        """Store a fresh rollout [N, T+1] in the replay; `state` only for a policy with a memory.

        Raises:
            ValueError: if the rollout is flattened.
        """
        check_time(rollout)
        rollout = self.policy.rollout_for_replay(rollout)
        keeps = self.policy.evaluates_sequences or "state" not in rollout.keys()
        self.replay.extend(rollout if keeps else rollout.exclude("state"))

    @property
    def num_sequences(self) -> int:
        """Sequences per minibatch, for a policy with a memory."""
        return max(1, self.batch_size // self.sequence_length)

    def _drawn_shifts(self, count: int) -> list[tuple[tuple[str, ...], tuple[int, int], Tensor]]:
        size = self.random_shift
        if size == 0:
            return []
        # Drawn before the update, by its generator: a compiled loss gets shifted pictures, and a
        # resumed run draws the same shifts.
        shape = count, self.batch_size, 2
        return [
            (
                (name, *path),
                (sides[0] + 1, sides[1] + 1),
                torch.randint(-size, size + 1, shape, generator=self.generator, device=self.device),
            )
            for path, sides in self._pictures.items()
            for name in ("observation", "next_observation")
        ]

    def noise_fields(self, count: int) -> dict[str, Tensor]:
        """Return random fields [count, ...] of samples by name, such as noise."""
        return {}

    def updates_due(self, rollout: TensorDict) -> int:
        """Return the number of updates that are due after a fresh rollout [N, T+1].

        It depends on env steps and updates only, not on the learner's speed or on interruptions.
        """
        fresh = int(ranks.sum_over_ranks(torch.tensor(env_steps_in(rollout))))
        steps = self.env_steps + fresh
        if steps < self.learning_starts or len(self.replay) < self._steps_of_one_sequence:
            return 0
        first_step, first_update = self._counted_from or (self.learning_starts, 0)
        # 0.1 * 3 is 0.30000000000000004: rounding must not lose an update.
        updates = first_update + math.floor((steps - first_step) * self.updates_per_env_step + 1e-9)
        return max(0, updates - self.updates_done)

    @property
    def _steps_of_one_sequence(self) -> int:
        return self.sequence_length * self.data.num_envs if self.policy.evaluates_sequences else 0

    @property
    def updates_done(self) -> int:
        """Number of updates of the run so far, including skipped ones.

        An update is a minibatch on which any objective has taken a step.
        """
        # Not the steps of one objective: each may have a delay, or train on other samples too.
        if self._last_drawn is None:  # an algorithm that draws its samples itself
            return self._updates_before + len(self.main_objective.statistics)
        earlier, steps = self._last_drawn
        return self._updates_before + earlier + (self._steps() > steps)

    def _steps(self) -> int:
        return sum(len(objective.statistics) for objective in self.objectives.values())

    def finish_iteration(self, rollout: TensorDict) -> None:
        updates = self.updates_done
        super().finish_iteration(rollout)
        self._updates_before, self._last_drawn = updates, None

    def update_in_turn(self, minibatch: TensorDict, *objectives: str) -> None:
        """Take a step on several objectives for a minibatch [B], in order; then move targets."""
        self._sequence_of(objectives, self.update_targets, self._moved)(minibatch)

    def _moved(self) -> list[nn.Parameter]:
        return [p for target, _ in self.target_networks() for p in target.parameters()]

    def update_targets(self) -> None:
        """Move each target network towards its source."""
        for target, source in self.target_networks():
            self.polyak_update(target, source)

    def after_warm_start(self) -> None:
        rank_zero_info(
            f"{type(self).__name__} starts with the policy of the checkpoint, and with copies of "
            "its critics as target networks; optimizers and all other parameters start fresh."
        )
        tell_random_actions(self)
        # Otherwise the first targets would come from untrained critics.
        for target, source in self.target_networks():
            target.load_state_dict(source.state_dict())

    def _observe(self, rollout: TensorDict) -> None:
        super()._observe(rollout)
        # Buffers are running statistics: copy them from the source.
        for target, source in self.target_networks():
            for slow, fast in zip(target.buffers(), source.buffers(), strict=True):
                slow.copy_(fast)

    @torch.no_grad()
    def polyak_update(self, target: nn.Module, source: nn.Module) -> None:
        """Move the parameters of a target network towards its source by the fraction `tau`.

        Source: Lillicrap et al. 2016, "Continuous Control with Deep Reinforcement Learning",
        algorithm 1.
        """
        tau = 1.0 if self.tau is None else self.tau
        for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
            # In place: a compiled graph reads this tensor.
            slow.lerp_(fast.detach(), tau)

    # --- hooks of Lightning and `Algorithm` ---

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[STATE_KEY]["updates"] = {
            "done": self._updates_before,
            "counted_from": self._counted_from,
            "per_env_step": self.updates_per_env_step,
            "learning_starts": self.learning_starts,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint[STATE_KEY].get("updates")
        if saved is None:
            return
        main = self.main_objective.statistics  # its steps were the updates of older checkpoints
        self._updates_before = saved.get("done", main.applied + main.skipped)
        self._last_drawn = None
        if self.updates_done == 0:
            return
        saved_rates = saved["per_env_step"], saved["learning_starts"]
        if saved_rates == (self.updates_per_env_step, self.learning_starts):
            counted = saved["counted_from"]  # None before the first update
            self._counted_from = None if counted is None else (int(counted[0]), int(counted[1]))
            return
        # Count a new rate from the checkpoint. Counting from the start of the run would cause a
        # burst of updates, or a long time without updates.
        self._counted_from = max(self.env_steps, self.learning_starts), self.updates_done
        if saved_rates[0] != self.updates_per_env_step:
            rank_zero_info(
                f"From env step {self.env_steps:,}, updates_per_env_step is "
                f"{self.updates_per_env_step:g}; it was {saved_rates[0]:g}."
            )

    def minibatches_per_iteration(self) -> int:
        steps = self.data.env_steps_per_iteration * ranks.world_size()
        return max(1, math.ceil(steps * self.updates_per_env_step))

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        moved = {id(parameter) for parameter in self._moved()}
        names = self.policy.named_parameters()
        self.policy.moved = frozenset(name for name, weight in names if id(weight) in moved)
        actions = self.data.num_envs * self.data.buffer_size  # a chunk takes several env steps
        steps_per_action = self.data.env_steps_per_iteration // actions
        minimum = self._steps_of_one_sequence * steps_per_action * ranks.world_size()
        self.learning_starts = max(self.learning_starts, minimum)
        check_first_update(self, self._first_update)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._last_drawn = None  # an earlier `fit` may have ended within an iteration
        check_replayed(self, self._steps_of_one_sequence)


_Module = TypeVar("_Module", bound=nn.Module)


def make_target_network(module: _Module | None) -> _Module | None:
    """Return a frozen copy of a module for targets; None without trainable parameters."""
    if module is None or not any(parameter.requires_grad for parameter in module.parameters()):
        return None
    return copy.deepcopy(module).requires_grad_(False)


def check_q_policy(algorithm: str, policy: Policy, kind: type[QActorCritic]) -> None:
    """Refuse a policy without the critics or the actor that an algorithm trains.

    Raises:
        ConfigurationError: if the policy is not a `kind`.
    """
    if not isinstance(policy, kind):
        raise ConfigurationError(
            f"{algorithm} trains an actor and Q critics, but {type(policy).__name__} is not a "
            f"{kind.__name__}: set model.policy: {{class_path: {kind.__name__}}}, or a subclass "
            "of it with networks of your own."
        )


class QAlgorithm(OffPolicyAlgorithm):
    """An algorithm with an actor and Q critics, and target critics that follow slowly.

    With `tau: null` there are no target critics: the critics evaluate current and next actions in
    one forward pass (`QEnsemble.joint_outputs`), as batch normalization needs.

    Args:
        policy: actor and critics.
        critic_learning_rate: learning rate of the critics. Default: `learning_rate`.
        policy_delay: updates of the critics per update of the actor.
        normalize_reward: divide rewards by the running standard deviation of the discounted return,
            or by more if the largest return exceeds the atoms of categorical critics. SAC's
            temperature has the same units.
        kwargs: see `OffPolicyAlgorithm`.

    Raises:
        ConfigurationError: for a number out of range, a policy of another kind, and
            batch-normalized critics together with target networks.
    """

    policy: QActorCritic
    policy_kind: type[QActorCritic]
    """The class of policies that the algorithm trains."""

    def __init__(
        self,
        policy: QActorCritic,
        *,
        critic_learning_rate: float | None = None,
        policy_delay: int = 1,
        normalize_reward: bool = False,
        **kwargs: Unpack[QAlgorithmKwargs],
    ) -> None:
        check_q_policy(type(self).__name__, policy, self.policy_kind)
        super().__init__(policy, **kwargs)
        check_range("critic_learning_rate", critic_learning_rate, above=0)
        check_range("policy_delay", policy_delay, minimum=1)
        self.critic_learning_rate = critic_learning_rate
        self.policy_delay = policy_delay
        critic = policy.critic
        self.target_critic = self.target_encoder = self.target_memory = None
        require(
            critic.normalization != "batch" or self.tau is None,
            "critic_normalization: batch needs critics without target networks, which evaluate "
            f"current and next actions in one pass, but tau={self.tau} uses target networks. Set "
            "model.tau: null (CrossQ), or critic_normalization: layer.",
        )
        if self.tau is not None:
            # Copies, not new networks: a target starts equal to its source.
            self.target_critic = copy.deepcopy(critic).requires_grad_(False)
            self.target_encoder = make_target_network(policy.encoder_of_critic)
            self.target_memory = make_target_network(policy.memory_of_critic)
        if normalize_reward:
            limit = None if critic.atoms is None else float(critic.atoms[-1])
            self.reward_normalizer = ReturnNormalizer(limit)

    def normalized_reward(self, reward: Tensor) -> Tensor:
        """Return rewards [B], or n-step sums of rewards, in the units of the critics."""
        normalizer = self.reward_normalizer
        return reward if normalizer is None else cast(Tensor, normalizer(reward))

    def add_to_replay(self, rollout: TensorDict) -> None:
        super().add_to_replay(rollout)
        # The replay may hold demonstrations: see `ReturnNormalizer.observe_offline`.
        if isinstance(self.reward_normalizer, ReturnNormalizer):
            if (largest := self.replay.largest_new_return(self.gamma)) is not None:
                self.reward_normalizer.raise_largest(largest)
            rewards = self.replay.take_offline_rewards()
            if rewards is not None:
                self.reward_normalizer.observe_offline(*rewards, self.gamma)

    def critic_objective(self) -> Objective:
        """Return the objective of the critics; batch normalization needs whole minibatches."""
        return self.objective(
            self.critic_loss,
            *self.policy.critic_modules_to_train(),
            name="critic",
            learning_rate=self.critic_learning_rate,
            whole_minibatches=self.policy.critic.normalization == "batch",
        )

    @abstractmethod
    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the critics on samples [B], and scalars to log."""

    def critic_outputs(
        self, minibatch: TensorDict, next_features: Tensor, next_action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [E, B, K] of the critics at samples [B] and at their next states.

        The outputs at the next states, by the target critics if there are any, have no gradients.

        Args:
            minibatch: [B].
            next_features: [B, D], which the critics read in the next states.
            next_action: [B, A], in [-1, 1].
        """
        critic, policy = self.policy.critic, self.policy
        action = policy.unit(minibatch["action"])
        features = policy.critic_features(minibatch)
        if self.target_critic is None:
            # Without target networks: one pass, so that batch statistics cover both sets.
            joined = critic.joint_outputs(features, action, next_features, next_action)
            outputs, next_outputs = joined
        else:
            outputs = critic.outputs(features, action)
            next_outputs = self.target_critic.outputs(next_features, next_action)
        return outputs, next_outputs.detach()

    def target_networks(self) -> list[tuple[nn.Module, nn.Module]]:
        # A network may be absent: a flat observation has no encoder, an MLP policy no memory.
        pairs = [
            (self.target_critic, self.policy.critic),
            (self.target_encoder, self.policy.encoder_of_critic),
            (self.target_memory, self.policy.memory_of_critic),
        ]
        return [(slow, fast) for slow, fast in pairs if slow is not None and fast is not None]

    # --- hooks of Lightning and `Algorithm` ---

    def setup(self, stage: str) -> None:
        super().setup(stage)
        alone = ranks.world_size() == 1 or self.policy.critic.normalization != "batch"
        require(
            alone or stage != "fit",
            "critic_normalization: batch normalises over the minibatch of one process, but there "
            f"are {ranks.world_size()} processes, whose critics would differ. Train in one process "
            "(trainer.devices: 1), or set critic_normalization: layer with tau: 0.005.",
        )
