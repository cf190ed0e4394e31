"""Policies: how to act, to value, and to re-evaluate stored actions."""

from lightning_rl.policies.actor_critic import ActorCritic, ActorOnly
from lightning_rl.policies.base import Policy
from lightning_rl.policies.discrete_actor_critic import DiscreteActorCritic
from lightning_rl.policies.gripper import GripperActorCritic
from lightning_rl.policies.networks.encoders import (
    DictEncoder,
    Encoder,
    FrozenEncoder,
    ImpalaCNN,
    NatureCNN,
    OneHot,
    PerceptronEncoder,
    SpatialSoftmaxCNN,
)
from lightning_rl.policies.networks.memory import GRU, LSTM, Memory
from lightning_rl.policies.networks.q_networks import QEnsemble, ValueAtoms
from lightning_rl.policies.normalization import ObservationNormalizer, RewardNormalizer
from lightning_rl.policies.q_actor_critic import (
    DeterministicActorCritic,
    QActorCritic,
    SquashedActorCritic,
)
from lightning_rl.policies.slow import SlowPolicy
from lightning_rl.policies.vla import (
    Backbone,
    CustomVLA,
    TinyVLA,
    TransformersBackbone,
    VLAPolicy,
    load_vla_model,
)
from lightning_rl.policies.wrapper import PolicyWrapper

__all__ = [
    "GRU",
    "LSTM",
    "ActorCritic",
    "ActorOnly",
    "Backbone",
    "CustomVLA",
    "DeterministicActorCritic",
    "DictEncoder",
    "DiscreteActorCritic",
    "Encoder",
    "FrozenEncoder",
    "GripperActorCritic",
    "ImpalaCNN",
    "Memory",
    "NatureCNN",
    "ObservationNormalizer",
    "OneHot",
    "PerceptronEncoder",
    "Policy",
    "PolicyWrapper",
    "QActorCritic",
    "QEnsemble",
    "RewardNormalizer",
    "SlowPolicy",
    "SpatialSoftmaxCNN",
    "SquashedActorCritic",
    "TinyVLA",
    "TransformersBackbone",
    "VLAPolicy",
    "ValueAtoms",
    "load_vla_model",
]
