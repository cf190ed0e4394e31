"""Algorithms: LightningModules that improve a policy."""

from lightning_rl.algorithms.apg import APG as APG
from lightning_rl.algorithms.base import Algorithm as Algorithm
from lightning_rl.algorithms.behavior_cloning import BehaviorCloning as BehaviorCloning
from lightning_rl.algorithms.discrete_sac import DiscreteSAC as DiscreteSAC
from lightning_rl.algorithms.dqn import DQN as DQN
from lightning_rl.algorithms.gripper_sac import GripperSAC as GripperSAC
from lightning_rl.algorithms.grpo import GRPO as GRPO
from lightning_rl.algorithms.iql import AWAC as AWAC
from lightning_rl.algorithms.iql import IQL as IQL
from lightning_rl.algorithms.noise_sac import NoiseSAC as NoiseSAC
from lightning_rl.algorithms.off_policy import OffPolicyAlgorithm as OffPolicyAlgorithm
from lightning_rl.algorithms.on_policy import OnPolicyAlgorithm as OnPolicyAlgorithm
from lightning_rl.algorithms.ppo import PPO as PPO
from lightning_rl.algorithms.reward_classifier import RewardClassifier as RewardClassifier
from lightning_rl.algorithms.reward_classifier import (
    RewardClassifierWrapper as RewardClassifierWrapper,
)
from lightning_rl.algorithms.sac import SAC as SAC
from lightning_rl.algorithms.shac import SHAC as SHAC
from lightning_rl.algorithms.td3 import TD3 as TD3
from lightning_rl.algorithms.value_fit import ValueFit as ValueFit
