"""Fill a rollout with a policy's actions."""

from abc import ABC, abstractmethod
from functools import reduce
from typing import Any, NoReturn, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_rl.policies.precision import autocast
from lightning_rl.rollout.contract import FieldSpec, step_views
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.torch_private import version_of


class RolloutActor(ABC):
    """Fills the storage of a rollout with actions, slot by slot."""

    @abstractmethod
    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        """Load the current weights for slots from `start` on; here or later, draw noise."""

    @abstractmethod
    def act(self, t: int) -> None:
        """Write the action of slot `t`, chosen from its observation."""

    @abstractmethod
    def finish(self, start: int, stop: int) -> None:
        """Write the other fields of slots `start` to `stop` - 1, if `act` did not."""


class ActingPolicy(Protocol):
    """The part of `Policy` that actors use."""

    version: Tensor
    autocast_dtype: torch.dtype | None
    state_is_plan: bool

    @property
    def extra_fields(self) -> dict[str, FieldSpec]: ...

    def eval(self) -> Any: ...

    def __call__(self, td: TensorDict, /, *, generator: torch.Generator | None) -> Any: ...


class StepwiseActor(RolloutActor):
    """Calls the policy at each step: works for every policy, on every device.

    Args:
        policy: chooses the actions.
        rollout: batch shape [N, T+1], written in place.
    """

    def __init__(self, policy: ActingPolicy, rollout: TensorDict) -> None:
        self._policy = policy
        fields = ("action", "sample_log_prob", *policy.extra_fields)
        # No duplicates: extra_fields may contain the log-prob. `state` is read, not written.
        self._fields = tuple(key for key in dict.fromkeys(fields) if key != "state")
        steps = step_views(rollout)
        # Views of the storage, made once: to index a TensorDict at each step is slow.
        self._steps = [step.select("observation", *fields) for step in steps]
        self._slots = [[step.get(key) for key in self._fields] for step in steps]
        state = ["state", "terminated", "truncated"] if "state" in fields else []
        if policy.state_is_plan and "intervened" in rollout.keys():
            state.append("intervened")  # the person's actions were not planned
        self._states = [[step.get(key) for key in state] for step in steps]
        self._generator: torch.Generator | None = None
        self._precision = autocast(policy.version.device, policy.autocast_dtype)

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._policy.eval()
        self._generator = generator

    def act(self, t: int) -> None:
        """Call the policy, and copy its output.

        Raises:
            ConfigurationError: if a returned field is missing or has another shape or dtype.
        """
        if t > 0:
            # The policy wrote this state after the last step, which may have ended the episode.
            self._forget_ended(t)
        slots = self._slots[t]
        versions = [version_of(slot) for slot in slots]
        with self._precision:
            # Copy the container: the next call must not find entries that the policy sets.
            result = self._policy(self._steps[t].copy(), generator=self._generator)
        if not isinstance(result, TensorDictBase):
            raise ConfigurationError(
                f"{self._name}.forward returned {type(result).__name__}, not a TensorDict with "
                f"{', '.join(self._fields)}: return the given TensorDict."
            )
        for key, slot, version in zip(self._fields, slots, versions, strict=True):
            value = result.get(key, None)
            if value is slot:
                if version_of(slot) == version:  # the policy has not written it
                    self._refuse(key, None, slot)
            elif value is None or value.shape != slot.shape or value.dtype != slot.dtype:
                self._refuse(key, value, slot)
            else:
                # `copy_` would broadcast a wrong shape silently: the checks above come first.
                slot.copy_(value)
        if self._states[t]:
            slot, value = self._states[t + 1][0], result.get("next_state", None)
            if value is None or value.shape != slot.shape or value.dtype != slot.dtype:
                self._refuse("next_state", value, slot)
            slot.copy_(value)

    def finish(self, start: int, stop: int) -> None:
        # Slot `stop` begins the next rollout.
        self._forget_ended(stop)

    def _forget_ended(self, t: int) -> None:
        if self._states[t]:
            _, terminated, *ends = self._states[t - 1]
            state = self._states[t][0]
            done = reduce(torch.logical_or, ends, terminated)
            # [N, 1, ...]: `masked_fill_` broadcasts from the right.
            state.masked_fill_(done.view(-1, *[1] * (state.dim() - 1)), 0)

    @property
    def _name(self) -> str:
        return type(self._policy).__name__

    def _refuse(self, key: str, value: Any, slot: Tensor) -> NoReturn:
        spec = f"{slot.dtype} of shape {list(slot.shape)}"
        if value is None:
            message = f"{self._name}.forward returned no '{key}'; it must be {spec}"
        else:
            message = (
                f"{self._name}.forward returned '{key}' as {value.dtype} of shape "
                f"{list(value.shape)}; it must be {spec}"
            )
        origin = {
            "action": "as the action space declares",
            "sample_log_prob": "one number per env, unless extra_fields declares another shape",
            "next_state": "as extra_fields declares for 'state'",
        }.get(key, "as extra_fields says")
        rounded = isinstance(value, Tensor) and value.dtype == torch.bfloat16
        cure = " Convert it by .float(): bf16-mixed computes in bfloat16." if rounded else ""
        raise ConfigurationError(f"{message}, {origin}: td.set('{key}', ...), and return td.{cure}")
