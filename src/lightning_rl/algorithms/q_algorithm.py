"""Give an off-policy algorithm with Q critics what all of them share: how critics are fitted."""

import copy
from abc import abstractmethod
from typing import Any, NamedTuple, cast

from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algorithms.base import RankState
from lightning_rl.algorithms.off_policy import OffPolicyAlgorithm, check_q_policy, slow_copy
from lightning_rl.functional import (
    categorical_loss,
    categorical_target,
    ensemble_loss,
    least_of_subset,
    outputs_of_least,
    soft_target,
)
from lightning_rl.optim.update import Objective
from lightning_rl.policies.normalization import ReturnNormalizer
from lightning_rl.policies.q_actor_critic import QActorCritic
from lightning_rl.system import ranks
from lightning_rl.system.errors import check_range, require


class Following(NamedTuple):
    """What is done where a step has led, without gradients.

    Attributes:
        features: [B, D], what critics read there.
        action: [B, A], in [-1, 1].
        cost: [B], by which what comes is worth less: that of an action that is likely, in SAC.
    """

    features: Tensor
    action: Tensor
    cost: Tensor


class QAlgorithm(OffPolicyAlgorithm):
    """An algorithm with an actor beside Q critics, whose targets slow copies of them make.

    With `tau: null` there are no such copies: the critics make their own targets, in one pass of
    what was done and of what is done next (`QEnsemble.together`), which what is normalised over the
    minibatch needs.

    Args:
        policy: actor and critics.
        critic_learning_rate: of the critics. Default: `learning_rate`, which is the actor's.
        policy_delay: updates of the critics for each of the actor.
        normalize_reward: scale rewards by the running standard deviation of the discounted return,
            and so that the largest return fits between the atoms of categorical critics. A
            temperature is then in these units.
        kwargs: see `OffPolicyAlgorithm`.

    Raises:
        ConfigurationError: for a number out of range, a policy of another kind, and critics that
            are normalised over the minibatch beside target networks.
    """

    policy: QActorCritic
    policy_kind: type[QActorCritic]
    """Of the policies that it trains."""

    def __init__(
        self,
        policy: QActorCritic,
        critic_learning_rate: float | None = None,
        policy_delay: int = 1,
        normalize_reward: bool = False,
        **kwargs: Any,
    ) -> None:
        check_q_policy(type(self).__name__, policy, self.policy_kind)
        super().__init__(policy, **kwargs)
        check_range("critic_learning_rate", critic_learning_rate, above=0)
        check_range("policy_delay", policy_delay, least=1)
        self.critic_learning_rate = critic_learning_rate
        self.policy_delay = policy_delay
        critic = policy.critic
        self.target_critic = self.target_encoder = self.target_memory = None
        require(
            critic.normalization != "batch" or self.tau is None,
            "critic_normalization: batch is for critics that make their own targets, in one pass "
            f"of what was done and what is done next, and tau={self.tau} keeps target networks "
            "beside them: set model.tau: null (CrossQ), or critic_normalization: layer.",
        )
        if self.tau is not None:
            self.target_critic = copy.deepcopy(critic).requires_grad_(False)
            self.target_encoder = slow_copy(policy.encoder_of_critic)
            self.target_memory = slow_copy(policy.memory_of_critic)
        self.reward_normalizer = None
        if normalize_reward:
            limit = None if critic.atoms is None else float(critic.atoms[-1])
            self.reward_normalizer = ReturnNormalizer(limit)

    def scaled(self, reward: Tensor) -> Tensor:
        """Return rewards [B], or sums of them, as the critics are to see them."""
        normalizer = self.reward_normalizer
        return reward if normalizer is None else cast(Tensor, normalizer(reward))

    def keep(self, rollout: TensorDict) -> None:
        """Put a fresh rollout [N, T+1] into the replay, and learn what demonstrations there earn.

        See `ReturnNormalizer.observe_given`.
        """
        super().keep(rollout)
        if self.reward_normalizer is not None:
            given = self.replay.take_given_rewards()
            if given is not None:
                self.reward_normalizer.observe_given(*given, self.gamma)

    def critic_objective(self) -> Objective:
        """Return the objective of the critics, of whole minibatches where these normalise them."""
        return self.objective(
            self.critic_loss,
            *self.policy.critic_modules_to_train(),
            name="critic",
            learning_rate=self.critic_learning_rate,
            whole_minibatches=self.policy.critic.normalization == "batch",
        )

    @abstractmethod
    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the critics on samples [B], and scalars to report."""

    def fit_critics(
        self, minibatch: TensorDict, after: Following
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of critics of actions on samples [B], and scalars to report.

        Args:
            minibatch: [B].
            after: what is done where they have led.
        """
        critic, policy = self.policy.critic, self.policy
        action = policy.unit(minibatch["action"])
        features = policy.critic_features(minibatch)
        if self.target_critic is None:
            said, next_said = critic.together(features, action, after.features, after.action)
        else:
            said = critic.outputs(features, action)
            next_said = self.target_critic.outputs(after.features, after.action)
        next_said = next_said.detach()
        q, next_q = critic.mean(said), critic.mean(next_said)
        reward, discount = self.scaled(minibatch["reward"]), minibatch["discount"]
        subset = minibatch.get("target_critics", None)
        if critic.atoms is None:
            target = soft_target(
                reward, discount, least_of_subset(next_q, subset), after.cost, alpha=1.0
            )
            loss = ensemble_loss(q, target)
        else:
            probs = outputs_of_least(next_said, next_q, subset).softmax(-1)
            wanted = categorical_target(reward, discount, probs, after.cost, critic.atoms)
            loss, target = categorical_loss(said, wanted), wanted @ critic.atoms
        return loss, {"q": q.mean(), "q_target": target.mean()}

    def slow_copies(self) -> list[tuple[nn.Module, nn.Module]]:
        pairs = [
            (self.target_critic, self.policy.critic),
            (self.target_encoder, self.policy.encoder_of_critic),
            (self.target_memory, self.policy.memory_of_critic),
        ]
        return [(slow, fast) for slow, fast in pairs if slow is not None and fast is not None]

    # --- what Lightning and `Algorithm` ask for ---

    def setup(self, stage: str) -> None:
        """Check the settings against the data and the processes.

        Raises:
            ConfigurationError: where critics are normalised over the minibatches of several.
        """
        super().setup(stage)
        alone = ranks.world_size() == 1 or self.policy.critic.normalization != "batch"
        require(
            alone or stage != "fit",
            "critic_normalization: batch normalises over the minibatch of one process, and there "
            f"are {ranks.world_size()}: each would have other critics. Train in one process "
            "(trainer.devices: 1), or set critic_normalization: layer with tau: 0.005.",
        )

    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        """Take the rewards of a rollout [N, T+1] into the statistics that scale them."""
        super().on_train_batch_start(batch, batch_idx)
        if self.reward_normalizer is not None:
            self.reward_normalizer.observe_rollout(batch, self.gamma)

    def rank_state(self) -> RankState:
        """Return what this rank has of its own, the returns under way of its envs among it."""
        normalizer = self.reward_normalizer
        own: RankState = {} if normalizer is None else {"carry": normalizer.carry}
        return super().rank_state() | own

    def load_rank_state(self, state: RankState | None) -> None:
        """Take up what was this rank's."""
        super().load_rank_state(state)
        if self.reward_normalizer is not None:
            self.reward_normalizer.carry = None if state is None else state["carry"]
