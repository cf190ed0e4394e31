"""A policy with a tanh-Gaussian arm, and a gripper with a discrete critic."""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import SquashedActorCritic
from lightning_rl.extend.errors import require
from lightning_rl.extend.policies import RNG, mlp, noise_for, widened
from lightning_rl.extend.spaces import StructuredActions
from lightning_rl.kwargs import GripperActorCriticKwargs, Unpack

CLOSE, STAY, OPEN = 0, 1, 2
"""Commands of a gripper: minimum, middle and maximum of the last action dimension.

An env with another convention converts the action in its adapter, as `PickCube` does.
"""

CLONING_TEMPERATURE = 0.1
"""Temperature, in units of Q, that turns the commands' values into log-probs."""


class GripperActorCritic(SquashedActorCritic):
    """A tanh-Gaussian actor for an arm, and a discrete critic for a gripper command.

    The command, close, stay or open, is the last action dimension: minimum, middle or maximum. The
    gripper's critic values the three commands, and the policy always takes the best one; only the
    arm's noise explores. The other critics read the arm's action only. Source: HIL-SERL (Luo et al.
    2024, section III).

    `sample_log_prob` covers the arm only. For cloning, `evaluate_actions` adds the log-prob of the
    command under a softmax of its values with `CLONING_TEMPERATURE`.

    Args:
        action_space: action space of one env: a floating-point Box [A] with finite bounds, A at
            least 2.
        hidden_sizes: units of the actor's hidden layers.
        critic_normalization: normalization of the hidden units of all critics: `none`, `layer` or
            `rms`.
        kwargs: see `SquashedActorCritic`; the gripper's critic ignores `value_atoms`.

    Raises:
        ConfigurationError: for an unknown activation, or an unsupported space.
    """

    commands: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        critic_normalization: Literal["none", "layer", "rms"] = "none",
        **kwargs: Unpack[GripperActorCriticKwargs],
    ) -> None:
        require(
            critic_normalization in ("none", "layer", "rms"),
            "critic_normalization: an arm with a gripper cannot use batch; set none, layer or rms.",
        )
        arm, commands = _parts(action_space)
        super().__init__(
            observation_space,
            arm,
            hidden_sizes,
            critic_normalization=critic_normalization,
            **kwargs,
        )
        require(
            self.memory is None,
            "GripperActorCritic does not support a memory, because its gripper's critic has none: "
            "remove the memory, or add the missing information to the observation.",
        )
        # The constructor made actor and critics for the arm alone.
        self.action_space = action_space
        self.gripper = mlp(
            self.features_size,
            self._critic_hidden_sizes,
            len(commands),
            activation=self._critic_activation,
            normalization=critic_normalization,
            network=self._network,
            initialization=self._initialization,
        )
        # Not saved, because it follows from the action space.
        self.register_buffer("commands", commands, persistent=False)

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        features = self.actor_features(td)
        output = self.action_output(td, features)
        noise, state = noise_for(self, td, deterministic, generator), td.get("state", None)
        fields = self.distribution.sample(output, noise, state)
        command = self.commands[self.gripper_values(td, features=features).argmax(-1)]
        fields["action"] = torch.cat((fields["action"], command[:, None]), -1)
        # In place, because `td` may be a view of a slot of the rollout.
        for key, value in fields.items():
            td.set(key, value, inplace=True)
        return td

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        action = td.get("action")
        features = self.actor_features(td)
        # The distribution covers the arm, without the command at the end.
        fields = {key: td.get(key) for key in self.extra_fields} | {"action": action[..., :-1]}
        output = self.action_output(td, features)
        log_prob, entropy = self.distribution.log_prob_and_entropy(output, fields)
        # The best command has no density: a softmax of the values makes cloning possible.
        values = self.gripper_values(td, features=features) / CLONING_TEMPERATURE
        command = self.command_of(action)
        log_prob = log_prob + values.log_softmax(-1).gather(-1, command[:, None]).squeeze(-1)
        value = self.value_of(self.critic_features(td, features))
        outputs = {"sample_log_prob": log_prob, "entropy": entropy, "value": value}
        return TensorDict(outputs, td.batch_size)

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        return super().fields_of(action[..., :-1])

    def unit(self, action: Tensor) -> Tensor:
        return super().unit(action[..., :-1])

    def command_of(self, action: Tensor) -> Tensor:
        """Return the nearest commands [B] of actions [B, A]: `CLOSE`, `STAY` or `OPEN`."""
        return (action[..., -1:] - self.commands.to(action.dtype)).abs().argmin(-1)

    def gripper_values(
        self, td: TensorDict, critic: torch.nn.Module | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return the values [B, 3] of the commands for `td` [B] or its `actor_features` [B, D]."""
        features = self.actor_features(td) if features is None else features
        return widened((critic or self.gripper)(features))


def _parts(space: gymnasium.Space[Any]) -> tuple[gymnasium.spaces.Box, Tensor]:
    # A structured action is a Box, too, but its entries have meanings of their own.
    fits = (
        isinstance(space, gymnasium.spaces.Box)
        and not isinstance(space, StructuredActions)
        and np.issubdtype(space.dtype, np.floating)
        and len(space.shape) == 1
        and space.shape[0] > 1
    )
    chunked = " A chunk of actions has several commands: remove ActionChunk." * (
        isinstance(space, gymnasium.spaces.Box) and len(space.shape) > 1
    )
    require(
        fits,
        "GripperActorCritic needs a floating-point Box of one dimension, whose last entry moves "
        f"the gripper and whose other entries move the arm; the action space is {space}.{chunked} "
        "Learn it with SAC and a SquashedActorCritic.",
    )
    box = cast(gymnasium.spaces.Box, space)
    low, high = (float(bound[-1]) for bound in (box.low, box.high))
    require(
        math.isfinite(low) and math.isfinite(high) and low < high,
        "The last entry of the action space is the command of the gripper, from closed to open, "
        f"with the bounds {low:g} and {high:g}. Give it finite bounds, low < high, by a wrapper "
        "(gymnasium.wrappers.TransformAction).",
    )
    arm = gymnasium.spaces.Box(box.low[:-1], box.high[:-1], dtype=cast(Any, box.dtype).type)
    return arm, torch.linspace(low, high, 3)
