"""Algorithms: LightningModules that improve a policy."""

from lightning_rl.algorithms.base import Algorithm
from lightning_rl.algorithms.behavior_cloning import BehaviorCloning
from lightning_rl.algorithms.grpo import GRPO
from lightning_rl.algorithms.on_policy import OnPolicyAlgorithm
from lightning_rl.algorithms.ppo import PPO

__all__ = ["GRPO", "PPO", "Algorithm", "BehaviorCloning", "OnPolicyAlgorithm"]
