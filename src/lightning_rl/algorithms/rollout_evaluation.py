"""Evaluate a whole rollout in one batched pass: its values, or the log-probs of its actions."""

from collections.abc import Callable
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.optim.update import micro_batches
from lightning_rl.policies.base import Policy
from lightning_rl.rollout.contract import (
    FieldSpec,
    final_observations,
    flat_transitions,
    map_tree,
    step_views,
)
from lightning_rl.system import ranks
from lightning_rl.system.sharded import PolicySharding


@torch.no_grad()
def write_values(
    policy: Policy,
    rollout: TensorDict,
    value_of: Callable[[TensorDict], Tensor] | None = None,
    final_value_of: Callable[[TensorDict], Tensor] | None = None,
) -> None:
    """Write `value` [N, T+1], and `final_value` for steps that a time limit truncated.

    Args:
        policy: a policy with a critic.
        rollout: [N, T+1].
        value_of: returns values [B], instead of `policy.get_value`.
        final_value_of: the same for final observations, whose number varies.
    """
    inputs = ["observation", *(["state"] if policy.is_recurrent else [])]
    observations = flat_transitions(rollout, inputs, bootstrap=True)
    envs, slots = rollout.batch_size
    parts = _parts(policy, observations)
    values = torch.cat(_each(policy, value_of or policy.get_value, "value", parts, parts[0]))
    rollout["value"].copy_(values.view(slots, envs).t())
    rollout["final_value"].zero_()
    rows, steps = (rollout["truncated"] & ~rollout["terminated"])[:, :-1].nonzero(as_tuple=True)
    final_parts: list[TensorDict] = []
    if len(rows):
        finals = {"observation": final_observations(rollout, rows, steps)}
        if policy.is_recurrent:  # the next slot's state is already zero
            last = {key: map_tree(lambda leaf: leaf[rows, steps], rollout[key]) for key in inputs}
            finals["state"] = next_state(policy, TensorDict(last, [len(rows)]))
        final_parts = _parts(policy, TensorDict(finals, [len(rows)]))
    # Do not use `value_of`: the number of final observations varies, and graphs need a fixed
    # number.
    final_values = _each(policy, final_value_of or policy.get_value, "value", final_parts, parts[0])
    if final_values:
        rollout["final_value"][rows, steps] = torch.cat(final_values).to(rollout["final_value"])


def _parts(policy: "EvaluatesActions", samples: TensorDict) -> list[TensorDict]:
    return [part for part, _ in micro_batches(samples, policy.micro_batch_size)]


def _each(
    policy: "EvaluatesActions",
    ask: Callable[[TensorDict], Tensor | TensorDict],
    key: str,
    parts: list[TensorDict],
    substitute: TensorDict,
) -> list[Tensor]:
    """Return a policy's answers for parts [B]; all ranks must call it equally often."""
    # Count before the first call, which waits for the other ranks.
    missing = 0 if policy.sharding is None else ranks.max_over_ranks(len(parts)) - len(parts)
    answers = [ask(part) for part in (*parts, *[substitute] * missing)]
    return [x if isinstance(x, Tensor) else x[key] for x in answers[: len(parts)]]


class EvaluatesActions(Protocol):
    """The part of `Policy` that a `ReferencePolicy` has too."""

    @property
    def extra_fields(self) -> dict[str, FieldSpec]: ...

    @property
    def micro_batch_size(self) -> int | None: ...

    @property
    def sharding(self) -> PolicySharding | None: ...

    def evaluate_actions(self, td: TensorDict) -> TensorDict: ...

    def get_action(self, td: TensorDict, deterministic: bool) -> TensorDict: ...


def next_state(policy: EvaluatesActions, td: TensorDict) -> Tensor:
    """Return the state [B, ...] of a recurrent policy after td [B], which has `state`."""
    state: Tensor = policy.get_action(td, deterministic=True)["next_state"]
    return state


@torch.no_grad()
def states_of(policy: EvaluatesActions, rollout: TensorDict) -> Tensor:
    """Return states [N, T+1, ...], recomputed from the first state of a rollout [N, T+1]."""
    state: Tensor = rollout["state"][:, 0]
    states = [state]
    for step in step_views(rollout.select("observation", "done"))[:-1]:
        read = TensorDict({"observation": step.get("observation"), "state": state}, step.batch_size)
        done = step["done"].view(-1, *[1] * (state.dim() - 1))
        state = next_state(policy, read).masked_fill(done, 0.0)
        states.append(state)
    return torch.stack(states).transpose(0, 1)


@torch.no_grad()
def log_prob_of(policy: EvaluatesActions, rollout: TensorDict) -> Tensor:
    """Return log-probs [N, T], or [N, T, L] in parts, of the actions of a rollout [N, T+1]."""
    keys = sorted({"observation", "action", *policy.extra_fields})
    transitions = flat_transitions(rollout, keys)
    parts = _parts(policy, transitions)
    log_probs = _each(policy, policy.evaluate_actions, "sample_log_prob", parts, parts[0])
    envs, slots = rollout.batch_size
    steps: Tensor = torch.cat(log_probs).unflatten(0, (slots - 1, envs))
    return steps.transpose(0, 1)
