"""Condition a policy on the quality of its actions: clone all steps, act as in good steps."""

from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError, PolicyWrapper
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import (
    ABSENT,
    GUIDANCE,
    RNG,
    PolicyFactory,
)
from lightning_rl.extend.rollout import FieldSpec
from lightning_rl.extensions.datasets.episode import CODES, CONDITION

Quality = Literal["absent", "good", "bad"]
"""Condition of a step."""


class ConditionedPolicy(PolicyWrapper):
    """A policy that reads how good its action must be: good, bad, or absent (no information).

    The inner policy reads two more numbers, (1, 0) for good, (0, 1) for bad and (0, 0) for absent:
    the last numbers of a flat Box, or the key `condition` [2] of a Dict. `BehaviorCloning` trains
    with the label of each step (`condition` of `DatasetCollector`). Acting and exports use the
    condition of the constructor.

    With a `guidance` other than 1, acting extrapolates from the output without condition to the
    conditioned output: velocities of a flow, logits of tokens and choices, means of Gaussians. This
    needs two passes of the network.

    Source: Physical Intelligence 2025, "pi*0.6: a VLA That Learns From Experience"; Ho and Salimans
    2022, "Classifier-Free Diffusion Guidance", equation 6 with 1 + w = guidance.

    Args:
        observation_space, action_space: spaces of one env.
        policy: makes the inner policy.
        condition: condition for acting; `absent` for a policy that was cloned without labels.
        guidance: factor of the extrapolation, at least 0; 1.5 to 2 is usual, 1 is none.

    Raises:
        ConfigurationError: for an observation space without room for the condition, an inner policy
            that ignores the condition or has a memory, and guidance of a policy that cannot use it.
    """

    training_settings = ("condition", "guidance")  # a refit starts from the weights of its base

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        policy: PolicyFactory,
        *,
        condition: Quality = "good",
        guidance: float = 1.0,
    ) -> None:
        check_range("guidance", guidance, minimum=0)
        inner = policy(conditioned(observation_space), action_space)
        super().__init__(inner)
        name = type(inner).__name__
        space = inner.acting_space
        # A policy with actor_keys or ignore_keys may drop the condition before its network.
        require(
            not isinstance(space, Dict) or CONDITION in space.spaces,
            f"{name} ignores the condition: it reads {', '.join(getattr(space, 'spaces', ()))}. "
            f"Add '{CONDITION}' to its actor_keys, or remove it from its ignore_keys.",
        )
        require(
            not inner.is_recurrent,
            f"ConditionedPolicy needs a policy without a memory, but {name} has a memory: remove "
            "it.",
        )
        require(
            guidance == 1 or inner.takes_guidance,
            f"guidance={guidance:g} needs a VLAPolicy, an ActorCritic or an ActorOnly, whose "
            f"outputs can be extrapolated; {name} cannot use it. Set guidance: 1.",
        )
        self._space = observation_space
        self.condition: Quality = condition
        self.guidance = float(guidance)

    @property
    def observation_space(self) -> gymnasium.Space[Any]:  # type: ignore[override]  # without the condition
        return self._space

    @property
    def acting_space(self) -> gymnasium.Space[Any]:
        inner_space = self.inner.acting_space
        if not isinstance(inner_space, Dict):
            return self._space
        return Dict({key: space for key, space in inner_space.items() if key != CONDITION})

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return {**self.inner.extra_fields, CONDITION: ((), torch.int64)}

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        codes = self._codes(td)
        result: TensorDict = self.inner(
            self._guided(td, codes), deterministic=deterministic, generator=generator
        )
        result = result.exclude(ABSENT, GUIDANCE).set("observation", td.get("observation"))
        return result.set(CONDITION, codes, inplace=True)  # into the rollout's storage

    def get_value(self, td: TensorDict) -> TensorDict:
        # The value is that of the policy that acts, so it sees the same condition.
        return td.set("value", self.inner.get_value(_with_condition(td, self._codes(td)))["value"])

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        # With guidance, because the log-prob must be that of the distribution that acted.
        return self.inner.evaluate_actions(self._guided(td, td[CONDITION]))

    def clone_loss(self, td: TensorDict) -> TensorDict:
        # Without guidance: each condition is cloned by itself, and only acting extrapolates.
        return self.inner.clone_loss(_with_condition(td, td[CONDITION]))

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        # Until the collector writes the labels of the steps.
        absent = torch.zeros(len(action), dtype=torch.int64, device=action.device)
        return {**self.inner.fields_of(action), CONDITION: absent}

    def update_normalization(self, rollout: TensorDict) -> None:
        self.inner.update_normalization(_with_condition(rollout, rollout[CONDITION]))

    def _codes(self, td: TensorDict) -> Tensor:
        code = CODES[self.condition]
        return torch.full(td.batch_size, code, dtype=torch.int64, device=self.version.device)

    def _guided(self, td: TensorDict, condition: Tensor) -> TensorDict:
        inner_td = _with_condition(td, condition)
        # The inner policy extrapolates from its output without condition to the one with it.
        if self.guidance != 1:
            absent = _with_condition(td, torch.zeros_like(condition))
            inner_td.set(ABSENT, absent.get("observation"))
            inner_td.set(GUIDANCE, torch.full_like(condition, self.guidance, dtype=torch.float32))
        return inner_td


def _with_condition(td: TensorDict, condition: Tensor) -> TensorDict:
    observation = td.get("observation")
    numbers = torch.stack((condition == CODES["good"], condition == CODES["bad"]), -1)
    if isinstance(observation, Tensor):
        observation = torch.cat((observation, numbers.to(observation)), -1)
    else:
        observation = observation.copy().set(CONDITION, numbers.float())
    return td.copy().set("observation", observation)


def conditioned(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return an observation space with the condition.

    Raises:
        ConfigurationError: the space is neither a Box [D] of floats nor a Dict without that key.
    """
    if isinstance(space, Dict) and CONDITION not in space.spaces:
        return Dict({**space.spaces, CONDITION: Box(0, 1, (2,), np.float32)})
    if isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        # The two numbers of the condition lie in [0, 1].
        low, high = np.append(space.low, (0, 0)), np.append(space.high, (1, 1))
        return Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
    raise ConfigurationError(
        "ConditionedPolicy adds two numbers to a flat Box of floats, or to a Dict without the key "
        f"'{CONDITION}', but the observation space is {space}: wrap the env in "
        "gymnasium.wrappers.FlattenObservation."
    )
