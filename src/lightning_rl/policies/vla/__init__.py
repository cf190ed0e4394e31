"""Vision-language-action policies: a backbone that sees and reads, and a head that acts."""

from lightning_rl.policies.vla.backbone import Backbone, Features
from lightning_rl.policies.vla.custom import CustomVLA
from lightning_rl.policies.vla.loading import load_vla_model
from lightning_rl.policies.vla.policy import VLAPolicy
from lightning_rl.policies.vla.tiny import TinyVLA
from lightning_rl.policies.vla.transformers_backbone import TransformersBackbone

__all__ = [
    "Backbone",
    "CustomVLA",
    "Features",
    "TinyVLA",
    "TransformersBackbone",
    "VLAPolicy",
    "load_vla_model",
]
