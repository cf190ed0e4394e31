"""Policies: how to act, to value, and to re-evaluate stored actions."""

from lightning_rl.policies.actor_critic import ActorCritic as ActorCritic
from lightning_rl.policies.actor_critic import ActorOnly as ActorOnly
from lightning_rl.policies.base import Policy as Policy
from lightning_rl.policies.discrete_actor_critic import DiscreteActorCritic as DiscreteActorCritic
from lightning_rl.policies.networks.encoders import DictEncoder as DictEncoder
from lightning_rl.policies.networks.encoders import Encoder as Encoder
from lightning_rl.policies.networks.encoders import ImpalaCNN as ImpalaCNN
from lightning_rl.policies.networks.encoders import NatureCNN as NatureCNN
from lightning_rl.policies.networks.encoders import OneHot as OneHot
from lightning_rl.policies.networks.encoders import PerceptronEncoder as PerceptronEncoder
from lightning_rl.policies.networks.encoders import SpatialSoftmaxCNN as SpatialSoftmaxCNN
from lightning_rl.policies.networks.memory import GRU as GRU
from lightning_rl.policies.networks.memory import LSTM as LSTM
from lightning_rl.policies.networks.memory import Memory as Memory
from lightning_rl.policies.networks.q_networks import QEnsemble as QEnsemble
from lightning_rl.policies.networks.q_networks import ValueAtoms as ValueAtoms
from lightning_rl.policies.normalization import ObservationNormalizer as ObservationNormalizer
from lightning_rl.policies.normalization import RewardNormalizer as RewardNormalizer
from lightning_rl.policies.q_actor_critic import (
    DeterministicActorCritic as DeterministicActorCritic,
)
from lightning_rl.policies.q_actor_critic import QActorCritic as QActorCritic
from lightning_rl.policies.q_actor_critic import SquashedActorCritic as SquashedActorCritic
from lightning_rl.policies.q_policy import QPolicy as QPolicy
from lightning_rl.policies.slow import SlowPolicy as SlowPolicy
from lightning_rl.policies.wrapper import PolicyWrapper as PolicyWrapper
from lightning_rl.system.lazy import names_of

__getattr__ = names_of("lightning_rl")  # classes of extensions lay here in earlier versions
