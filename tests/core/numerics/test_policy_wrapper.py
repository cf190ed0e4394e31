"""A wrapper of a policy passes on all that a policy is asked for."""

import inspect

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict
from torch import nn

from lightning_rl import ActorCritic, Policy, SlowPolicy
from lightning_rl.policies.actors import StepwiseActor
from lightning_rl.rollout.allocation import allocate_rollout
from tests.variants import after, concrete

SPACES = (Box(-1.0, 1.0, (3,)), Discrete(2))


def slow():
    return SlowPolicy(*SPACES, lambda *spaces: ActorCritic(*spaces, (8,)), delay_ms=0.0)


ITS_OWN = {"get_action", "training_settings", "belongs_to_critic", "acting_state"}
"""`forward` by definition, which a wrapper may change; names of the attributes of one module; what `critic_modules`
says; and what is passed on under other names."""

MEMBERS = (set(dir(Policy)) - set(dir(nn.Module)) - ITS_OWN) | {"forward"}
METHODS = sorted(n for n in MEMBERS if n[0] != "_" and inspect.isfunction(getattr(Policy, n)))

ATTRIBUTES = (
    "joint_ratio",
    "state_is_plan",
    "has_critic",
    "micro_batch_size",
    "autocast_dtype",
    "version",
)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_the_inner_policys(name, monkeypatch):
    policy, said = slow(), object()
    calls = []
    monkeypatch.setattr(
        type(policy.inner), name, lambda *args, **kwargs: calls.append((args, kwargs)) or said
    )
    parameters = list(inspect.signature(getattr(Policy, name)).parameters)[1:]
    given = [object() for _ in parameters]
    answer = getattr(policy, name)(*given)
    (args, kwargs) = calls[0]
    assert [*args[1:], *kwargs.values()] == given, "the arguments too"
    if name not in ("rollout_actor", "put_in_eval_mode", "update_normalization", "set_precision"):
        assert answer is said


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_follows_the_inner_policys(name):
    policy = slow()
    new = torch.tensor(5) if name == "version" else "new"
    setattr(policy.inner, name, new)
    assert getattr(policy, name) is new
    newer = torch.tensor(6) if name == "version" else "newer"
    setattr(policy, name, newer)
    assert getattr(policy.inner, name) is newer


def test_a_wrapper_that_acts_in_its_own_way_is_not_passed_by():
    from lightning_rl import PolicyWrapper

    def negate(policy, td, *args, **kwargs):
        return td.set("action", -td["action"], inplace=True)

    inner = ActorCritic(SPACES[0], Box(-1.0, 1.0, (2,)))
    policy = after(concrete(PolicyWrapper), forward=negate)(inner)
    td = TensorDict({"observation": torch.randn(4, 3)}, [4])
    mode = policy.inner(td.clone(), deterministic=True)["action"]
    assert torch.equal(policy.get_action(td, deterministic=True)["action"], -mode)
    rollout = allocate_rollout(SPACES[0], policy.action_space, 4, 2)
    assert isinstance(policy.rollout_actor(rollout), StepwiseActor)
