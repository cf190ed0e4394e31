"""Settings are given by name; a wrong call names the class, the nearest setting, and its documentation."""

import inspect
import pydoc
from functools import partial

import gymnasium
import pytest

from lightning_rl import (
    APG,
    GRPO,
    PPO,
    SAC,
    ActorCritic,
    AsyncCollector,
    DatasetCollector,
    GymnasiumEnv,
    MixedReplay,
    PushCube,
    ReplayBuffer,
    RLDataModule,
    RLTrainer,
    SyncCollector,
    VLAPolicy,
)
from lightning_rl.cli.checking import FAMILIES, subclasses
from lightning_rl.system import jsonargparse_private
from lightning_rl.system.construction import Configurable, UnknownSettingError, config_of
from lightning_rl.system.jsonargparse_private import parameters_of
from tests.algorithms import Margin, Starred
from tests.messages import assert_names, refused
from tests.policies import Notes

SPACES = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Box(-1, 1, (1,))


@pytest.fixture
def policy():
    return ActorCritic(*SPACES)


@pytest.mark.parametrize("cls", [PPO, SAC, GRPO, APG])
def test_a_number_by_position_is_refused(cls, policy):
    with refused(TypeError, names=("policy", "2")):
        cls(policy, 3e-4)


@pytest.mark.parametrize("call", [lambda: RLDataModule(None, 8, 128), lambda: RLTrainer(1), lambda: VLAPolicy(*SPACES, None, "flow")])  # fmt: skip
def test_other_classes_take_numbers_and_choices_by_name_too(call):
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize(
    ("cls", "unknown", "nearest", "home"),
    [
        (PPO, "lr", "learning_rate", "Algorithm"),
        (PPO, "clip_coeff", "clip_coef", "PPO"),
        (SAC, "update_per_env_step", "updates_per_env_step", "OffPolicyAlgorithm"),
        (APG, "gama", "gamma", "APG"),
        (Margin, "target_k", "target_kl", "OnPolicyAlgorithm"),
        (Margin, "margins", "margin", "Margin"),
        (Starred, "lr", "learning_rate", "Algorithm"),
    ],
)
def test_an_unknown_setting_names_the_nearest_one_and_its_home(cls, unknown, nearest, home, policy):
    with refused(names=(cls.__name__, unknown, nearest, home, f"help({cls.__name__})")):
        cls(policy, **{unknown: 0.1})


def test_policies_and_the_trainer_name_the_nearest_one_too():
    with refused(names=("ActorCritic", "hidden_size", "hidden_sizes")):
        ActorCritic(*SPACES, hidden_size=(8,))
    with refused(names=("RLTrainer", "run_directory", "run_dir")):
        RLTrainer(run_directory="runs")


@pytest.mark.parametrize(
    ("make", "unknown", "nearest"),
    [
        (RLDataModule, "num_env", "num_envs"),
        (partial(GymnasiumEnv, 2, "CartPole-v1"), "wrapers", "wrappers"),
        (partial(PushCube, 2), "reward", "rewards"),
        (partial(SyncCollector, None), "timeout", ""),
        (partial(DatasetCollector, None), "pth", "path"),
        (partial(AsyncCollector, None), "staleness", "max_staleness"),
        (partial(ReplayBuffer, *SPACES, 2, "cpu", 0), "capacty", "capacity"),
        (partial(MixedReplay, *SPACES, 2, "cpu", 0), "demonstration", "demonstrations"),
    ],
)
def test_data_envs_collectors_and_replays_name_the_nearest_one_too(make, unknown, nearest):
    name = getattr(make, "func", make).__name__
    with refused(UnknownSettingError, names=(name, unknown, nearest, f"help({name})")):
        make(**{unknown: 1})


def test_keywords_that_a_class_uses_itself_are_not_refused():
    assert Notes(*SPACES, author="me").notes == {"author": "me"}
    assert type("Heir", (Notes,), {})(*SPACES, author="me").notes == {"author": "me"}


def test_the_signature_of_a_class_that_uses_its_keywords_is_read_once(monkeypatch):
    asked, read = [], jsonargparse_private.get_signature_parameters
    monkeypatch.setattr(
        jsonargparse_private, "get_signature_parameters", lambda cls: asked.append(cls) or read(cls)
    )
    heir = type("Heir", (Notes,), {})
    assert "notes" in inspect.signature(heir).parameters
    assert asked == [heir]


def test_each_setting_of_yaml_is_in_the_signature_and_in_help():
    for family in FAMILIES:
        for cls in filter(lambda cls: issubclass(cls, Configurable), subclasses(family)):
            if not issubclass(cls, Notes):
                assert inspect.signature(cls).parameters.keys() == parameters_of(cls).keys(), cls
    assert len(inspect.signature(PPO).parameters) == 24
    assert_names(pydoc.render_doc(PPO, renderer=pydoc.plaintext), "gae_lambda", "learning_rate")
    assert "notes" in inspect.signature(Notes).parameters


def test_an_object_has_the_signature_of_its_call(policy):
    assert "td" in inspect.signature(policy.forward).parameters
    assert not hasattr(policy, "__signature__")
    assert config_of(PPO(policy, gae_lambda=0.9))["init_args"]["gae_lambda"] == 0.9
