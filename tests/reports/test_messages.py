"""Mistakes that users make, and the whole message that each ends in: what, which value, what is allowed, the cure.

All are made in one process, as a test of the command line does; a process of its own, which knows no class of other
tests.
"""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lightning_rl import GRPO, PPO, ActorCritic, RLTrainer
from lightning_rl.cli import quick_help
from lightning_rl.errors import ConfigurationError
from tests.commands import rl_cli
from tests.helpers import make_data

MODULE = '''
import gymnasium
from lightning_rl import Algorithm, Policy, VectorEnv

class HalfAlgorithm(Algorithm): pass
class HalfPolicy(Policy):
    def forward(self, td, deterministic=False, generator=None): ...
class HalfEnv(VectorEnv):
    def __init__(self, num_envs): ...
class Registered(gymnasium.Env): pass
class Unregistered(gymnasium.Env): pass
gymnasium.register("Mine-v0", Registered)
'''

OF_PPO = (
    "It has policy, gae_lambda, clip_coef, clip_value_loss, normalize_advantage, ent_coef, vf_coef, "
    "critic_warmup_iterations, lr_schedule, desired_kl, n_epochs, batch_size, gamma, normalize_reward, target_kl, "
    "off_policy_correction, behavior_weight_cap, sequence_length, burn_in, learning_rate, max_grad_norm, optimizer, "
    "max_nonfinite_steps, compile."
)
POLICIES = (
    "ActorCritic, ActorOnly, CustomVLA, DeterministicActorCritic, DiscreteActorCritic, GripperActorCritic, "
    "SlowPolicy, SquashedActorCritic, VLAPolicy"
)
ALGORITHMS = "BehaviorCloning, DiscreteSAC, GRPO, GripperSAC, PPO, RewardClassifier, SAC, TD3"
OF_SB3 = "is of Stable-Baselines3; here it is"

TYPED = {
}
"""What was typed, or stands in a config, and is not there: exit code 2."""

REFUSED = {
}
"""Values that are out of range, or do not go together: exit code 1."""
