"""`PPO.load_from_checkpoint(path)` works alone, or says what it lacks, and trusts nothing that it reads."""

import pickle
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from tensordict import TensorDict

from lightning_rl import (
    PPO,
    ActionChunk,
    ActorCritic,
    Algorithm,
    PushBlocks,
    RLDataModule,
    SlowPolicy,
    TinyVLA,
    VLAPolicy,
)
from lightning_rl.checkpoints.format import CONFIG_KEY, SPACES_KEY, STATE_KEY
from lightning_rl.rollout.spaces import space_data
from lightning_rl.system.construction import config_of
from lightning_rl.system.errors import ConfigurationError
from tests.helpers import assert_same, fit_in, last, make_data, make_ppo, train, without
from tests.messages import assert_names
from tests.variants import variant


class PPOOfThisFile(PPO):
    """An algorithm of the user's, with an argument of its own, and another without a type."""

    def __init__(self, policy, own: float = 1.0, **kwargs) -> None:
        super().__init__(policy, **kwargs)
        self.own = own


def trained_by(policy_class=ActorCritic, algorithm=PPO, **settings):
    """Train in Python, and return (the module, its run directory)."""
    data = make_data(**BUDGET)
    policy = policy_class(data.observation_space, data.action_space)
    module = algorithm(policy, **{"batch_size": 32, "n_epochs": 1} | settings)
    trainer = fit_in("outputs/run_20260101_000000", module, data)
    assert module.env_steps == 128
    return module, trainer.run_dir


BUDGET = {"total_env_steps": 128}

pytestmark = pytest.mark.usefixtures("elsewhere")


def save(content, path="policy.ckpt", **changed):
    torch.save(content | changed, path)
    return path


def refusal(cls, path, **arguments):
    with pytest.raises(ConfigurationError) as error:
        cls.load_from_checkpoint(path, **arguments)
    return str(error.value)


def changed(trained, **settings):
    """Return the content of a checkpoint with other settings of the model in its configuration."""
    config = yaml.safe_load(trained[CONFIG_KEY])
    config["model"]["init_args"] |= settings
    return trained | {CONFIG_KEY: yaml.safe_dump(config)}


def test_by_each_of_its_names_it_is_the_algorithm_that_was_trained():
    run_dir = Path("outputs/run_20260101_000000")
    module, _, _ = train(
        run_dir,
        data=BUDGET,
        policy={"normalize_observation": True},
        model={"normalize_reward": True, "optimizer": partial(torch.optim.AdamW, eps=1e-6)},
    )
    names = [last(run_dir), str(run_dir), "last", "best"]
    for name in names:
        found = PPO.load_from_checkpoint(name)
        assert type(found) is PPO
        assert_same(found.state_dict(), module.state_dict())
        assert (found.env_steps, found.optimizer_steps) == (128, module.optimizer_steps)
        assert not any(part.training for part in found.modules())
        assert found.batch_size == 32
        assert type(found.make_optimizer(found.parameters())) is torch.optim.AdamW
    td = TensorDict({"observation": torch.tensor([[0.1, -0.2, 0.03, 0.4]])}, [1])
    chosen = [m.policy.get_action(td.clone(), deterministic=True) for m in (module, found)]
    assert_same(chosen[0]["sample_log_prob"], chosen[1]["sample_log_prob"])
    assert found.policy.observation_space == module.policy.observation_space


def test_arguments_of_the_caller_count(trained):
    found = PPO.load_from_checkpoint(save(trained), learning_rate=0.5)
    assert found.learning_rate == 0.5
    message = refusal(PPO, "policy.ckpt", learning_rate=-1.0)
    assert_names(message, "policy.ckpt", "learning_rate", "-1.0")


def test_an_algorithm_of_the_users_own_needs_trust():
    _, run_dir = trained_by(algorithm=PPOOfThisFile, own=0.25)
    name = "tests.faults.test_loading.PPOOfThisFile"
    for cls in (PPOOfThisFile, Algorithm):
        message = refusal(cls, run_dir)
        assert_names(message, f"'{name}'", "model.class_path", "Algorithm")
    found = PPOOfThisFile.load_from_checkpoint(run_dir, trust_code=True)
    assert (type(found), found.own) == (PPOOfThisFile, 0.25)
    assert type(PPO.load_from_checkpoint(run_dir, trust_code=True)) is PPOOfThisFile


def test_what_no_configuration_holds_is_named_and_can_be_given():
    def optimizer(parameters):
        return torch.optim.SGD(parameters)

    local, data = variant(ActorCritic, "Local"), make_data(**BUDGET)
    make = partial(local, data.observation_space, data.action_space)
    module = PPO(make(), batch_size=32, n_epochs=1, optimizer=optimizer)
    run_dir = fit_in("outputs/run_20260101_000000", module, data).run_dir
    assert_names(
        refusal(Algorithm, run_dir),
        last(run_dir),
        *("policy", "Local", "optimizer"),
        "PPO.load_from_checkpoint(path, optimizer=..., policy=...)",
    )
    found = PPO.load_from_checkpoint(run_dir, policy=make(), optimizer=optimizer)
    assert_same(found.state_dict(), module.state_dict())


@pytest.mark.parametrize("value", ["a", [[1]], {"class_path": "os.system"}, -1])
def test_whatever_a_constructor_raises_is_one_message(value, trained):
    init_args = {"hidden_sizes": value}
    policy = {"class_path": "lightning_rl.ActorCritic", "init_args": init_args}
    message = refusal(PPO, save(changed(trained, policy=policy)), trust_code=True)
    assert_names(message, "policy.ckpt")


@pytest.mark.parametrize("policy", [None, "a", [], {}, {"class_path": []}, {"class_path": 1}])
@pytest.mark.parametrize("settings", [None, [1], {"a": 1}])
def test_a_policy_of_another_form_is_one_message(policy, settings, trained):
    if isinstance(policy, dict):
        policy = {"class_path": "lightning_rl.ActorCritic", **policy, "init_args": settings}
    path = save(changed(trained, policy=policy))
    for trust_code in (False, True):
        refusal(PPO, path, trust_code=trust_code)


def test_one_without_a_configuration_wants_the_policy(trained):
    path = save(without(trained, CONFIG_KEY))
    assert_names(refusal(PPO, path), "policy.ckpt", "PPO.load_from_checkpoint(path, policy=...)")
    made = make_ppo(make_data())
    found = PPO.load_from_checkpoint(path, policy=made.policy)
    assert_same(found.state_dict(), trained["state_dict"])
    assert_names(refusal(Algorithm, path, policy=made.policy), "algorithm")


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict({"a": spaces.Text(3)})], ids=str)
def test_a_space_of_another_kind_is_not_written_down(space):
    assert space_data(space) is None


def test_a_construction_is_written_down_as_a_config_would():
    data = RLDataModule(
        partial(ActionChunk, env=PushBlocks, chunk_size=2), num_envs=1, num_eval_episodes=1
    )
    own = (data.observation_space, data.action_space)
    data.close()
    module = PPO(VLAPolicy(*own, TinyVLA(channels=(4, 8, 8)), num_bins=np.int64(5)), gamma=0.9)
    assert config_of(module) == {
        "class_path": "lightning_rl.PPO",
        "init_args": {
            "policy": {
                "class_path": "lightning_rl.VLAPolicy",
                "init_args": {
                    "backbone": {
                        "class_path": "lightning_rl.TinyVLA",
                        "init_args": {"channels": [4, 8, 8]},
                    },
                    "num_bins": 5,
                },
            },
            "gamma": 0.9,
        },
    }
    slow = SlowPolicy(*own, policy=partial(VLAPolicy, head="gaussian"), delay_ms=0.0)
    assert config_of(slow)["init_args"]["policy"] == {
        "class_path": "lightning_rl.VLAPolicy",
        "init_args": {"head": "gaussian"},
    }


class Gadget:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("ran"),)


FORGED = {
    "class": {
        "hyper_parameters": {
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
            "_class_path": "evil.Model",
        }
    },
    "datamodule": {"datamodule_hyper_parameters": {"_instantiator": "evil.make"}},
    "old hparams": {"hparams": {"policy": "evil.make"}, "module_arguments": {"policy": "evil.x"}},
}


@pytest.mark.parametrize("name", FORGED)
def test_nothing_of_lightnings_own_way_is_left(name, trained):
    Path("evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    sys.path.append(str(Path.cwd()))
    path = save(trained, **FORGED[name])
    assert type(PPO.load_from_checkpoint(path)) is PPO
    assert "evil" not in sys.modules
    assert {file.name for file in Path().iterdir()} == {"evil.py", "policy.ckpt"}


@pytest.mark.parametrize("trust_code", [False, True])
def test_nothing_is_unpickled_trusted_or_not(trust_code, trained):
    path = save(trained, hyper_parameters=Gadget())
    message = refusal(PPO, path, trust_code=trust_code)
    assert_names(message, "policy.ckpt", "code")
    Path(path).write_bytes(pickle.dumps(Gadget()))
    assert_names(refusal(PPO, path), "policy.ckpt", "damaged")
    assert not Path("ran").exists()


def test_a_data_module_is_not_loaded(trained):
    assert_names(
        refusal(RLDataModule, save(trained)),
        "RLDataModule",
        "trainer.fit(model, data, ckpt_path=...)",
    )


@pytest.mark.parametrize(
    "kept",
    [
        {"kind": "os.system"},
        {"kind": "Box", "low": Path, "high": 1, "shape": [2], "dtype": "float32"},
        {"kind": "Box", "low": 0, "high": 1, "shape": ["x"], "dtype": "float32"},
        {"kind": "Discrete", "n": -1, "start": 0, "dtype": "int64"},
        {"kind": "Discrete", "n": 2, "start": 0, "dtype": "no such type"},
        [1],
    ],
    ids=str,
)
def test_forged_spaces_are_refused(kept, trained):
    kept = yaml.safe_load(yaml.safe_dump(kept)) if "Path" not in str(kept) else {**kept, "low": "x"}
    forged = {"observation_space": kept, "action_space": kept}
    path = save(trained, **{STATE_KEY: trained[STATE_KEY] | {SPACES_KEY: forged}})
    message = refusal(PPO, path)
    assert_names(message, "checkpoint", "spaces")
