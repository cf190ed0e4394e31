"""Vision-language-action policies: a backbone that sees and reads, and a head that acts."""

from lightning_rl.policies.vla.backbone import Backbone, Features
from lightning_rl.policies.vla.policy import VLAPolicy
from lightning_rl.policies.vla.tiny import TinyVLA

__all__ = ["Backbone", "Features", "TinyVLA", "VLAPolicy"]
