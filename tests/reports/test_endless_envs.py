"""An env without a time limit: its evaluation is bounded by the training, and says so."""

from functools import partial

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_rl import GymnasiumEnv
from tests.helpers import train


class Endless(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


gymnasium.register("tests/Endless-v0", Endless)


def test_an_evaluation_without_end_is_cut_and_says_so(tmp_path, capsys):
    def evaluated(name, **data):
        short = {"num_envs": 1, "buffer_size": 16, "total_env_steps": 32, "num_eval_episodes": 2}
        make = partial(GymnasiumEnv, id="tests/Endless-v0")
        module, *_ = train(
            tmp_path / name, env=make, data={**short, **data}, model={"batch_size": 16}
        )
        return module.evaluation

    evaluation = evaluated("a", max_eval_episode_steps=20)
    assert (evaluation["lengths"], evaluation["truncations"], evaluation["cut"]) == ([20, 20], 2, 2)
    said = capsys.readouterr().out
    assert said.count("2 of 2 evaluation episodes were cut after 20 env steps") == 1
    assert evaluated("b", max_eval_episode_steps=None)["lengths"] == [1000, 1000]
