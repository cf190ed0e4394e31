"""Spaces, wrappers and signatures that cannot be trained on: refused by name, before anything runs."""

import re
import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lightning_rl import ActorCritic, DictEncoder, GymnasiumEnv, RLDataModule, check_env
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.envs.factories import make_env
from tests.messages import refused
from tests.reports.odd import Odd, making, odd
from tests.variants import after, variant


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            spaces.Box(0, 1000, (3,), np.uint64),
            ("observation space", "uint64", "int64, or float32"),
        ),
        (
            spaces.Box(-1, 1, (0,)),
            ("observation space", "(0,)", "gymnasium.wrappers.TransformObservation"),
        ),
        (spaces.Dict({"a": spaces.Box(-1, 1, (2, 0))}), ("observation.a", "(2, 0)")),
        (spaces.Dict({0: spaces.Box(-1, 1, (2,))}), ("key 0", "observation space", "('0')")),
    ],
)
def test_an_observation_space_that_no_rollout_holds_is_named(space, message):
    with refused(names=message):
        make_env(making(observed=space), 1, "data.env")


def test_an_action_space_of_no_numbers_is_named():
    with refused(names=("data.env", "action space", "gymnasium.wrappers.TransformAction")):
        make_env(making(acts=spaces.Box(-1, 1, (0,))), 1, "data.env")


@pytest.mark.parametrize("keys", [("robot.pos", "robot.vel"), ("keys", "type", "training")])
def test_any_text_is_a_key(keys):
    space = spaces.Dict({key: spaces.Box(-1, 1, (2,)) for key in keys})
    data = RLDataModule(making(observed=space), num_envs=1)
    policy = ActorCritic(data.observation_space, data.action_space, encoder=DictEncoder)
    assert run_episodes(policy, data.eval_env, [1])[0]["length"] == 7
    data.close()
    assert not [f for f in check_env(making(observed=space), 1, seconds=0.05) if f.level == "error"]


@pytest.mark.parametrize(
    "wrapper",
    [
        gymnasium.wrappers.NormalizeObservation,
        gymnasium.wrappers.NormalizeReward,
        gymnasium.wrappers.Autoreset,
    ],
)
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_wrapper_that_keeps_statistics_or_resets_is_named(wrapper, vectorization):
    with refused(names=wrapper.__name__):
        GymnasiumEnv(1, "CartPole-v1", wrappers=[wrapper], vectorization=vectorization)


def four_things(env, result, action):
    observation, reward, terminated, _, info = result
    return observation, reward, terminated, info


OLD = {
    variant(
        Odd, "Old", reset=lambda env: np.zeros(3)
    ): r"Old\.reset does not take seed and options",
    variant(
        Odd, "NoOptions", reset=lambda env, seed=None: Odd.reset(env, seed=seed)
    ): r"NoOptions\.reset does not take options",
    after(
        Odd, "ObservationAlone", reset=lambda env, result, **_: result[0]
    ): "from reset, not observation and info",
    after(Odd, "FourThings", step=four_things): "returned 4 things from step",
}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("wrappers", [(), (gymnasium.wrappers.FlattenObservation,)])
@pytest.mark.parametrize("cls", OLD)
def test_an_env_of_an_old_gym_is_one_message(cls, wrappers, vectorization):
    name = f"tests/{cls.__name__}-v0"
    if name not in gymnasium.registry:
        gymnasium.register(name, cls, max_episode_steps=10)
    make = partial(GymnasiumEnv, id=name, wrappers=wrappers, vectorization=vectorization)
    found = check_env(make, 1, seconds=0.05)
    assert re.search(OLD[cls], next(f.text for f in found if f.level == "error"))


def test_a_speed_that_is_left_open_is_the_usual_one(monkeypatch):
    monkeypatch.setattr(Odd, "metadata", {"render_modes": [], "render_fps": None})
    assert odd().render_fps == 30.0


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_settings_that_can_be_neither_copied_nor_pickled_are_taken(vectorization):
    env = odd(vectorization, lock=threading.Lock())
    env.reset(seed=1)
    assert env.max_episode_steps == 20
    env.close()
