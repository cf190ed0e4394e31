"""Q-learning with a flow that clones the data, from a dataset, then online: FQL and QC."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import QActorCritic, QAlgorithm
from lightning_rl.extend import ranks
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extensions.algorithms.flow_actor import FlowActorCritic
from lightning_rl.extensions.datasets.demonstrations import DatasetCollector, prepare_for_critics
from lightning_rl.extensions.datasets.mixed_replay import steps_of
from lightning_rl.functional import flow_matching_loss, interpolate
from lightning_rl.kwargs import FQLKwargs, QCKwargs, Unpack


class FlowQAlgorithm(QAlgorithm):
    """Base class of algorithms with a behaviour flow and critics of chunks of K actions.

        L_Q    = mean of (sum_k gamma^k r_k + gamma^K Q'(s_K, a') - Q_i(s, a_0 ... a_(K-1)))^2
        L_flow = mean of (v(s, x_t, t) - (e - a))^2,  x_t = (1 - t) a + t e, e standard normal

    t is uniform in [0, 1]. The policy chooses the chunk a' in s_K. A termination ends the sum, with
    Q' = 0. A chunk that a time limit, or the end of the stored steps, cuts trains the flow alone,
    by its executed actions: the critics would read actions that were not executed. Chunks begin at
    every step, and hold executed actions, a person's included.

    From a dataset: `data.collector: DatasetCollector`, of which the first iteration fills
    `data.replay`; each iteration counts the steps of the dataset, so `updates_per_env_step` is
    far below 1. Online: `trainer.init_from` continues from the checkpoint, with the dataset in a
    `MixedReplay`.

    Args:
        policy: flow, actor and critics.
        random_env_steps: see `OffPolicyAlgorithm`.
        kwargs: see `QAlgorithm`.

    Raises:
        ConfigurationError: for categorical critics, or fewer `n_steps` than actions in a chunk;
            and in `fit` for `ActionChunk`, or a replay that does not fit the dataset.
    """

    policy: FlowActorCritic
    policy_kind: type[QActorCritic] = FlowActorCritic
    trains_chunks = True
    needs_whole_minibatches = False
    """Whether the loss of the actor is no mean over samples."""

    def __init__(
        self, policy: FlowActorCritic, *, random_env_steps: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(policy, random_env_steps=random_env_steps, **kwargs)
        name, size = type(self).__name__, policy.chunk_size
        require(
            policy.critic.atoms is None,
            f"{name} weighs the squared errors of the critics: remove policy.value_atoms.",
        )
        require(
            self.n_steps == 1 or self.n_steps >= size,
            f"n_steps={self.n_steps} is below policy.chunk_size={size}: the critics value whole "
            "chunks. Remove n_steps; the default is chunk_size.",
        )
        self.n_steps = max(self.n_steps, size)

    def configure_objectives(self) -> list[Objective]:
        modules = self.policy.actor_modules()
        actor = self.objective(
            self.actor_loss,
            *modules,
            name="actor",
            whole_minibatches=self.needs_whole_minibatches,
        )
        return [self.critic_objective(), actor]

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        # Each rollout of a dataset is the whole dataset.
        if not isinstance(self.data.collector, DatasetCollector) or len(self.replay) == 0:
            self.add_to_replay(rollout)
        for minibatch in self.minibatches(rollout):
            with_actor = (self.updates_done + 1) % self.policy_delay == 0
            self.update_in_turn(minibatch, "critic", *(["actor"] if with_actor else []))
        self.finish_iteration(rollout)

    def add_to_replay(self, rollout: TensorDict) -> None:
        name = type(self).__name__
        require(
            "executed" not in rollout.keys(),
            f"{name} makes chunks itself: remove ActionChunk, and set policy.chunk_size.",
        )
        collector = self.data.collector
        if not isinstance(collector, DatasetCollector):
            super().add_to_replay(rollout)
            return
        require(
            len(rollout) == collector.count,
            f"{name} stores the dataset once, but a rollout has {len(rollout)} of its "
            f"{collector.count} episodes: remove data.collector.episodes_per_rollout.",
        )
        prepare_for_critics(rollout, collector, name)
        lengths = (~rollout["padding"][:, :-1]).sum(1).tolist()
        room, steps = getattr(self.replay, "capacity", None), sum(lengths)
        require(
            self.data.num_envs == 1 and (room is None or room >= steps),
            f"{name} stores the {steps} steps of the dataset one after the other: set "
            f"data.num_envs: 1, data.buffer_size: {steps} and data.replay.capacity: {steps}; "
            f"data.num_envs is {self.data.num_envs}, data.replay.capacity {room}.",
        )
        spaces = self.policy.observation_space, self.policy.action_space
        for row, length in enumerate(lengths):
            if length:
                self.replay.extend(steps_of(rollout, row, 0, length).to_rollout(*spaces))

    def minibatches(self, rollout: TensorDict) -> Iterator[TensorDict]:
        size = self.policy.chunk_size
        for batch in super().minibatches(rollout):
            for key in ("action", "executed"):
                batch.set(key, batch.get(key)[:, :size])
            # Not by `noise_fields`: for all minibatches of an iteration it would fill the memory.
            yield batch.update(self.minibatch_noise(len(batch)))

    def minibatch_noise(self, count: int) -> dict[str, Tensor]:
        """Return the random fields [count, ...] of a minibatch."""
        size = self.policy.distribution.size
        settings: dict[str, Any] = {"generator": self.generator, "device": self.device}
        return {
            "next_noise": torch.randn(count, self.next_noise_size, **settings),
            "flow_noise": torch.randn(count, size, **settings),
            "actor_noise": torch.randn(count, size, **settings),
            "flow_time": torch.rand(count, **settings),
        }

    @property
    def next_noise_size(self) -> int:
        """Numbers of noise for the policy's choice in the next state."""
        return self.policy.noise_size

    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        policy, critic = self.policy, self.policy.critic
        next_td = TensorDict({"observation": minibatch.get("next_observation")}, [len(minibatch)])
        with torch.no_grad():
            encoders = self.target_encoder, self.target_memory
            features, for_critics = policy.features_for_target(minibatch, next_td, encoders)
            action = policy.chosen_unit(next_td, features, minibatch["next_noise"])
        outputs, next_outputs = self.critic_outputs(minibatch, for_critics, action)
        next_q = policy.reduced(critic.mean(next_outputs))
        reward, discount = self.normalized_reward(minibatch["reward"]), minibatch["discount"]
        target = reward + discount * next_q
        # After a termination no action matters, so a chunk that it cuts has a value, too.
        is_valued = minibatch["executed"][:, -1] | (discount == 0)
        return critic.loss(torch.where(is_valued[:, None], outputs, target[:, None]), target, None)

    def flow_loss(self, minibatch: TensorDict, features: Tensor) -> Tensor:
        """Return the flow's loss [] on samples [B] with the actor's features [B, D]."""
        goal, noise = self.policy.unit(minibatch["action"]), minibatch["flow_noise"]
        time = minibatch["flow_time"]
        velocity = self.policy.velocity(features, interpolate(goal, noise, time), time)
        return chunk_flow_loss(velocity, goal, noise, minibatch["executed"])

    @abstractmethod
    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the flow and the actor on samples [B], and scalars to log."""


class FQL(FlowQAlgorithm):
    """Flow Q-learning: a one-step actor follows a behaviour flow, and maximizes the critics.

        L_actor = L_flow + mean of alpha (mu(s, e) - flow(s, e))^2 - lambda Q(s, clip(mu(s, e)))

    Q is the mean of the critics. mu acts, also in the targets. With chunks (`policy.chunk_size`
    above 1) this is QC-FQL. L_Q and L_flow: see `FlowQAlgorithm`.

    Source: Park, Li and Levine 2025, "Flow Q-Learning", equations 5 to 8, algorithm 1; Li, Zhou and
    Levine 2025, "Reinforcement Learning with Action Chunking" (QC-FQL). Differs from the papers:
    the critics take their step before the actor's loss; a chunk that a termination cuts trains the
    critics, too.

    Args:
        policy: flow, one-step actor and critics.
        alpha: weight of the distance between one-step actor and flow, in units of Q: the setting
            to tune for each task.
        normalize_q: let lambda be 1 over the mean of |Q| in the minibatch, instead of 1.
        kwargs: see `FlowQAlgorithm`.

    Raises:
        ConfigurationError: for a policy without a one-step actor.
    """

    def __init__(
        self,
        policy: FlowActorCritic,
        *,
        alpha: float = 10.0,
        normalize_q: bool = False,
        **kwargs: Unpack[FQLKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("alpha", alpha, minimum=0)
        require(
            policy.num_samples is None,
            f"FQL trains a one-step actor, but policy.num_samples={policy.num_samples} acts by "
            "samples of the flow: set policy.num_samples: null, or train with QC.",
        )
        self.alpha, self.normalize_q = alpha, normalize_q
        self.needs_whole_minibatches = normalize_q

    def setup(self, stage: str) -> None:
        super().setup(stage)
        require(
            not self.normalize_q or stage != "fit" or ranks.world_size() == 1,
            "normalize_q: true divides by a mean over the minibatch of one process, but there are "
            f"{ranks.world_size()} processes: set normalize_q: false, or trainer.devices: 1.",
        )

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        policy, noise = self.policy, minibatch["actor_noise"]
        features, for_critics = policy.features_for_actor(minibatch)
        flow_loss = self.flow_loss(minibatch, features)
        with torch.no_grad():
            goal = policy.flow_unit(features, noise)
        action = policy.one_step(features, noise)
        q = policy.q_values(minibatch, action.clamp(-1.0, 1.0), features=for_critics).mean(0)
        distance, q_loss = one_step_losses(action, goal, q, normalize_q=self.normalize_q)
        scalars = {"flow_loss": flow_loss, "distance": distance, "actor_q": q.mean()}
        return flow_loss + self.alpha * distance + q_loss, scalars


class QC(FlowQAlgorithm):
    """Q-chunking: act by the best of n samples of a behaviour flow, as the critics value them.

    The targets take the best of `target_samples` samples, chosen by the critics and valued by the
    target critics. With one sample, the policy is the clone of the data. L_Q and L_flow: see
    `FlowQAlgorithm`.

    Source: Li, Zhou and Levine 2025, "Reinforcement Learning with Action Chunking". Differs from
    the paper: as `FQL`; n may differ between acting and targets.

    Args:
        policy: flow and critics, with `num_samples`, n in acting.
        target_samples: n in targets, 32 in the paper; the start of a run prints their cost.
        kwargs: see `FlowQAlgorithm`.

    Raises:
        ConfigurationError: for a policy with a one-step actor.
    """

    def __init__(
        self, policy: FlowActorCritic, *, target_samples: int = 4, **kwargs: Unpack[QCKwargs]
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("target_samples", target_samples, minimum=1)
        require(
            policy.num_samples is not None,
            "QC acts by the best of several samples of the flow, but the policy has a one-step "
            "actor: set policy.num_samples: 32, or train with FQL.",
        )
        self.target_samples = target_samples

    @property
    def next_noise_size(self) -> int:
        return self.target_samples * self.policy.distribution.size

    def on_train_start(self) -> None:
        super().on_train_start()
        samples, steps = self.target_samples, self.policy.flow_steps
        rank_zero_info(
            f"QC passes {self.batch_size * samples * steps:,} inputs through the flow per update "
            f"(batch_size * target_samples={samples} * flow_steps={steps}), and "
            f"{self.policy.num_samples} * {steps} per env and step while acting."
        )

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        features, _ = self.policy.features_for_actor(minibatch)
        loss = self.flow_loss(minibatch, features)
        return loss, {"flow_loss": loss}


def chunk_flow_loss(velocity: Tensor, goal: Tensor, noise: Tensor, executed: Tensor) -> Tensor:
    """Return the flow-matching loss [] of chunks, a mean in which unexecuted actions are 0.

    Source: Li, Zhou and Levine 2025, "Reinforcement Learning with Action Chunking".

    Args:
        velocity: [B, K*A], of the flow.
        goal: [B, K*A], actions of the data.
        noise: [B, K*A], where the flow starts.
        executed: [B, K] bool.
    """
    losses = flow_matching_loss(velocity, goal, noise).unflatten(1, (executed.shape[1], -1))
    loss: Tensor = (losses * executed[..., None]).mean()
    return loss


def one_step_losses(
    action: Tensor, goal: Tensor, q: Tensor, *, normalize_q: bool
) -> tuple[Tensor, Tensor]:
    """Return the mean squared distance [] of actions to the flow's, and the loss [] of their Q.

    Source: Park, Li and Levine 2025, "Flow Q-Learning", equation 8, and the authors' code.

    Args:
        action: [B, K*A], of the one-step actor.
        goal: [B, K*A], of the flow from the same noise.
        q: [B], values of the actions.
        normalize_q: divide by the mean of |q|, without a gradient.
    """
    distance = (action - goal).square().mean()
    scale = q.detach().abs().mean().clamp(min=1e-8).reciprocal() if normalize_q else 1.0
    return distance, -(scale * q.mean())
