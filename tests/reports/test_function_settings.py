"""A setting that takes a function, and an env that a module registers: the message names the reason and the cure."""

import sys

import gymnasium
import pytest

from lightning_rl import RLDataModule
from lightning_rl.cli.checking import check_run
from lightning_rl.envs import GymnasiumEnv
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.training.callbacks.settings import _add_module, _changed
from tests.messages import assert_names, refused

MODULES = {
    "needs_isaac": "import isaaclab_of_nobody\ndef walker(n): ...\n",
    "a_class": "class Walker:\n    def __init__(self, num_envs): ...\n",
    "good": "def walk(n): ...\nnumber = 3\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("setting", ["make", "report"])
@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("no_module.walker", ["no module 'no_module'"]),
        ("needs_isaac.walker", ["isaaclab_of_nobody", "not installed"]),
        ("good.wak", ["good", "wak", "close matches: walk"]),
        ("good.number", ["function", "3"]),
        ("a_class.Walker", ["class", "def make"]),
        ("walk", ["my_module.my_function", "walk"]),
        ("a..b", ["my_module.my_function"]),
    ],
)
def test_the_reason_for_which_a_function_is_refused(setting, function, names):
    env = (
        "--data.env=TensorSimulator",
        "--data.env.make=good.walk",
        f"--data.env.{setting}={function}",
    )
    with refused(names=(f"data.env.{setting}", function, *names)):
        check_run(["fit", "--model=PPO", "--model.policy=ActorCritic", *env])


def test_an_id_that_a_module_registers_is_stored_with_its_module(monkeypatch):
    """A later process imports nothing of the script, and could not validate its run."""
    monkeypatch.setattr(gymnasium, "registry", dict(gymnasium.registry))
    monkeypatch.setattr("gymnasium.envs.registration.registry", gymnasium.registry)
    monkeypatch.setattr("lightning_rl.checkpoints.registry.gymnasium.registry", gymnasium.registry)
    gymnasium.register("Mine-v0", "my_game.envs:Game")
    gymnasium.register("Script-v0", type("Game", (gymnasium.Env,), {"__module__": "__main__"}))
    ids = {
        "Mine-v0": "my_game.envs:Mine-v0",
        "CartPole-v1": "CartPole-v1",
        "other:Mine-v0": "other:Mine-v0",
    }
    for id, stored in (ids | {"Script-v0": "Script-v0"}).items():
        env = {"class_path": "lightning_rl.GymnasiumEnv", "init_args": {"id": id}}
        chunks = {"class_path": "lightning_rl.ActionChunk", "init_args": {"env": env}}
        found = _changed({"env": chunks, "eval_env": env, "num_envs": 3}, _add_module)
        assert found["eval_env"]["init_args"]["id"] == stored
        assert found["env"]["init_args"]["env"]["init_args"]["id"] == stored


def test_an_unknown_id_names_the_form_with_its_module():
    for make in (
        lambda: GymnasiumEnv(1, id="Nobodys-v0"),
        lambda: RLDataModule("Nobodys-v0").setup("fit"),
    ):
        with pytest.raises(ConfigurationError) as error:
            make()
        assert_names(error.value, "Nobodys-v0")
        assert ":Nobodys-v0" in str(error.value) or "my_package:Name-v0" in str(error.value)
