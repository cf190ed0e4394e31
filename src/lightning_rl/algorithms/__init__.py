"""Algorithms: LightningModules that improve a policy."""

from lightning_rl.algorithms.base import Algorithm as Algorithm
from lightning_rl.algorithms.discrete_sac import DiscreteSAC as DiscreteSAC
from lightning_rl.algorithms.dqn import DQN as DQN
from lightning_rl.algorithms.grpo import GRPO as GRPO
from lightning_rl.algorithms.off_policy import OffPolicyAlgorithm as OffPolicyAlgorithm
from lightning_rl.algorithms.off_policy import QAlgorithm as QAlgorithm
from lightning_rl.algorithms.on_policy import OnPolicyAlgorithm as OnPolicyAlgorithm
from lightning_rl.algorithms.on_policy import RolloutAlgorithm as RolloutAlgorithm
from lightning_rl.algorithms.ppo import PPO as PPO
from lightning_rl.algorithms.sac import SAC as SAC
from lightning_rl.algorithms.td3 import TD3 as TD3
from lightning_rl.system.lazy import names_of

__getattr__ = names_of("lightning_rl")  # classes of extensions lay here in earlier versions
