"""Algorithms: LightningModules that improve a policy."""

from lightning_rl.algorithms.base import Algorithm
from lightning_rl.algorithms.behavior_cloning import BehaviorCloning
from lightning_rl.algorithms.discrete_sac import DiscreteSAC
from lightning_rl.algorithms.gripper_sac import GripperSAC
from lightning_rl.algorithms.grpo import GRPO
from lightning_rl.algorithms.off_policy import OffPolicyAlgorithm
from lightning_rl.algorithms.on_policy import OnPolicyAlgorithm
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.algorithms.reward_classifier import ClassifiedReward, RewardClassifier
from lightning_rl.algorithms.sac import SAC
from lightning_rl.algorithms.td3 import TD3

__all__ = [
    "GRPO",
    "PPO",
    "SAC",
    "TD3",
    "Algorithm",
    "BehaviorCloning",
    "ClassifiedReward",
    "DiscreteSAC",
    "GripperSAC",
    "OffPolicyAlgorithm",
    "OnPolicyAlgorithm",
    "RewardClassifier",
]
