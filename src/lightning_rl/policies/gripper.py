"""Act with an arm, squashed to its bounds, and a gripper that a discrete critic commands."""

import math
from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.policies.base import noise_for
from lightning_rl.policies.distributions.base import widened
from lightning_rl.policies.networks.perceptron import Normalization, mlp
from lightning_rl.policies.networks.q_networks import refuse_batch
from lightning_rl.policies.q_actor_critic import SquashedActorCritic
from lightning_rl.rollout.structured_actions import StructuredActions
from lightning_rl.system.errors import require

CLOSE, STAY, OPEN = 0, 1, 2
"""The commands of a gripper, from the least to the greatest number of an action's last dimension.

This is the one convention of policies, demonstrations and replays: an env that has another one
turns it where it is adapted, as `PickCube` does.
"""

CLONING_TEMPERATURE = 0.1
"""By which the values of the commands are divided where they stand for log-probs, in units of Q."""


class GripperActorCritic(SquashedActorCritic):
    """A tanh-Gaussian actor for all dimensions of an action but the last, a gripper's command.

    That is close, stay or open, the least, middle and greatest number of the dimension; what lies
    between counts as the nearest of them. A critic of its own values the three, and the best one is
    acted on, also where the actor draws: the states that its draws lead to are what the gripper
    explores. Source: HIL-SERL (Luo et al. 2024, "Precise and Dexterous Robotic Manipulation via
    Human-in-the-Loop Reinforcement Learning", section III). The other critics are of the arm's
    dimensions alone, as there: for them the gripper is a part of the env.

    `sample_log_prob` is that of the arm. For cloning, `evaluate_actions` adds the log-prob of the
    command under a softmax of the values at a temperature of `CLONING_TEMPERATURE`, small enough
    that they stay in the range of rewards of 0 and 1.

    Args:
        observation_space: see `PerceptronPolicy`.
        action_space: of one env: a floating-point Box [A] with finite bounds, A at least 2.
        hidden_sizes: units of the actor's hidden layers.
        critic_normalization: of the hidden units of all critics: `none`, `layer` or `rms`.
        kwargs: see `SquashedActorCritic`. The gripper's critic has the same hidden layers as the
            others. It never uses `value_atoms`.

    Raises:
        ConfigurationError: for an unknown activation, or a space that the policy cannot take.
    """

    commands: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        critic_normalization: Normalization = "none",
        **kwargs: Any,
    ) -> None:
        refuse_batch(critic_normalization, "an arm with a gripper")
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
            "GripperActorCritic has no memory for what its gripper's critic would be fitted to: "
            "leave it out, or give the policy what there is to know.",
        )
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
        self.register_buffer("commands", commands, persistent=False)

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        features = self.actor_features(td)
        output = self.action_output(td, features)
        noise, state = noise_for(self, td, deterministic, generator), td.get("state", None)
        fields = self.distribution.sample(output, noise, state)
        command = self.commands[self.gripper_values(td, features=features).argmax(-1)]
        fields["action"] = torch.cat((fields["action"], command[:, None]), -1)
        for key, value in fields.items():
            td.set(key, value, inplace=True)
        return td

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        action = td.get("action")
        features = self.actor_features(td)
        fields = {key: td.get(key) for key in self.extra_fields} | {"action": action[..., :-1]}
        output = self.action_output(td, features)
        log_prob, entropy = self.distribution.log_prob_and_entropy(output, fields)
        values = self.gripper_values(td, features=features) / CLONING_TEMPERATURE
        taken = self.command_of(action)
        log_prob = log_prob + values.log_softmax(-1).gather(-1, taken[:, None]).squeeze(-1)
        value = self.value_of(self.critic_features(td, features))
        found = {"sample_log_prob": log_prob, "entropy": entropy, "value": value}
        return TensorDict(found, td.batch_size)

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        return super().fields_of(action[..., :-1])

    def unit(self, action: Tensor) -> Tensor:
        """Return the arm's part of actions [B, A] in units of its bounds, [-1, 1], as [B, A-1]."""
        return super().unit(action[..., :-1])

    def command_of(self, action: Tensor) -> Tensor:
        """Return the commands [B] in actions [B, A]: `CLOSE`, `STAY` or `OPEN`, the nearest one."""
        return (action[..., -1:] - self.commands.to(action.dtype)).abs().argmin(-1)

    def gripper_values(
        self, td: TensorDict, critic: torch.nn.Module | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return the values [B, 3] of the commands where `td` [B] was observed.

        The default critic is the policy's. `features` [B, D], the output of `actor_features`, are
        computed if they are not passed.
        """
        features = self.actor_features(td) if features is None else features
        return widened((critic or self.gripper)(features))


def _parts(space: gymnasium.Space[Any]) -> tuple[gymnasium.spaces.Box, Tensor]:
    """Return the space of the arm, and the three numbers of the gripper's commands.

    Raises:
        ConfigurationError: for a space that has no such parts.
    """
    fits = (
        isinstance(space, gymnasium.spaces.Box)
        and not isinstance(space, StructuredActions)
        and np.issubdtype(space.dtype, np.floating)
        and len(space.shape) == 1
        and space.shape[0] > 1
    )
    chunked = " A chunk of actions has no one command: leave ActionChunk out." * (
        isinstance(space, gymnasium.spaces.Box) and len(space.shape) > 1
    )
    require(
        fits,
        "An arm with a gripper takes a floating-point Box of one dimension, whose last entry is "
        f"the gripper's command and the others are the arm's; the action space is {space}."
        f"{chunked} Learn it with SAC and a SquashedActorCritic.",
    )
    box = cast(gymnasium.spaces.Box, space)
    low, high = (float(bound[-1]) for bound in (box.low, box.high))
    require(
        math.isfinite(low) and math.isfinite(high) and low < high,
        f"The last entry of the action space is a gripper's command, from the number that closes "
        f"it to the one that opens it, and has the bounds {low:g} and {high:g}. Give it finite "
        "bounds, low < high, by a wrapper (gymnasium.wrappers.TransformAction).",
    )
    arm = gymnasium.spaces.Box(box.low[:-1], box.high[:-1], dtype=cast(Any, box.dtype).type)
    return arm, torch.linspace(low, high, 3)
