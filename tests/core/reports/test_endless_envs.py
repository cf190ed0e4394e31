"""An env without a time limit: its evaluation is bounded by the training, and says so."""

from functools import partial

import gymnasium

from lightning_rl import GymnasiumEnv
from tests.envs import ScriptedEnv
from tests.helpers import train

gymnasium.register("tests/Endless-v0", partial(ScriptedEnv, reward=1.0))


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
