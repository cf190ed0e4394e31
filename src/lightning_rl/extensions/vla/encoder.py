"""Use a VLA's backbone as an encoder, such as for the value of recorded steps."""

from typing import Any, cast

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import layer_norm

from lightning_rl import Encoder
from lightning_rl.extend.errors import require
from lightning_rl.extensions.vla.backbone import Backbone
from lightning_rl.extensions.vla.policy import example


class BackboneEncoder(Encoder):
    """The summary and one slot of a backbone, normalized, as features of observations [B].

    A backbone's features have any scale, and would saturate a tanh layer that follows.

    Args:
        observation_space: a Dict of keys that the backbone reads.
        backbone: the backbone.

    Raises:
        ConfigurationError: for a space or key that the backbone cannot read.
    """

    def __init__(self, observation_space: gymnasium.Space[Any], backbone: Backbone) -> None:
        super().__init__(observation_space)
        observation = example(observation_space, backbone.needs_pictures)
        unread = sorted(set(cast(Any, observation).keys()) - set(backbone.reads))
        require(
            not unread,
            f"The observation has {', '.join(unread)}, which {type(backbone).__name__} does not "
            f"read; it reads {', '.join(backbone.reads)}. Select these keys by data.env.keys of "
            "ReturnFramesEnv, or by actor_keys of the policy.",
        )
        # One slot is enough for features.
        backbone.build(observation, 1)
        self.backbone = backbone
        self.size = backbone.summary_size + backbone.slot_size

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        features = self.backbone(observation)
        # In float32: the layers that follow are not in the dtype of the backbone.
        joined = torch.cat((features.summary, features.slots[:, 0]), -1).float()
        return layer_norm(joined, joined.shape[-1:])
