"""A policy of a user's own: however it writes its outputs they count, and what cannot be learnt from is refused."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl import PPO, AsyncCollector, Policy, SyncCollector
from tests.algorithms import Reinforce
from tests.helpers import assert_same
from tests.helpers import train as train_run
from tests.messages import refused
from tests.probes import ActionProbe
from tests.variants import after, passing, variant


class MyPolicy(Policy):
    """A categorical policy over flat observations, as a user would write it."""

    def __init__(self, observation_space, action_space, hidden_sizes, write="set"):
        super().__init__(observation_space, action_space)
        size, (width,) = observation_space.shape[0], hidden_sizes
        self.actor = nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Linear(size, 1)
        self.write = WAYS[write]

    def logits(self, observation):
        return self.actor(observation)

    def forward(self, td, deterministic=False, generator=None):
        log_probs = self.logits(td["observation"]).log_softmax(-1)
        action = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(-1)
        if deterministic:
            action = log_probs.argmax(-1)
        return self.write(td, action, log_probs.gather(-1, action[:, None]).squeeze(-1))

    def get_value(self, td):
        return td.set("value", self.critic(td["observation"]).squeeze(-1))

    def evaluate_actions(self, td):
        log_probs = self.logits(td["observation"]).log_softmax(-1)
        result = {
            "sample_log_prob": log_probs.gather(-1, td["action"][:, None]).squeeze(-1),
            "entropy": -(log_probs.exp() * log_probs).sum(-1),
            "value": self.critic(td["observation"]).squeeze(-1),
        }
        return TensorDict(result, td.batch_size)


def by_item(td, action, log_prob):
    td["action"] = action
    td["sample_log_prob"] = log_prob
    return td


def by_set(td, action, log_prob, inplace=False):
    return td.set("action", action, inplace=inplace).set(
        "sample_log_prob", log_prob, inplace=inplace
    )


def into_the_tensors(td, action, log_prob):
    if "action" not in td.keys():  # an evaluation gives observations alone
        return by_set(td, action, log_prob)
    td["action"].copy_(action)
    td["sample_log_prob"][:] = log_prob
    return td


OUTPUTS = "action", "sample_log_prob"
WAYS = {
    "item": by_item,
    "set": by_set,
    "update": lambda td, *outputs: td.update(dict(zip(OUTPUTS, outputs, strict=True))),
    "new": lambda td, *outputs: TensorDict(dict(zip(OUTPUTS, outputs, strict=True)), td.batch_size),
    "in place": partial(by_set, inplace=True),
    "into the tensors": into_the_tensors,
    "none": lambda td, action, log_prob: None,
    "no action": lambda td, action, log_prob: td.set("sample_log_prob", log_prob),
    "no log-prob": lambda td, action, log_prob: TensorDict({"action": action}, td.batch_size),
    "a dimension too many": lambda td, action, log_prob: by_set(td, action, log_prob[:, None]),
    "int32": lambda td, action, log_prob: by_set(td, action.int(), log_prob),
    "float64": lambda td, action, log_prob: by_set(td, action, log_prob.double()),
    "once": lambda td, action, log_prob: by_set(td, action, log_prob) if action.sum() < 5 else td,
}


def train(
    tmp_path,
    policy_class=MyPolicy,
    write="set",
    algorithm=PPO,
    collector=SyncCollector,
    iterations=3,
    **model,
):
    data = {"num_envs": 8, "buffer_size": 32, "total_env_steps": 8 * 32 * iterations}
    settings = {"algorithm": algorithm, "learning_rate": 1e-2, "lr_schedule": "constant"}
    kwargs = {"data": data | {"collector": collector}, "model": settings | model}
    policy = {"policy_class": policy_class, "write": write}
    trainer = {"limit_val_batches": 0, "enable_checkpointing": False, "logger": False}
    return train_run(tmp_path, env=ActionProbe, policy=policy, trainer=trainer, seed=1, **kwargs)[0]


def test_six_ways_of_writing_the_outputs_learn_the_same_and_learn(tmp_path):
    ways = ["item", "set", "update", "new", "in place", "into the tensors"]
    runs = [train(tmp_path / way, write=way, iterations=2, n_epochs=4) for way in ways]
    states = [module.policy.state_dict() for module in runs]
    for state in states[1:]:
        assert_same(state, states[0])
    returns = [module.metrics["train/loss"] for module in runs]
    assert len(set(returns)) == 1
    observation = torch.tensor([[1.0], [-1.0]])
    learnt = train(tmp_path / "longer", write=ways[0], iterations=12, n_epochs=4)
    probability = learnt.policy.logits(observation).softmax(-1)
    assert probability[0, 1] > 0.9
    assert probability[1, 0] > 0.9


@pytest.mark.parametrize(
    ("write", "message"),
    [
        ("none", ("MyPolicy.forward", "NoneType", "TensorDict", "action")),
        ("no action", ("MyPolicy.forward", "'action'", "torch.int64", "[8]")),
        ("once", ("MyPolicy.forward", "'action'")),
        ("no log-prob", ("MyPolicy.forward", "'sample_log_prob'", "torch.float32", "[8]")),
        ("a dimension too many", ("'sample_log_prob'", "torch.float32", "[8, 1]", "[8]")),
        ("int32", ("'action'", "torch.int32", "torch.int64", "[8]")),
        ("float64", ("'sample_log_prob'", "torch.float64", "torch.float32")),
    ],
)
def test_what_is_missing_or_of_another_kind_is_named(write, message, tmp_path):
    with refused(names=message):
        train(tmp_path, write=write)


class Recurrent(MyPolicy):
    """It keeps its state in the module, from call to call."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cell = nn.GRUCell(1, 16)
        self.head = nn.Linear(16, 2)
        self.state = None

    def logits(self, observation):
        if self.state is None or len(self.state) != len(observation):
            self.state = observation.new_zeros(len(observation), 16)
        self.state = self.cell(observation, self.state.detach())
        return self.head(self.state)


def drops(policy, observation):
    """Its dropout pays no heed to eval mode."""
    return nn.functional.dropout(policy.actor(observation), 0.5, training=True)


def samples_again(policy, td):
    """Its update is about another action than the one that was taken."""
    return (td.copy().set("action", torch.randint_like(td["action"], 2)),)


def adds_a_column(policy, result, td):
    """The log-prob of the update has a dimension too many, and would be broadcast to [B, B]."""
    return result.set("sample_log_prob", result["sample_log_prob"][:, None])


REFUSED = {
    Recurrent: ("248 of 256 steps", "env 0, step 1"),
    variant(MyPolicy, "Dropping", logits=drops): ("Dropping.forward", "256 steps"),
    passing(MyPolicy, evaluate_actions=samples_again): ("Passing.forward", "samples again"),
    after(MyPolicy, "Columns", evaluate_actions=adds_a_column): ("sample_log_prob", "[1]", "[]"),
}


@pytest.mark.parametrize(
    ("policy_class", "compile"), [*((cls, False) for cls in REFUSED), (Recurrent, True)]
)
def test_a_policy_whose_first_ratio_is_not_one_is_refused(policy_class, compile, tmp_path):
    with refused(names=(f"{policy_class.__name__}.evaluate_actions", *REFUSED[policy_class])):
        train(tmp_path, policy_class, compile=compile)


def test_in_the_background_it_is_refused_too(tmp_path):
    with refused(names=("Recurrent.evaluate_actions", "Recurrent.forward", "env 0, step 0")):
        train(tmp_path, Recurrent, collector=AsyncCollector)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_weights_in_bfloat16_round_is_no_fault(dtype, tmp_path):
    def add_weight(policy, result, *args, **kwargs):
        policy.unused = nn.Parameter(torch.zeros(1, dtype=dtype))

    def round_down(policy, result, td):
        return result.set("sample_log_prob", 1.01 * result["sample_log_prob"])

    rounding = after(MyPolicy, __init__=add_weight, evaluate_actions=round_down)
    with refused(names="different log-probs") if dtype is torch.float32 else nullcontext():
        train(tmp_path, rounding)


def test_where_no_ratio_is_taken_none_is_asked_for(tmp_path):
    samples = passing(MyPolicy, evaluate_actions=samples_again)
    assert train(tmp_path, samples, algorithm=Reinforce).optimizer_steps > 0
