"""Scripts of maintainers run: the checks for machines with a GPU, small on the CPU, and a runner of the comparison of speeds."""

import json
from pathlib import Path

import pytest

from tests.commands import rl_cli as run_script
from tests.helpers import script

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_our_runner_trains_in_envs_of_the_framework(monkeypatch):
    ours = SCRIPTS / "peers" / "ours.py"
    done = run_script("W4-8", "--warmup", "1", "--iterations", "1", program=ours)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["env_steps"] == script("peers/common", monkeypatch).WORKLOADS["W4-8"].env_steps
    assert told["computing"]["stepping"] == "StepwiseStepper"
    assert told["start_cpu_seconds"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_check_runs_small_on_a_cpu(tmp_path, monkeypatch):
    checks = script("gpu_check", monkeypatch)
    status = checks.main(["--device", "cpu", "--output", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 0, text
    assert [check["status"] for check in report["checks"]] == ["passed"] * len(checks.CHECKS)
    for row in (
        "| compiled: PPO compiled and eager | yes |",
        "| steps: steps of CartPole, compiled and eager | yes |",
        "| steps: steps of CartPole replayed as CUDA graphs | - | not on a CPU |",
        "| steps_speed: rollouts of CartPole, 64 envs | - |",
        "| compiled: PPO replayed as CUDA graphs | - | not on a CPU |",
        "| compiled: GRPO replayed as CUDA graphs | - | not on a CPU |",
        "| processes: two ranks, gloo: the ranks | yes | equal bit for bit |",
        "| async: async without lag, and sync | yes | equal bit for bit |",
        "| bf16: PPO bf16-mixed: first ratio | yes |",
        "| w3: W3, 64 envs, eager | yes |",
        "| vla_ppo: vla_ppo.yaml from the clone | - |",
        "not applied: success_rate at least 0.95",
        "| grpo_cart_pole: grpo_cart_pole_task.yaml | - |",
    ):
        assert row in text, row
