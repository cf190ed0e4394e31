"""Modules in the working directory are found by every subcommand, by one rule."""

import importlib.util
import sys
from pathlib import Path

import pytest

from lightning_rl.cli import app, imports
from lightning_rl.cli.checking import check_run
from lightning_rl.cli.first_check import CORE
from lightning_rl.cli.parsing import UsageError
from lightning_rl.system.extensions import SUBCOMMANDS as EXTENSIONS
from tests.messages import refused

MODULE = '''
import gymnasium
from lightning_rl import PPO

class Mine(PPO):
    """An algorithm of one's own."""

gymnasium.register("Mine-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory that no other path leads to."""
    monkeypatch.chdir(tmp_path)
    Path("own_code.py").write_text(MODULE)
    outside = [path for path in sys.path if path not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", outside)
    yield tmp_path
    sys.modules.pop("own_code", None)


@pytest.fixture
def asked(monkeypatch):
    """Return whether the module was found, one entry for each subcommand that was run."""
    found = []

    def look(*args):
        found.append(importlib.util.find_spec("own_code") is not None)

    monkeypatch.setattr(app, "RLCLI", look)
    monkeypatch.setattr(app, "run_subcommand", look)
    return found


@pytest.mark.parametrize("subcommand", [*CORE, *EXTENSIONS])
def test_what_the_user_names_is_found(subcommand, here, asked):
    checkpoint = [] if subcommand in ("fit", "check", "sweep") else ["--ckpt_path", "a.ckpt"]
    config = ["--config", "ppo.yaml"] if subcommand not in EXTENSIONS else []
    trust_code = ["--trust_code", "true"] if checkpoint else []
    app.run([subcommand, *config, *checkpoint, *trust_code])
    assert asked == [True]


@pytest.mark.parametrize("subcommand", EXTENSIONS)
def test_for_a_checkpoint_of_others_it_is_not(subcommand, here, asked):
    app.run([subcommand, "--ckpt_path", "a.ckpt"])
    assert asked == [False]


def test_unless_its_name_is_typed(here):
    for typed, found in (["--data.env.id", "own_code:Mine-v0"], True), (["--x", "y"], False):
        with imports.only_allowed_imports(typed):
            assert (importlib.util.find_spec("own_code") is not None) == found
        sys.path[:] = [path for path in sys.path if path != str(here)]


def test_a_sweep_finds_an_algorithm_and_an_env_beside_it(here, monkeypatch):
    pytest.importorskip("optuna", reason="the extra sweep (optuna) is not installed")
    from lightning_rl.extensions.sweeps import sweep as sweeps

    began = []
    monkeypatch.setattr(sweeps._Sweep, "run", lambda self, *_: began.append(self))
    own = ["--model", "own_code.Mine", "--data.env.id", "own_code:Mine-v0"]
    app.run(["sweep", "--config", "ppo.yaml", *own, "--sweep.seeds", "1"])
    assert len(began) == 1
    assert sys.path.count(str(here)) == 1


def test_a_short_name_for_an_argument_without_a_type_is_refused(here):
    """Its message was that the model must be null."""
    Path("own_code.py").write_text(
        "from lightning_rl import PPO\n"
        "class Own(PPO):\n"
        "    def __init__(self, policy, **kwargs):\n"
        "        super().__init__(policy, **kwargs)\n"
    )
    sys.path.append(str(here))
    with refused(UsageError, names=("model.policy", "ActorCritic", "policy: Policy")):
        check_run(["fit", "--model=own_code.Own", "--model.policy={class_path: ActorCritic}"])
