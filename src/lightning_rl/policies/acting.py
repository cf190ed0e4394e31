"""Act through a rollout: one action per env step, the rest of the rollout's fields in one pass."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_rl.errors import ConfigurationError
from lightning_rl.policies.precision import autocast
from lightning_rl.rollout import step_views

if TYPE_CHECKING:
    from lightning_rl.policies.base import Policy


class RolloutActor(ABC):
    """Acts on the storage of a rollout, slot by slot.

    A policy chooses the kind (`Policy.rollout_actor`), by what is fastest for it.
    """

    @abstractmethod
    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        """Take up the policy's weights as they are now, for slot `start` and those that follow.

        Their noise is drawn from `generator`, here or as they come.
        """

    @abstractmethod
    def act(self, t: int) -> None:
        """Write the action of slot `t`, from its observation."""

    @abstractmethod
    def finish(self, start: int, stop: int) -> None:
        """Write what the policy stores beside the actions, where `act` has not.

        For slots `start` to `stop` - 1, which were acted on with the present weights.
        """


class StepwiseActor(RolloutActor):
    """Calls the policy at each step: works for every policy, on every device.

    What counts is what `Policy.forward` returns, however it came about: written into the TensorDict
    that it was given, set or put in another. It is copied to where the rollout wants it.

    Args:
        policy: acts.
        rollout: batch shape [N, T+1], written in place.
    """

    def __init__(self, policy: "Policy", rollout: TensorDict) -> None:
        self._policy = policy
        fields = ("action", "sample_log_prob", *policy.extra_fields)
        self._fields = tuple(dict.fromkeys(fields))  # extra_fields may give the log-prob a shape
        steps = step_views(rollout)
        self._steps = [step.select("observation", *self._fields) for step in steps]
        self._slots = [[step.get(key) for key in self._fields] for step in steps]
        self._generator: torch.Generator | None = None
        self._precision = autocast(policy.version.device, policy.autocast_dtype)

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        """See `RolloutActor.begin`."""
        self._policy.eval()
        self._generator = generator

    def act(self, t: int) -> None:
        """See `RolloutActor.act`.

        Raises:
            ConfigurationError: where the policy does not return a field, or one of another shape or
                dtype.
        """
        slots = self._slots[t]
        before = [slot._version for slot in slots]
        with self._precision:
            # A copy of the container: what is set in it must not be found there at the next call.
            result = self._policy(self._steps[t].copy(), generator=self._generator)
        if not isinstance(result, TensorDictBase):
            raise ConfigurationError(
                f"{self._name}.forward returned {type(result).__name__}, not a TensorDict with "
                f"{', '.join(self._fields)}: return the one that it was given."
            )
        for key, slot, version in zip(self._fields, slots, before, strict=True):
            value = result.get(key, None)
            if value is slot:
                if slot._version == version:  # where it lay before, and nobody has written it
                    self._refuse(key, None, slot)
            elif value is None or value.shape != slot.shape or value.dtype != slot.dtype:
                self._refuse(key, value, slot)
            else:
                slot.copy_(value)

    def finish(self, start: int, stop: int) -> None:
        """See `RolloutActor.finish`: nothing is left to write."""

    @property
    def _name(self) -> str:
        return type(self._policy).__name__

    def _refuse(self, key: str, value: Any, slot: Tensor) -> NoReturn:
        """Say what of a policy's output is not as announced."""
        wanted = f"{slot.dtype} of shape {list(slot.shape)}"
        if value is None:
            told = f"{self._name}.forward returned no '{key}'; it must be {wanted}"
        else:
            told = (
                f"{self._name}.forward returned '{key}' as {value.dtype} of shape "
                f"{list(value.shape)}; it must be {wanted}"
            )
        origin = {
            "action": "as the action space says",
            "sample_log_prob": "one number per env, unless extra_fields says otherwise",
        }.get(key, "as extra_fields says")
        raise ConfigurationError(f"{told}, {origin}: td.set('{key}', ...), and return td.")
