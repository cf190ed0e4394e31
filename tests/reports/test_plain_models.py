"""Models and weights as others save them: plain interfaces, other checkpoints, no adapter yet."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict

from lightning_rl import (
    PPO,
    BehaviorCloning,
    CustomVLA,
    DatasetCollector,
    RLDataModule,
    TransformersBackbone,
    VLAPolicy,
)
from lightning_rl.extensions.vla.weight_files import load_weights
from tests.helpers import last
from tests.messages import refused
from tests.numerics.test_vla import data_module, fit, make_env
from tests.numerics.test_vla_loading import CONFIGS

MODULE = """
import torch
from torch import nn

from lightning_rl import VLAModelInterface


class Plain(nn.Module):
    def __init__(self, width=8, outputs=3):
        super().__init__()
        self.net = nn.Linear(4, width)
        self.head = nn.Linear(width, outputs)
        self.value_head = nn.Linear(width, 1)

    def forward(self, obs):
        return self.head(torch.tanh(self.net(obs)))

    def get_value(self, obs):
        return self.value_head(torch.tanh(self.net(obs)))


class Reading(Plain):
    reads = ("state",)

    def forward(self, obs):
        return super().forward(obs["state"])

    def get_value(self, obs):
        return super().get_value(obs["state"])


class Laplace(Plain):
    def __init__(self):
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(3))

    distribution = torch.distributions.Laplace

    def evaluate_actions(self, obs, actions):
        drawn = self.distribution(self(obs), self.log_std.exp())
        return drawn.log_prob(actions).sum(-1), drawn.entropy().sum(-1)


class Normal(Laplace):
    distribution = torch.distributions.Normal


class Sampling(Plain):
    def forward(self, obs):
        mean = super().forward(obs)
        return mean, mean.sum(-1), self.get_value(obs)


class Lazy(Plain):
    def __init__(self):
        super().__init__()
        self.net = nn.LazyLinear(8)


class Triple(Plain):
    def evaluate_actions(self, obs, actions):
        value = self.get_value(obs).squeeze(-1)
        return value, -actions.sum(-1), value * 0


class Nothing(VLAModelInterface):
    pass


class Actor(VLAModelInterface):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, observation):
        return self.net(observation)


class Complete(Actor):
    def get_value(self, observation):
        return observation.sum(-1, keepdim=True)

    def evaluate_actions(self, observation, actions):
        drawn = torch.distributions.Normal(self(observation), torch.tensor(-1.0).exp())
        return drawn.log_prob(actions).sum(-1), drawn.entropy().sum(-1)
"""

SEEN, DONE = Box(-1, 1, (4,)), Box(-2, 2, (3,))


@pytest.fixture
def plain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("plain_vla", None)
    Path("plain_vla.py").write_text(MODULE)
    import plain_vla

    torch.manual_seed(0)
    model = plain_vla.Plain()
    torch.save({"model_state_dict": model.state_dict(), "epoch": 3}, "model.pt")
    yield model
    sys.modules.pop("plain_vla")


def made(observation_space=SEEN, action_space=DONE, name="Plain", **settings):
    settings |= {"model_path": "model.pt", "model_class": f"plain_vla.{name}"}
    return CustomVLA(observation_space, action_space, **settings)


def test_a_plain_model_acts_around_its_actions_by_a_learnt_deviation(plain):
    policy = made(log_std_init=-0.5)
    td = TensorDict({"observation": torch.rand(4000, 4) * 0 + 0.3}, [4000])
    acted = policy.get_action(td, generator=torch.Generator().manual_seed(1))
    mean = plain(td["observation"])
    noise = acted["action"] - mean
    torch.testing.assert_close(noise.std(0), torch.full((3,), -0.5).exp(), rtol=0.05, atol=0)
    drawn = torch.distributions.Normal(mean, torch.full((3,), -0.5).exp())
    expected = drawn.log_prob(acted["action"]).sum(-1)
    torch.testing.assert_close(acted["sample_log_prob"], expected)
    again = policy.evaluate_actions(acted)
    torch.testing.assert_close(again["sample_log_prob"], expected)
    torch.testing.assert_close(again["entropy"], drawn.entropy().sum(-1))
    torch.testing.assert_close(again["value"], plain.get_value(td["observation"]).squeeze(-1))
    mode = policy.get_action(td, deterministic=True)["action"]
    torch.testing.assert_close(mode, mean)
    again["sample_log_prob"].sum().backward()
    assert policy.model.log_std.grad.abs().min() > 0
    assert policy.belongs_to_critic("model.model.value_head.weight")


def test_a_plain_model_is_trained(plain, tmp_path):
    data = RLDataModule(
        "Pendulum-v1", num_envs=2, buffer_size=8, total_env_steps=32, num_eval_episodes=1
    )
    torch.save(type(plain)(outputs=1).state_dict() | {"net.weight": torch.zeros(8, 3)}, "model.pt")
    Path("plain_vla.py").write_text(
        MODULE.replace("Linear(4", "Linear(2+1")
    )  # of another size: bytecode of the same second is kept
    sys.modules.pop("plain_vla")
    policy = made(data.observation_space, data.action_space, model_config={"outputs": 1})
    before = policy.model.log_std.detach().clone()
    fit(
        tmp_path / "run",
        PPO(policy, n_epochs=2, batch_size=8, compile=False),
        data,
        limit_val_batches=0,
    )
    assert not torch.equal(policy.model.log_std, before)


def test_a_plain_model_of_other_actions_and_keys_is_refused(plain):
    with refused(names=("forward", "[1, 3]", "[1, 4]")):
        made(SEEN, Box(-1, 1, (4,)))
    from gymnasium.spaces import Dict, Discrete

    with refused(names=("Discrete(3)", "evaluate_actions")):
        made(SEEN, Discrete(3))
    with refused(names=("touch", "CustomVLA")):
        made(Dict({"state": SEEN, "touch": SEEN}), name="Reading")
    made(Dict({"state": SEEN, "touch": SEEN}), name="Reading", ignore_keys=["touch"])


def test_the_log_probs_of_a_plain_model_are_its_own(plain, tmp_path):
    torch.save(plain.state_dict() | {"log_std": torch.zeros(3)}, "model.pt")
    td = TensorDict({"observation": torch.rand(5, 4)}, [5])
    for name, equal in {"Normal": True, "Laplace": False}.items():
        policy = made(name=name)
        acted = policy.get_action(td.copy(), generator=torch.Generator().manual_seed(1))
        again = policy.evaluate_actions(acted)
        assert torch.allclose(again["sample_log_prob"], acted["sample_log_prob"]) is equal
        assert again["value"].shape == (5,)


def test_a_subclass_of_the_interface_has_the_methods_that_it_overrides(plain):
    policies = [
        CustomVLA(SEEN, DONE, model_class=f"plain_vla.{name}") for name in ("Actor", "Complete")
    ]
    assert [policy.has_critic for policy in policies] == [False, True]
    weights = policies[0].model.model.state_dict()
    policies[1].model.model.load_state_dict(weights)
    td = policies[0].get_action(TensorDict({"observation": torch.rand(5, 4)}, [5]))
    first, second = (policy.evaluate_actions(td.copy()) for policy in policies)
    torch.testing.assert_close(first["sample_log_prob"], second["sample_log_prob"])
    torch.testing.assert_close(first["entropy"], second["entropy"])
    assert second["value"].shape == (5,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Sampling", ("forward", "tuple", "VLAModelInterface", "Policy")),
        ("Lazy", ("LazyLinear", "net.weight")),
        ("Triple", ("evaluate_actions", "pair", "get_value")),
        ("Nothing", ("plain_vla.Nothing", "forward", "VLAModelInterface")),
    ],
)
def test_models_that_cannot_be_plain_are_refused_when_they_are_made(name, words, plain):
    with refused(names=words):
        made(name=name)


@pytest.mark.parametrize("name", ["state_dict", "model_state_dict", "model", "ema"])
def test_a_checkpoint_that_holds_one_state_dict_is_read(name, tmp_path):
    weights = {"a": torch.ones(2), "b": torch.zeros(1)}
    optimizer = {"state": {0: {"step": torch.zeros(())}}, "param_groups": [{"lr": 0.1}]}
    torch.save({name: weights, "optimizer": optimizer, "epoch": 2}, tmp_path / "model.pt")
    assert load_weights(tmp_path / "model.pt").keys() == weights.keys()


def test_several_state_dicts_are_refused_unless_one_is_named_as_such(tmp_path):
    one, other = {"a": torch.ones(1)}, {"a": torch.zeros(1)}
    torch.save({"model": one, "ema": other}, tmp_path / "model.pt")
    with refused(names=("model.pt", "model, ema")):
        load_weights(tmp_path / "model.pt")
    torch.save({"state_dict": one, "ema": other}, tmp_path / "model.pt")
    assert load_weights(tmp_path / "model.pt")["a"].item() == 1
    torch.save({"epoch": 3}, tmp_path / "model.pt")
    with refused(names=("model.pt", "state_dict")):
        load_weights(tmp_path / "model.pt")


def vla(**settings):
    env = make_env(1)
    backbone = TransformersBackbone("hf_config", config=CONFIGS["smolvlm"], **settings)
    return VLAPolicy(env.single_observation_space, env.single_action_space, backbone)


def test_a_clone_without_an_adapter_begins_a_policy_with_one(tmp_path):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    clone = BehaviorCloning(vla(), n_epochs=1, batch_size=16, compile=False)
    data = data_module(iterations=1, collector=partial(DatasetCollector, episodes=8))
    fit(tmp_path / "clone", clone, data, limit_val_batches=0)
    torch.manual_seed(5)
    tuned = PPO(vla(lora={"r": 2}), n_epochs=1, batch_size=16, learning_rate=1e-12, compile=False)
    path = str(last(tmp_path / "clone"))
    fit(tmp_path / "tuned", tuned, data_module(iterations=1), init_from=path, limit_val_batches=0)
    base = tuned.policy.backbone.model.get_base_model()
    old = clone.policy.backbone.model.state_dict()
    for key, value in base.state_dict().items():
        if "lora" in key:
            assert "lora_A" in key or value.abs().max() < 1e-9  # fresh: it changes nothing
        else:
            assert torch.equal(value, old[key.replace(".base_layer.", ".")]), key
    td = TensorDict({"observation": make_env(2).reset(seed=0)[0]}, [2])
    slots = [one.policy.features(td).slots for one in (tuned, clone)]
    torch.testing.assert_close(*slots)
    with refused(names=("policy", "entries")):
        fit(
            tmp_path / "back",
            PPO(vla(), batch_size=16),
            data_module(),
            init_from=str(last(tmp_path / "tuned")),
        )
