"""Envs that return odd things, for the reports about envs."""

from functools import partial

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_rl import GymnasiumEnv

ACTS = spaces.Discrete(2)
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


class Odd(gymnasium.Env):
    """Seven steps of reward 1; say by keywords of `make` what is odd about it."""

    def __init__(self, observed=BOX, acts=ACTS, first=None, **said):
        self.observation_space, self.action_space = observed, acts
        self._first, self._said = first, {"reward": 1.0, "info": {}, **said}
        self.t = 0

    def observe(self, later):
        observation = self._said.get("obs") if later else self._first
        if observation is None:
            self.observation_space.seed(int(self.np_random.integers(2**30)))
            return self.observation_space.sample()
        return observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(False), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, getattr(action, "dtype", None))
        self.t += 1
        late = self.t > self._said.get("after", 0)
        said = self._said if late else {"reward": 1.0, "info": {}}
        terminated = said.get("terminated", self.t >= 7) if late else False
        truncated = said.get("truncated", False)
        return self.observe(late), said["reward"], terminated, truncated, said["info"]


ID = "tests/Odd-v0"
gymnasium.register(ID, Odd, max_episode_steps=20)


def odd(vectorization="sync", num_envs=1, **kwargs):
    return GymnasiumEnv(num_envs, ID, env_kwargs=kwargs, vectorization=vectorization)


def making(vectorization="sync", **kwargs):
    return partial(GymnasiumEnv, id="tests/Odd-v0", env_kwargs=kwargs, vectorization=vectorization)
