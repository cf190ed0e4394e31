"""Evaluate a whole rollout, its values or the log-probs of its actions, in one batched pass."""

from collections.abc import Callable
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.optim.update import micro_batches
from lightning_rl.policies.base import Policy
from lightning_rl.rollout import FieldSpec, final_observations, flat_transitions


@torch.no_grad()
def write_values(
    policy: Policy, rollout: TensorDict, value_of: Callable[[TensorDict], Tensor] | None = None
) -> None:
    """Write `value` [N, T+1], and `final_value` where only the time ran out.

    Args:
        policy: has a critic.
        rollout: [N, T+1].
        value_of: returns values [B] in place of `policy.get_value`. Not for final observations: of
            these there is another number each time.
    """
    observations = flat_transitions(rollout, ["observation"], bootstrap=True)
    envs, slots = rollout.batch_size
    values = _values(policy, observations, value_of)
    rollout["value"].copy_(values.view(slots, envs).t())
    rollout["final_value"].zero_()
    rows, steps = (rollout["truncated"] & ~rollout["terminated"])[:, :-1].nonzero(as_tuple=True)
    if len(rows):
        finals = {"observation": final_observations(rollout, rows, steps)}
        rollout["final_value"][rows, steps] = _values(policy, TensorDict(finals, [len(rows)]))


def _values(
    policy: Policy,
    observations: TensorDict,
    value_of: Callable[[TensorDict], Tensor] | None = None,
) -> Tensor:
    """Return the value of each observation [B]."""
    ask = value_of or (lambda part: policy.get_value(part)["value"])
    return torch.cat(
        [ask(part) for part, _ in micro_batches(observations, policy.micro_batch_size)]
    )


class EvaluatesActions(Protocol):
    """What a log-prob is asked of: a `Policy`, or one as it was."""

    @property
    def extra_fields(self) -> dict[str, FieldSpec]: ...

    @property
    def micro_batch_size(self) -> int | None: ...

    def evaluate_actions(self, td: TensorDict) -> TensorDict: ...


@torch.no_grad()
def log_prob_of(policy: EvaluatesActions, rollout: TensorDict) -> Tensor:
    """Return the log-prob [N, T] that a policy gives to the actions of a rollout [N, T+1].

    Or [N, T, L], where the policy gives it in parts.
    """
    keys = sorted({"observation", "action", *policy.extra_fields})
    transitions = flat_transitions(rollout, keys)
    log_probs = [
        policy.evaluate_actions(part)["sample_log_prob"]
        for part, _ in micro_batches(transitions, policy.micro_batch_size)
    ]
    envs, slots = rollout.batch_size
    steps: Tensor = torch.cat(log_probs).unflatten(0, (slots - 1, envs))
    return steps.transpose(0, 1)
