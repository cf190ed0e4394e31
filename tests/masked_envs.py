"""Gymnasium envs that say what is allowed, and that take actions of several parts."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


class ReportsActionMask(gymnasium.Env):
    """Of five actions only two are allowed, drawn at each step; another is an error. Its infos say which."""

    observation_space, action_space = Box(-1.0, 1.0, (3,)), Discrete(5)

    def __init__(self, empty_at=None, silent_at=None, key="action_mask"):
        self.empty_at, self.silent_at, self.key = empty_at, silent_at, key

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.seen()

    def seen(self):
        self.allowed = np.zeros(5, np.int8)
        if self.age != self.empty_at:
            self.allowed[self.np_random.choice(5, 2, replace=False)] = 1
        said = {} if self.age == self.silent_at else {self.key: self.allowed}
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), said

    def step(self, action):
        assert self.allowed[action] == 1, f"action {action} is not allowed by {self.allowed}"
        self.age += 1
        ended = self.age == 7
        observation, info = self.seen()
        return observation, float(action) / 5, ended, False, info if not ended else {}


PARTS = Dict(
    {
        "arm": Dict({"left": Box(-2.0, 2.0, (2,), np.float64), "right": Box(0.0, 1.0, (1,))}),
        "bits": MultiBinary(3),
        "modes": MultiDiscrete([2, 4], start=[0, 5]),
        "pair": Tuple((Discrete(3, start=-1), Box(-1.0, 1.0, (2, 2)))),
    }
)


class StructuredActionEnv(gymnasium.Env):
    """Wants an action in its own structure, and observes what it was given."""

    observation_space, action_space = Box(-10.0, 10.0, (13,)), PARTS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.np_random.uniform(-1, 1, 13).astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.age += 1
        arm, (choice, grid) = action["arm"], action["pair"]
        parts = (arm["left"], arm["right"], action["bits"], action["modes"], [choice], grid.ravel())
        given = np.concatenate(parts).astype(np.float32)
        return given, float(action["bits"].sum()), self.age == 7, False, {}


gymnasium.register("tests/ReportsActionMask-v0", entry_point=ReportsActionMask)
gymnasium.register("tests/StructuredActionEnv-v0", entry_point=StructuredActionEnv)
