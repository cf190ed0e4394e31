"""A frozen copy of a policy, for a KL penalty."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algorithms.rollout_evaluation import log_prob_of, states_of
from lightning_rl.policies import Policy
from lightning_rl.system.torch_private import call_with


class ReferencePolicy(nn.Module):
    """A policy with the parameters and statistics from the start of training.

    Only trainable parameters are copied: for a fresh LoRA adapter, this is the same network with
    the adapter off. A sharded policy copies its own shards, and swaps them in for an evaluation.
    """

    sharding = None

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._hidden = (policy,)  # a tuple hides it from nn.Module
        self.copy()

    def copy(self) -> None:
        """Copy the parameters; copy them again if the policy has been sharded since."""
        self.kept = nn.ParameterList(
            nn.Parameter(value.detach().clone(), requires_grad=False)
            for value in self._changing().values()
        )

    @torch.no_grad()
    def copy_again(self) -> None:
        """Copy the current parameters."""
        for reference, value in zip(self.kept, self._changing().values(), strict=True):
            reference.copy_(value)

    def log_prob(self, rollout: TensorDict) -> Tensor:
        """Return the log-prob [N, T] of the actions of a rollout [N, T+1]; see `log_prob_of`."""
        if self._policy.evaluates_sequences:
            # A shallow copy: the rollout keeps the states of the acting policy.
            rollout = rollout.copy()
            rollout["state"] = states_of(self, rollout)
        if self._policy.sharding is None:
            return log_prob_of(self, rollout)
        # A sharded forward pass reads the policy's own parameters, so swap the values in place.
        self._exchange()
        try:
            return log_prob_of(self._policy, rollout)
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for reference, value in zip(self.kept, self._changing().values(), strict=True):
            current = value.clone()
            value.copy_(reference)
            reference.copy_(current)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The policy's extra fields."""
        return self._policy.extra_fields

    @property
    def micro_batch_size(self) -> int | None:
        """The policy's micro-batch size."""
        return self._policy.micro_batch_size

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        """Evaluate actions with the copied parameters: td [B] as in `Policy.evaluate_actions`."""
        return self._ask(lambda policy: policy.evaluate_actions(td))

    def get_action(self, td: TensorDict, deterministic: bool) -> TensorDict:
        """Act with the copied parameters, for td [B] as in `Policy.get_action`."""
        return self._ask(lambda policy: policy.get_action(td, deterministic))

    def _ask(self, question: Callable[[Policy], TensorDict]) -> TensorDict:
        with torch.no_grad():
            state = dict(zip(self._changing(), self.kept, strict=True))
            return call_with(self._policy, state, question, self._policy)  # type: ignore[no-any-return]  # any function

    @property
    def _policy(self) -> Policy:
        return self._hidden[0]

    def _changing(self) -> dict[str, Tensor]:
        policy = self._policy
        constant = {
            f"{path}.{name}"
            for path, part in policy.named_modules()
            for name in getattr(part, "constant_buffers", ())
        }
        changing = policy.state_dict().keys() - constant
        parameters = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        return parameters | {n: b for n, b in policy.named_buffers() if n in changing}
