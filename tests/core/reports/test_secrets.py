"""Secrets in settings of an env: from the environment, and in no file."""

import json
from pathlib import Path

import gymnasium
import pytest
import yaml

from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.envs import GymnasiumEnv
from lightning_rl.envs.gymnasium.making import from_environment
from tests.core.faults.test_trust import SETTINGS
from tests.envs import ScriptedEnv
from tests.helpers import train
from tests.messages import refused

NAME = "tests/TakesToken-v0"


gymnasium.register(NAME, ScriptedEnv, max_episode_steps=20)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TOKEN_OF_A_TEST", "very-secret")


def test_a_secret_reaches_the_env_and_no_file(tmp_path):
    kwargs = {"token": "${TOKEN_OF_A_TEST}"}
    env = GymnasiumEnv(1, id=NAME, env_kwargs=kwargs, vectorization="sync")
    assert env._env.envs[0].unwrapped.token == "very-secret"
    env.close()
    env_of = lambda num_envs: GymnasiumEnv(num_envs, id=NAME, env_kwargs=kwargs)  # noqa: E731
    train(tmp_path, env=env_of, data={"total_env_steps": 64})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert not [path for path in files if b"very-secret" in path.read_bytes()]


def test_trees_are_read_and_all_else_is_left():
    tree = {"a": ["${TOKEN_OF_A_TEST}", 1, None], "b": "$TOKEN_OF_A_TEST", "c": "x${A}"}
    found = from_environment(tree, "env_kwargs")
    assert json.loads(json.dumps(found)) == tree | {"a": ["very-secret", 1, None]}


def test_a_variable_that_is_not_set_is_named():
    with refused(names=("env_kwargs.a.0", "NOT_SET_AT_ALL")):
        from_environment({"a": ["${NOT_SET_AT_ALL}"]}, "env_kwargs")


def test_a_checkpoint_reads_no_variable():
    config = yaml.safe_load(SETTINGS)
    config["data"]["env"]["init_args"]["env_kwargs"] = {"token": "${TOKEN_OF_A_TEST}"}
    with refused(names=("token: ${TOKEN_OF_A_TEST}", "data.env", "--trust_code true")):
        checked_config(yaml.safe_dump(config), Path("policy.ckpt"))
