"""The script that compares speeds: its tables, its clock, and runners of W4; no network, no peer."""

import json
from pathlib import Path

import pytest

from tests.commands import rl_cli as run_script
from tests.helpers import script

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def common(monkeypatch):
    return script("peers/common", monkeypatch)


def test_our_runner_trains_in_envs_of_the_framework(common):
    script = SCRIPTS / "peers" / "ours.py"
    done = run_script("W4-8", "--warmup", "1", "--iterations", "1", program=script)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["env_steps"] == common.WORKLOADS["W4-8"].env_steps
    assert told["computing"]["stepping"] == "StepwiseStepper"
    assert told["start_cpu_seconds"] > 0
