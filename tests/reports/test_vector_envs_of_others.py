"""Vector envs of other libraries are refused by one message, wherever they are given."""

from functools import partial

import gymnasium
import numpy as np
import pytest

from lightning_rl import RLDataModule, TensorSimulator
from tests.envs import ScriptedEnv
from tests.messages import refused

SPACE = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
GYMNASIUM, VECTOR = (gymnasium.Env,), (gymnasium.vector.VectorEnv,)
KINDS = {
    "DummyVecEnv": ((), "num_envs step_async step_wait env_is_wrapped", "vectorization='async'"),
    "BraxEnv": ((), "observation_size action_size backend", "TensorSimulator"),
    "TorchRLEnv": ((), "observation_spec action_spec rollout", "TensorSimulator"),
    "Pool": (GYMNASIUM, "async_reset recv send", "EnvPoolEnv"),
    "NewPool": (VECTOR, "async_reset recv send num_envs spec", "EnvPoolEnv"),
    "RslEnv": ((), "num_envs num_actions get_observations device", "RslRlVecEnv"),
    "ManagerBasedRLEnv": (GYMNASIUM, "num_envs single_action_space", "TensorSimulator"),
    "OwnVector": (VECTOR, "num_envs", "vector_entry_point=OwnVector"),
}


@pytest.fixture(params=KINDS)
def kind(request):
    """Return a class that looks like one of another library, and the name of its cure."""
    bases, names, cure = KINDS[request.param]
    spaces = {"observation_space": SPACE, "action_space": SPACE}
    return type(request.param, bases, dict.fromkeys(names.split(), 4) | spaces), cure


def test_a_vector_env_of_another_library_is_one_message(kind):
    cls, cure = kind
    for given in (cls, cls(), lambda num_envs: cls()):
        with refused(names=("data.env", cls.__name__, cure)):
            RLDataModule(given)


def test_a_vector_env_that_is_registered_as_a_single_env_is_the_same_message(kind):
    cls, cure = kind
    gymnasium.register(f"{cls.__name__}-v0", cls)
    with refused(names=(f"{cls.__name__}-v0", cure)):
        RLDataModule(f"{cls.__name__}-v0")


@pytest.mark.parametrize("name", ["DummyVecEnv", "RslEnv", "BraxEnv"])
def test_a_simulator_that_is_a_vector_env_of_another_library_is_the_same_message(name):
    _, names, cure = KINDS[name]
    cls = type(name, (), dict.fromkeys(names.split(), 8) | {"device": "cpu"})
    with refused(names=(name, cure)):
        RLDataModule(partial(TensorSimulator, make=lambda num_envs: cls()))


def test_a_single_env_with_such_attributes_is_no_vector_env():
    names = ["send", "recv", "observation_size", "action_size", "get_observations", "num_actions"]
    gymnasium.register("SingleEnv-v0", partial(ScriptedEnv, length=3, **dict.fromkeys(names, 2)))
    RLDataModule("SingleEnv-v0").close()
