"""`RLDataModule` takes an env in each form in which it may be given in Python, or says what to pass."""

from functools import partial

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from lightning_rl import (
    ActionChunk,
    CartPole,
    ConfigurationError,
    GymnasiumEnv,
    PushCube,
    RLDataModule,
)
from lightning_rl.envs.factories import TASKS
from tests.messages import refused

ALLOWED = (
    "Pass the id of a Gymnasium env ('CartPole-v1'), a task of this package (PushCube), "
    "partial(GymnasiumEnv, id='CartPole-v1', ...), or a function of the number of envs that returns "
    "a VectorEnv."
)
MADE = "that exists already, but training and evaluation make their own envs."
ALONE = "data.env cannot be called with the number of envs alone:"
REGISTER = (
    "Register it, gymnasium.register('CartPoleEnv-v0', CartPoleEnv, max_episode_steps=...), and pass "
    "its id, 'CartPoleEnv-v0'."
)


def sized(num_envs):
    return CartPole(num_envs)


class Sized:
    def __call__(self, num_envs):
        return CartPole(num_envs)


WORKS = {
    "an id": ("CartPole-v1", GymnasiumEnv),
    "an id of a module": ("gymnasium.envs.classic_control:CartPole-v1", GymnasiumEnv),
    "an id of ours": ("lightning_rl/PushCube-v0", GymnasiumEnv),
    "a task": ("PushCube", PushCube),
    "a class": (CartPole, CartPole),
    "a partial": (partial(GymnasiumEnv, id="CartPole-v1"), GymnasiumEnv),
    "a partial of a function": (partial(sized), CartPole),
    "a function": (sized, CartPole),
    "a lambda": (lambda count: CartPole(count), CartPole),
    "a lambda with a default": (lambda n, steps=9: CartPole(n, max_episode_steps=steps), CartPole),
    "a lambda of anything": (lambda *args, **kwargs: CartPole(*args, **kwargs), CartPole),
    "an object": (Sized(), CartPole),
}


@pytest.mark.parametrize("name", WORKS)
def test_it_works_for_training_and_evaluation(name):
    given, kind = WORKS[name]
    data = RLDataModule(given, num_envs=3, num_eval_episodes=2)
    assert type(data._env) is kind
    assert (data._env.num_envs, data.eval_env.num_envs) == (3, 2)
    assert type(data.eval_env) is kind
    data.close()


@pytest.mark.parametrize("name", TASKS)
def test_each_task_goes_by_its_name(name):
    data = RLDataModule(name, num_envs=2)
    assert type(data._env).__name__ == name
    data.close()


def closed(env):
    env.close()
    return env


REFUSED = {
    "a misspelt id": (
        lambda: "CartPole-v9",
        "data.env is 'CartPole-v9', which is neither the id of a Gymnasium env nor a task of this package (CartPole, "
        "CartPoleSwingUp, PointMass, PushBlocks, PushCube); close matches: CartPole-v1, CartPole-v0, CartPole, phys2d/CartPole-v1. "
        "For an env of another package name the package that registers it: my_package:Name-v0.",
    ),
    "an env": (
        lambda: closed(gymnasium.make("CartPole-v1")),
        f"data.env is a CartPoleEnv {MADE} Pass its factory: its id, 'CartPole-v1'.",
    ),
    "an env with settings": (
        lambda: closed(gymnasium.make("CartPole-v1", sutton_barto_reward=True)),
        f"data.env is a CartPoleEnv {MADE} Pass its factory: partial(GymnasiumEnv, id='CartPole-v1', "
        f"env_kwargs={{'sutton_barto_reward': True}}).",
    ),
    "an env without an id": (CartPoleEnv, f"data.env is a CartPoleEnv {MADE} {REGISTER}"),
    "a vector env of Gymnasium": (
        lambda: closed(gymnasium.make_vec("CartPole-v1", 2)),
        f"data.env is a CartPoleVectorEnv {MADE} Pass its factory: its id, 'CartPole-v1'.",
    ),
    "a torch env": (
        lambda: CartPole(2),
        f"data.env is a CartPole {MADE} Pass its factory: CartPole, or partial(CartPole, ...) with its settings.",
    ),
    "an adapted env": (
        lambda: closed(GymnasiumEnv(2, "CartPole-v1")),
        f"data.env is a GymnasiumEnv {MADE} Pass its factory: its id, 'CartPole-v1'.",
    ),
    "a class of Gymnasium": (
        lambda: CartPoleEnv,
        f"data.env is the class CartPoleEnv, which is no VectorEnv. {REGISTER}",
    ),
    "a class of something else": (
        lambda: dict,
        f"data.env is the class dict, which is no VectorEnv. {ALLOWED}",
    ),
    "a class that wants more": (
        lambda: ActionChunk,
        f"{ALONE} missing a required argument: 'env'. Pass partial(ActionChunk, env=...).",
    ),
    "a partial that wants more": (
        lambda: partial(GymnasiumEnv, vectorization="async"),
        f"{ALONE} missing a required argument: 'id'. Pass partial(GymnasiumEnv, "
        "vectorization='async', id=...).",
    ),
    "a partial without names": (
        lambda: partial(GymnasiumEnv, "CartPole-v1"),
        "data.env is a partial of GymnasiumEnv with positional arguments, but the first argument of an env is "
        "num_envs. Pass them by name: partial(GymnasiumEnv, id=...).",
    ),
    "a partial with a number": (
        lambda: partial(GymnasiumEnv, id="CartPole-v1", num_envs=4),
        "data.env is a partial of GymnasiumEnv that sets num_envs. Remove num_envs there, and set num_envs=... and "
        "num_eval_envs=... of RLDataModule.",
    ),
    "a lambda without arguments": (
        lambda: lambda: CartPole(2),
        f"{ALONE} too many positional arguments. Pass a function of one argument: lambda num_envs: "
        "GymnasiumEnv(num_envs, id='CartPole-v1').",
    ),
    "a lambda of two": (
        lambda: lambda num_envs, id: None,
        f"{ALONE} missing a required argument: 'id'. Pass a function of one argument: lambda num_envs: "
        "GymnasiumEnv(num_envs, id='CartPole-v1').",
    ),
    "a lambda that makes one": (
        lambda: lambda num_envs: gymnasium.make("CartPole-v1"),
        "data.env returned a CartPoleEnv, which is no VectorEnv of this package. Pass its "
        "factory: its id, 'CartPole-v1'.",
    ),
    "a lambda that makes nothing": (
        lambda: lambda num_envs: None,
        f"data.env returned a NoneType, which is no VectorEnv of this package. {ALLOWED}",
    ),
    "a lambda that makes others": (
        lambda: lambda num_envs: CartPole(2),
        "data.env returned 2 envs, but 3 were requested. The function must make as many envs as its argument says.",
    ),
    "a number": (lambda: 3, f"data.env is 3, which makes no envs. {ALLOWED}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_pass(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigurationError) as refusal:
        RLDataModule(make(), num_envs=3)
    assert str(refusal.value) == message


def test_the_env_of_the_evaluation_is_taken_alike():
    data = RLDataModule("CartPole-v1", num_envs=2, eval_env="CartPole-v0")
    assert data.eval_env.id == "CartPole-v0"
    data.close()
    with refused(names=("data.eval_env", "3", "'CartPole-v1'", "PushCube")):
        RLDataModule("CartPole-v1", eval_env=3)
