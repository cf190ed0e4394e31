"""The core alone; `.ci/run` runs this in a copy of the package without extensions."""

from pathlib import Path

import pytest

import lightning_rl
from lightning_rl import load_policy
from lightning_rl.cli.app import run
from tests.messages import assert_names

SMALL = {
    "ppo.yaml": ["--data.total_env_steps=2048"],
    "sac.yaml": [
        "--data.total_env_steps=128",
        "--model.random_env_steps=64",
        "--model.batch_size=64",
    ],
}
EVALUATED = ["--data.num_eval_episodes=1", "--data.max_eval_episode_steps=50"]
HAS_EXTENSIONS = Path(lightning_rl.__file__).with_name("extensions").exists()


@pytest.mark.parametrize("config", SMALL)
def test_it_trains_evaluates_resumes_and_acts(config, own_directory):
    run(["fit", "--config", config, *SMALL[config], *EVALUATED])
    (run_dir,) = Path("outputs").iterdir()
    run(["validate", "--ckpt_path", "last"])
    assert (run_dir / "evaluation.json").exists()
    more = int(SMALL[config][0].partition("=")[2]) * 2
    run(["fit", "--ckpt_path", "last", f"--data.total_env_steps={more}"])
    assert load_policy(run_dir / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize("command", ["record", "export", "check"])
def test_a_command_that_was_left_out_is_named(command, own_directory, capsys):
    if HAS_EXTENSIONS:
        return  # the copy without extensions asks
    with pytest.raises(SystemExit):
        run([command, "--config", "ppo.yaml"])
    assert_names(capsys.readouterr().err, "lightning_rl.extensions.", "left out")
