"""The interface of a plain model for `CustomVLA`, and a small model with this interface."""

import math
from typing import Any

import gymnasium
from torch import Tensor, nn

from lightning_rl.extensions.vla.policy import example
from lightning_rl.extensions.vla.tiny import TinyVLA


class VLAModelInterface(nn.Module):
    """Methods of a plain model for `CustomVLA`: a base class, or a pattern for other classes.

    Only `forward` is required. `CustomVLA` calls the other methods only if a class overrides them.
    An observation is a tensor [B, *O], or a TensorDict [B] if the space is a Dict.
    """

    def forward(self, observation: Any) -> Tensor:
        """Return actions [B, A], or [B, K, A] in chunks: the mean of the distribution."""
        raise NotImplementedError

    def get_value(self, observation: Any) -> Tensor:
        """Return values [B, 1]; PPO and other algorithms with a critic need them."""
        raise NotImplementedError

    def evaluate_actions(self, observation: Any, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, [B] each, of actions [B, A] or [B, K, A].

        They must belong to the normal distribution around `forward` that draws the actions.
        Without this method `CustomVLA` computes them.
        """
        raise NotImplementedError


class TinyModel(VLAModelInterface):
    """An example of a plain model: `TinyVLA` with linear layers for the actions and the value.

    Args:
        observation_space, action_space: spaces of one env; actions are chunks.
    """

    reads = TinyVLA.reads

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> None:
        super().__init__()
        self.body = TinyVLA()
        # One slot for each number of a chunk.
        self.body.build(example(observation_space), math.prod(action_space.shape or ()))
        self.action_head = nn.Linear(self.body.slot_size, 1)
        self.value_head = nn.Linear(self.body.summary_size, 1)

    def forward(self, observation: Any) -> Tensor:
        return self.action_head(self.body(observation).slots).squeeze(-1)  # type: ignore[no-any-return]  # nn.Module

    def get_value(self, observation: Any) -> Tensor:
        return self.value_head(self.body(observation).summary)  # type: ignore[no-any-return]  # nn.Module


def has_method(model: nn.Module | type[nn.Module], name: str) -> bool:
    """Return whether a model, or its class, has a method of `VLAModelInterface` of its own."""
    method = getattr(model, name, None)
    # Each class inherits these names: only a method of its own counts.
    bases = (None, getattr(nn.Module, name, None), getattr(VLAModelInterface, name))
    return getattr(method, "__func__", method) not in bases
