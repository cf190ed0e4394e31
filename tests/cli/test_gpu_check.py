"""The script for machines with a GPU: run small on the CPU, and made to fail."""

import json

import pytest

from tests import helpers


@pytest.fixture
def script(monkeypatch):
    return helpers.script("gpu_check", monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_check_runs_small_on_a_cpu(script, tmp_path):
    status = script.main(["--device", "cpu", "--output", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 0, text
    assert [check["status"] for check in report["checks"]] == ["passed"] * len(script.CHECKS)
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
