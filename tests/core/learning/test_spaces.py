"""Every supported kind of observation and action trains, checkpoints and resumes exactly."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import yaml

from lightning_rl import GymnasiumEnv
from lightning_rl.cli.app import run
from lightning_rl.cli.config_files import shipped_configs
from tests.callbacks import signal_at
from tests.envs import ScriptedEnv, draw
from tests.helpers import assert_same_run, last, train

SPACES = gymnasium.spaces


def play(observation, action):
    """Shows a random tree, takes any action, and ends at random: all by the env's own generator."""

    def check(env):
        assert env.action_space.contains(env.action), env.action

    return ScriptedEnv(
        observation,
        action,
        act=check,
        observe=draw,
        reward=lambda env: float(np.sum(env.action)),
        terminated=lambda env: bool(env.np_random.random() < 0.1),
        length=9,
    )


gymnasium.register("tests/Playground-v0", play)

OBSERVATIONS = {
    "flat": SPACES.Box(-1, 1, (3,), np.float32),
    "double": SPACES.Box(-1, 1, (3,), np.float64),
    "matrix": SPACES.Box(0, 255, (2, 2), np.uint8),
    "bits": SPACES.MultiBinary(3),
    "tree": SPACES.Dict(
        a=SPACES.Box(-1, 1, (2,), np.float64),
        b=SPACES.Dict(c=SPACES.Box(0, 255, (2, 2), np.uint8), d=SPACES.MultiBinary(2)),
    ),
}
ACTIONS = {
    "discrete": SPACES.Discrete(3),
    "discrete from one": SPACES.Discrete(3, start=1),
    "multi-discrete": SPACES.MultiDiscrete([2, 3, 4]),
    "box": SPACES.Box(-1, 1, (2,), np.float32),
    "matrix box": SPACES.Box(-1, 1, (2, 2), np.float32),
}


@pytest.mark.parametrize(
    ("observation", "action"),
    [*((name, "discrete") for name in OBSERVATIONS), *[("flat", name) for name in ACTIONS][1:]],
)
def test_it_trains_and_resumes(observation, action, tmp_path):
    kwargs = {"observation": OBSERVATIONS[observation], "action": ACTIONS[action]}
    env = partial(GymnasiumEnv, id="tests/Playground-v0", env_kwargs=kwargs)
    settings = {"env": env, "policy": {"normalize_observation": True}}
    train(tmp_path / "whole", **settings)
    train(tmp_path / "part", trainer={"callbacks": [signal_at(3)]}, **settings)
    train(tmp_path / "part", ckpt_path=last(tmp_path / "part"), **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "part")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_wrappers_and_env_kwargs_come_from_yaml(vectorization, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(shipped_configs()["ppo.yaml"].read_text())
    config["data"]["env"]["init_args"] = {
        "id": "Blackjack-v1",
        "vectorization": vectorization,
        "env_kwargs": {"sab": True},
        "wrappers": [
            "gymnasium.wrappers.FlattenObservation",
            {"class_path": "gymnasium.wrappers.ClipReward", "init_args": {"min_reward": -0.5}},
        ],
    }
    (tmp_path / "wrapped.yaml").write_text(yaml.safe_dump(config))
    small = ["--data.total_env_steps", "128", "--data.num_eval_episodes", "4"]
    small += ["--data.buffer_size", "8", "--model.batch_size", "32"]
    run(["fit", "--config", "wrapped.yaml", *small])
    run(["validate", "--ckpt_path", "last"])
    assert '"episodes": 4' in next(tmp_path.rglob("evaluation.json")).read_text()
