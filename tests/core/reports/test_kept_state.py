"""What an env keeps from episode to episode: restored by its own state, or named when a run is resumed."""

import random
import time
import warnings
from contextlib import closing

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl import GymnasiumEnv
from lightning_rl.envs import RestoreError
from lightning_rl.envs.gymnasium import adapter
from lightning_rl.envs.gymnasium.replay import EpisodeChecksums
from tests.envs import ScriptedEnv, draw
from tests.messages import assert_names, refused

SPACE = spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float32), cue=spaces.Discrete(999))


class Keeps(ScriptedEnv):
    """Has a level and a generator of its own, which one part of its answers shows."""

    def __init__(self, shows):
        self.level, self.own, self.shows = 0, random.Random(7), shows
        length = 6 if shows != "nothing" else 5
        super().__init__(
            SPACE, observe=Keeps.seen, reward=Keeps.pay, info=Keeps.told, length=length
        )

    def seen(self):
        cue = self.own.randrange(999) if self.shows == "first observation" and not self.age else 0
        self.level += not self.age
        return draw(self, SPACE) | {"cue": cue}

    def pay(self):
        return {"level": self.level, "own generator": self.own.random()}.get(self.shows, 1.0)

    def told(self):
        shown = {"metric": self.level, "time": time.perf_counter()}.get(self.shows)
        return {"metrics": {"shown": shown}} if shown is not None else {}


class Grows(gymnasium.Wrapper):
    episodes = 0

    def reset(self, **kwargs):
        self.episodes += 1
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, *more = self.env.step(action)
        return observation, reward * self.episodes, *more


class Saves(Keeps):
    def state_dict(self):
        version, numbers, gauss = self.own.getstate()
        return {"level": self.level, "own": [version, list(numbers), gauss]}

    def load_state_dict(self, state):
        version, numbers, gauss = state["own"]
        self.level = state["level"]
        self.own.setstate((version, tuple(numbers), gauss))


class SavesToo(Grows):
    def state_dict(self):
        return {"episodes": self.episodes}

    def load_state_dict(self, state):
        self.episodes = state["episodes"]


gymnasium.register("Keeps-v0", Keeps)
gymnasium.register("Saves-v0", Saves)


def played(env, steps):
    return [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(steps)]


def resumed(tmp_path, shows, id="Keeps-v0", steps=28, **kwargs):
    """Return the rewards after `steps`, and those of an env that is restored there."""
    kwargs = {"id": id, "env_kwargs": {"shows": shows}} | kwargs
    with closing(GymnasiumEnv(2, **kwargs)) as env, closing(GymnasiumEnv(2, **kwargs)) as other:
        env.reset(seed=1)
        played(env, steps)
        torch.save(env.state_dict(), tmp_path / "state")
        other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        return [[step[1].tolist() for step in played(one, 9)] for one in (env, other)]


CURE = ("state_dict", "load_state_dict", "np_random")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("shows", "differs"),
    [
        ("level", "reward"),
        ("own generator", "reward"),
        ("first observation", "observation.cue"),
        ("metric", "metrics.shown"),
        ("time", "metrics.shown"),
    ],
)
def test_a_replay_that_differs_is_named(shows, differs, vectorization, tmp_path):
    with refused(UserWarning, names=("'Keeps-v0'", differs, *CURE)):
        resumed(tmp_path, shows, vectorization=vectorization)


def test_what_a_wrapper_keeps_is_named(tmp_path):
    with refused(UserWarning, names=("reward", *CURE)):
        resumed(tmp_path, "constant", wrappers=[Grows])


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("shows", ["level", "own generator", "first observation", "metric"])
def test_an_env_with_a_state_goes_on_exactly(shows, vectorization, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, rest = resumed(
            tmp_path, shows, "Saves-v0", vectorization=vectorization, wrappers=[SavesToo]
        )
    assert rest == whole


@pytest.mark.parametrize("steps", [0, 1, 29, 30, 31])
def test_an_env_that_keeps_nothing_is_restored_without_a_word(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "FOLD_STEPS", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, rest = resumed(tmp_path, "nothing", steps=steps)
    assert rest == whole


def test_a_state_of_an_older_version_has_no_checksums(tmp_path):
    with closing(GymnasiumEnv(2, "Keeps-v0", env_kwargs={"shows": "level"})) as env:
        env.reset(seed=1)
        played(env, 20)
        state = env.state_dict()
        for episode in state["episodes"]:
            del episode["checksums"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env.load_state_dict(state)


def test_another_last_observation_names_the_cure(tmp_path):
    env = GymnasiumEnv(1, "Keeps-v0", env_kwargs={"shows": "nothing"})
    env.reset(seed=1)
    state = env.state_dict()
    state["observation"]["x"] += 1
    with pytest.raises(RestoreError) as caught:
        env.load_state_dict(state)
    assert_names(caught.value, *CURE)


@pytest.mark.parametrize("fold_steps", [1, 7, 1024])
def test_checksums_of_a_batch_are_those_of_each_env(fold_steps):
    """Whenever they are summed up, and whatever an observation is."""
    rng = np.random.default_rng(0)
    batch, alone = EpisodeChecksums(3), []
    seen = {"x": rng.normal(size=(3, 2)), "picture": rng.integers(0, 255, (3, 16, 16, 3))}
    batch.begin(seen)

    def row(i):
        return {key: array[i : i + 1].copy() for key, array in seen.items()}

    for i in range(3):
        alone.append(EpisodeChecksums(1))
        alone[i].begin(row(i))
    for t in range(40):
        for array in seen.values():
            array[...] = rng.integers(0, 255, array.shape)
        reward, done = rng.normal(size=3), rng.random(3) < 0.1
        told = {"metrics": {"m": np.where(rng.random(3) < 0.5, np.nan, t)}} if t % 3 else None
        batch.add(seen, reward, told, done if done.any() else None)
        if t % fold_steps == 0:
            batch.fold()
        for i in range(3):
            own = None if told is None else {"metrics": {"m": told["metrics"]["m"][i : i + 1]}}
            if done[i]:
                alone[i].begin(row(i))
            else:
                alone[i].add(row(i), reward[i : i + 1], own, None)
    assert batch.values() == [one.values()[0] for one in alone]
    assert set().union(*batch.values()) >= {"observation.x", "observation.picture", "reward"}
