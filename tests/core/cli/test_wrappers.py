"""Wrappers of an env are configured in YAML, with the arguments of their constructors."""

from pathlib import Path

import pytest
import yaml

from lightning_rl.cli.app import run
from tests.helpers import last, load

CASES = {
    "RescaleAction of each entry": {"min_action": [-1], "max_action": [0.1]},
    "FrameStackObservation": {"stack_size": 2, "padding_type": "zero"},
}


pytestmark = pytest.mark.usefixtures("own_directory")


def fit(wrapper):
    env = {"class_path": "GymnasiumEnv", "init_args": {"id": "Pendulum-v1", "wrappers": [wrapper]}}
    data = {"env": env, "num_envs": 2, "buffer_size": 8, "total_env_steps": 16}
    policy = {"class_path": "ActorCritic", "init_args": {"hidden_sizes": [8]}}
    config = {
        "model": {"class_path": "PPO", "init_args": {"policy": policy, "batch_size": 8}},
        "data": data | {"num_eval_episodes": 1, "max_eval_episode_steps": 32, "eval_env": env},
        "trainer": {"accelerator": "cpu", "enable_progress_bar": False, "logger": False},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    run(["fit", "--config", "config.yaml"])
    (run_dir,) = Path("outputs").iterdir()
    return run_dir


@pytest.mark.parametrize("name", CASES)
def test_a_wrapper_with_arguments_trains_and_resumes(name):
    """From the checkpoint's own configuration, whose classes are looked at before."""
    path = f"gymnasium.wrappers.{name.split()[0]}"
    run_dir = fit({"class_path": path, "init_args": CASES[name]})
    written = yaml.safe_load((run_dir / "config.yaml").read_text())
    (wrapper,) = written["data"]["env"]["init_args"]["wrappers"]
    assert wrapper["class_path"] == path
    for key, value in CASES[name].items():
        assert wrapper["init_args"][key] == value
    run(["fit", "--ckpt_path", str(last(run_dir)), "--data.total_env_steps", "32"])
    assert load(last(run_dir))["lightning_rl"]["env_steps"] == 32


@pytest.mark.parametrize("value", ["much", [["a"]]])
def test_what_is_no_number_is_refused(value, capsys):
    init_args = {"min_action": value, "max_action": 1}
    with pytest.raises(SystemExit):
        fit({"class_path": "gymnasium.wrappers.RescaleAction", "init_args": init_args})
    error = capsys.readouterr().err
    assert "min_action" in error
    assert "Traceback" not in error
