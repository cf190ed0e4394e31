"""Keep a policy as it was, for a KL penalty that holds the trained one near it."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call

from lightning_rl.algorithms.rollout_evaluation import log_prob_of, states_of
from lightning_rl.policies import Policy


class ReferencePolicy(nn.Module):
    """A policy with the parameters and statistics that it had when training began.

    Only what changes in training is kept a second time; what is frozen is shared. With a fresh LoRA
    adapter, which begins as no change at all, this is the same network with the adapter off.

    Args:
        policy: is remembered as it is now.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._evaluation = (_Evaluation(policy),)  # in a tuple, so that it is no child
        self.kept = nn.ParameterList(
            nn.Parameter(value.detach().clone(), requires_grad=False)
            for value in self._changing().values()
        )

    @torch.no_grad()
    def remember(self) -> None:
        """Take the policy as it is now."""
        for kept, value in zip(self.kept, self._changing().values(), strict=True):
            kept.copy_(value)

    def log_prob(self, rollout: TensorDict) -> Tensor:
        """Return the log-prob [N, T] of the actions of a rollout [N, T+1]; see `log_prob_of`.

        A recurrent policy as it was goes through the rollout with its own states; the first of them
        is the trained policy's, where the rollout does not begin with an episode.
        """
        if self._policy.remembers:
            rollout = rollout.copy()
            rollout["state"] = states_of(self, rollout)
        return log_prob_of(self, rollout)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """What the policy stores with its actions."""
        return self._policy.extra_fields

    @property
    def micro_batch_size(self) -> int | None:
        """How many samples the policy takes at once."""
        return self._policy.micro_batch_size

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        """Evaluate stored actions as the policy was, without gradients.

        Args:
            td: [B], as in `Policy.evaluate_actions`.
        """
        return self._ask(lambda policy: policy.evaluate_actions(td))

    def get_action(self, td: TensorDict, deterministic: bool) -> TensorDict:
        """Act as the policy did.

        Args:
            td: [B], as in `Policy.get_action`.
            deterministic: take the mode of the distribution instead of a sample.
        """
        return self._ask(lambda policy: policy.get_action(td, deterministic))

    def _ask(self, question: Callable[[Policy], TensorDict]) -> TensorDict:
        (evaluation,) = self._evaluation
        names = (f"policy.{name}" for name in self._changing())
        with torch.no_grad():
            kept = dict(zip(names, self.kept, strict=True))
            return functional_call(evaluation, kept, (question,))  # type: ignore[no-any-return]  # torch.func

    @property
    def _policy(self) -> Policy:
        return self._evaluation[0].policy

    def _changing(self) -> dict[str, Tensor]:
        """Return what training changes, by name: parameters, and the statistics of the inputs."""
        saved = self._policy.state_dict()
        parameters = {n: p for n, p in self._policy.named_parameters() if p.requires_grad}
        return parameters | {n: b for n, b in self._policy.named_buffers() if n in saved}


class _Evaluation(nn.Module):
    """A question to a policy as the call of a module, which can be made with other parameters."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, question: Callable[[Policy], TensorDict]) -> TensorDict:
        return question(self.policy)
