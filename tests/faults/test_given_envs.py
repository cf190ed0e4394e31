"""`RLDataModule` takes an env in each form in which it may be given in Python, or says what to pass."""

from functools import partial

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from lightning_rl import ActionChunk, CartPole, GymnasiumEnv, PushCube, RLDataModule
from tests.messages import refused

KINDS = ("'CartPole-v1'", "PushCube", "partial(GymnasiumEnv, id='CartPole-v1', ...)", "VectorEnv")
REGISTER = ("CartPoleEnv", "gymnasium.register('CartPoleEnv-v0', CartPoleEnv", "'CartPoleEnv-v0'")
A_LAMBDA = "lambda num_envs: GymnasiumEnv(num_envs, id='CartPole-v1')"


def sized(num_envs):
    return CartPole(num_envs)


class Sized:
    def __call__(self, num_envs):
        return CartPole(num_envs)


WORKS = {
    "an id": ("CartPole-v1", GymnasiumEnv),
    "an id of ours": ("lightning_rl/PushCube-v0", GymnasiumEnv),
    "a task": ("PushCube", PushCube),
    "a class": (CartPole, CartPole),
    "a partial": (partial(GymnasiumEnv, id="CartPole-v1"), GymnasiumEnv),
    "a function": (sized, CartPole),
    "a lambda with a default": (lambda n, steps=9: CartPole(n, max_episode_steps=steps), CartPole),
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


def closed(env):
    env.close()
    return env


REFUSED = {
    "a misspelt id": (lambda: "CartPole-v9", ("'CartPole-v9'", "close matches: CartPole-v1", "PushCube", "my_package:Name-v0")),
    "an env": (lambda: closed(gymnasium.make("CartPole-v1")), ("CartPoleEnv", "'CartPole-v1'")),
    "an env with settings": (
        lambda: closed(gymnasium.make("CartPole-v1", sutton_barto_reward=True)),
        ("CartPoleEnv", "id='CartPole-v1', env_kwargs={'sutton_barto_reward': True})"),
    ),
    "an env without an id": (CartPoleEnv, REGISTER),
    "a vector env of Gymnasium": (lambda: closed(gymnasium.make_vec("CartPole-v1", 2)), ("CartPoleVectorEnv", "'CartPole-v1'")),
    "a torch env": (lambda: CartPole(2), ("CartPole", "partial(CartPole, ...)")),
    "a class of Gymnasium": (lambda: CartPoleEnv, REGISTER),
    "a class that wants more": (lambda: ActionChunk, ("'env'", "partial(ActionChunk, env=...)")),
    "a partial that wants more": (
        lambda: partial(GymnasiumEnv, vectorization="async"),
        ("'id'", "partial(GymnasiumEnv, vectorization='async', id=...)"),
    ),
    "a partial with a number": (
        lambda: partial(GymnasiumEnv, id="CartPole-v1", num_envs=4),
        ("num_envs=...", "num_eval_envs=...", "RLDataModule"),
    ),
    "a lambda without arguments": (lambda: lambda: CartPole(2), A_LAMBDA),
    "a lambda that makes one": (lambda: lambda num_envs: gymnasium.make("CartPole-v1"), ("CartPoleEnv", "'CartPole-v1'")),
    "a lambda that makes nothing": (lambda: lambda num_envs: None, ("NoneType", *KINDS)),
    "a lambda that makes others": (lambda: lambda num_envs: CartPole(2), ("2 envs", "3")),
    "a number": (lambda: 3, ("3", *KINDS)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_pass(name):
    make, names = REFUSED[name]
    given = make()
    with refused(names=("data.env", *([names] if isinstance(names, str) else names))):
        RLDataModule(given, num_envs=3)


def test_the_env_of_the_evaluation_is_taken_alike():
    data = RLDataModule("CartPole-v1", num_envs=2, eval_env="CartPole-v0")
    assert data.eval_env.id == "CartPole-v0"
    data.close()
    with refused(names=("data.eval_env", "3", "'CartPole-v1'", "PushCube")):
        RLDataModule("CartPole-v1", eval_env=3)
