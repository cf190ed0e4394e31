"""Policies whose actions a test writes."""

from types import SimpleNamespace

import torch
from tensordict import TensorDict

from lightning_rl.policies import ActorCritic, Policy


class ScriptedPolicy(Policy):
    """A policy without a critic that acts by a function; its one parameter moves nothing.

    Args:
        observation_space, action_space: spaces of one env.
        act: makes the actions [N, *A] from (policy, td, generator).
        fields: its `extra_fields`.
    """

    has_critic = False
    extra_fields = {}  # noqa: RUF012

    def __init__(self, observation_space, action_space, act, fields=None):
        super().__init__(observation_space, action_space)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.act, self.extra_fields = act, fields or {}

    def forward(self, td, deterministic=False, generator=None):
        td["action"] = self.act(self, td, generator)
        td["sample_log_prob"] = torch.zeros(td.batch_size)
        return td

    def get_value(self, td):
        return td.set("value", torch.zeros(td.batch_size))

    def evaluate_actions(self, td):
        zeros = self.weight.expand(td.batch_size)
        fields = {"sample_log_prob": zeros, "entropy": zeros, "value": zeros}
        return TensorDict(fields, td.batch_size)


SUM_OF_OBSERVATION = SimpleNamespace(
    is_recurrent=False,
    micro_batch_size=None,
    sharding=None,
    get_value=lambda td: td.set("value", td["observation"].sum(-1)),
)
"""In place of a policy: values an observation by the sum of its numbers."""


class Notes(ActorCritic):
    """Has keywords of its own."""

    def __init__(self, observation_space, action_space, **notes):
        super().__init__(observation_space, action_space)
        self.notes = notes
