"""SAC for an arm, with a discrete critic for its gripper."""

import copy

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import SAC, QActorCritic
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.errors import check_range
from lightning_rl.extensions.algorithms.gripper import GripperActorCritic
from lightning_rl.functional import double_q_target
from lightning_rl.kwargs import GripperSACKwargs, Unpack


class GripperSAC(SAC):
    """SAC for an arm, and double Q-learning for the gripper at its end.

    Only the gripper's critic adds the field `penalty` to its rewards, such as the cost of opening
    and closing: see `PenaltyTerms`.

    Source: HIL-SERL (Luo et al. 2024, "Precise and Dexterous Robotic Manipulation via
    Human-in-the-Loop Reinforcement Learning", section III); for the gripper van Hasselt et al.
    2016, "Deep Reinforcement Learning with Double Q-learning".

    Args:
        policy: an arm's actor and critics, and a gripper's critic.
        gripper_learning_rate: learning rate of the gripper's critic. Default:
            `critic_learning_rate`.
        kwargs: see `SAC`; `target_entropy` is for the arm's actions.

    Raises:
        ConfigurationError: for a policy without a gripper.
    """

    policy: GripperActorCritic
    policy_kind: type[QActorCritic] = GripperActorCritic
    undelayed_objectives = ("critic", "gripper")

    def __init__(
        self,
        policy: GripperActorCritic,
        *,
        gripper_learning_rate: float | None = None,
        **kwargs: Unpack[GripperSACKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("gripper_learning_rate", gripper_learning_rate, above=0)
        rate = self.critic_learning_rate if gripper_learning_rate is None else gripper_learning_rate
        self.gripper_learning_rate = rate
        self.target_gripper = copy.deepcopy(policy.gripper).requires_grad_(False)

    def configure_objectives(self) -> list[Objective]:
        critic, *other_objectives = super().configure_objectives()
        rate = self.gripper_learning_rate
        gripper = self.objective(
            self.gripper_loss, self.policy.gripper, name="gripper", learning_rate=rate
        )
        return [critic, gripper, *other_objectives]

    def target_networks(self) -> list[tuple[nn.Module, nn.Module]]:
        return [*super().target_networks(), (self.target_gripper, self.policy.gripper)]

    def gripper_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the gripper's critic on samples [B], and scalars to log."""
        target, penalty = self.gripper_target(minibatch)
        command = self.policy.command_of(minibatch["action"])
        q = self.policy.gripper_values(minibatch).gather(-1, command[:, None]).squeeze(-1)
        loss = 0.5 * (q - target).square().mean()
        return loss, {"gripper_q": q.mean(), "gripper_penalty": penalty.mean()}

    @torch.no_grad()
    def gripper_target(self, minibatch: TensorDict) -> tuple[Tensor, Tensor]:
        """Return the target of the gripper's critic for samples [B], and the penalties in it."""
        next_td = TensorDict({"observation": minibatch["next_observation"]}, minibatch.batch_size)
        features, slow = self.policy.features_for_target(
            minibatch, next_td, (self.target_encoder, self.target_memory)
        )
        # The gripper reads the actor's features. With separate encoders, the actor's encoder has no
        # target network.
        slow = features if self.policy.critic_reads_apart else slow
        # The arm's critics see the reward without the penalty.
        reward = minibatch["reward"]
        penalty = minibatch.get("penalty", None)
        penalty = torch.zeros_like(reward) if penalty is None else penalty
        target = double_q_target(
            self.normalized_reward(reward + penalty),
            minibatch["discount"],
            self.policy.gripper_values(next_td, features=features),
            self.policy.gripper_values(next_td, self.target_gripper, slow),
        )
        return target, penalty
