"""Vision-language-action policies: a backbone, an action head and a value head."""

from lightning_rl.extensions.vla.backbone import Backbone as Backbone
from lightning_rl.extensions.vla.backbone import Features as Features
from lightning_rl.extensions.vla.custom import CustomVLA as CustomVLA
from lightning_rl.extensions.vla.encoder import BackboneEncoder as BackboneEncoder
from lightning_rl.extensions.vla.flow import FlowHead as FlowHead
from lightning_rl.extensions.vla.flow import FlowSettings as FlowSettings
from lightning_rl.extensions.vla.interface import VLAModelInterface as VLAModelInterface
from lightning_rl.extensions.vla.loading import load_vla_model as load_vla_model
from lightning_rl.extensions.vla.policy import ChunkPolicy as ChunkPolicy
from lightning_rl.extensions.vla.policy import VLAPolicy as VLAPolicy
from lightning_rl.extensions.vla.real_time import RealTime as RealTime
from lightning_rl.extensions.vla.tiny import PerceptronBackbone as PerceptronBackbone
from lightning_rl.extensions.vla.tiny import TinyVLA as TinyVLA
from lightning_rl.extensions.vla.transformers_backbone import (
    TransformersBackbone as TransformersBackbone,
)
