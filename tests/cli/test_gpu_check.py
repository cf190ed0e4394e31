"""The script for machines with a GPU: run small on the CPU, and made to fail."""

import ast
import json
import os
from pathlib import Path

import pytest

from tests import helpers
from tests.messages import assert_names

SCRIPTS = Path(__file__).parents[2] / "scripts"

MADE_UP = """
import os, signal, time

def fine(findings):
    findings.add("sum", True, "2", "2", raw=2)

def too_low(findings):
    findings.add("success", False, ".90 | rounded", "at least .95")

def raises(findings):
    findings.add("before", True, "done")
    raise ValueError(f"what went wrong on {findings.device}")

def rl_cli(findings):
    raise SystemExit(1)

def dies(findings):
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(findings):
    findings.add("before", True, "done")
    time.sleep(600)
"""


@pytest.fixture
def script(monkeypatch):
    return helpers.script("gpu_check", monkeypatch)


@pytest.fixture
def made_up(script, tmp_path, monkeypatch):
    """Return what runs checks of a module that is written here, and gives status and report."""
    (tmp_path / "made_up.py").write_text(MADE_UP)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)

    def run(*names, options=()):
        checks = [script.Check(name, f"made_up:{name}", f"About {name}", 5.0) for name in names]
        output = tmp_path / "out"
        status = script.main(["--device", "cpu", "--output", str(output), *options], checks)
        report = json.loads((output / "report.json").read_text())
        found = {check["name"]: check for check in report["checks"]}
        return status, found, (output / "report.md").read_text()

    return run


def test_all_checks_are_listed_and_are_functions(script, capsys):
    assert script.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [check.name for check in script.CHECKS]
    for check in script.CHECKS:
        module, function = check.target.split(":")
        tree = ast.parse((SCRIPTS / "gpu" / f"{module}.py").read_text())
        assert function in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]


def test_what_fails_is_reported_with_its_traceback_and_the_others_run(made_up):
    status, found, text = made_up("raises", "too_low", "rl_cli", "dies", "fine")
    assert status == 1
    assert {name: check["status"] for name, check in found.items()} == {
        "raises": "failed",
        "too_low": "failed",
        "rl_cli": "failed",
        "dies": "failed",
        "fine": "passed",
    }
    assert "| raises: before | yes | done |" in text, "what it had found is kept"
    assert "| raises | NO | exit code 1: ValueError: what went wrong on cpu |" in text
    assert "## raises failed" in text
    assert "Traceback (most recent call last)" in text
    assert 'raise ValueError(f"what went wrong on {findings.device}")' in text
    assert "| too_low: success | NO | .90 \\| rounded | at least .95 |" in text
    assert "| rl_cli | NO | exit code 1: RuntimeError: rl-cli left with status 1 |" in text
    assert "| dies | NO | ended by SIGKILL |" in text
    assert "| fine: sum | yes | 2 | 2 |" in text
    assert found["fine"]["rows"][0]["numbers"] == {"raw": 2}
    assert "1 passed, 4 failed, 0 not run" in text


def test_what_hangs_is_ended_and_says_where(made_up):
    status, found, text = made_up("hangs", "fine", options=["--timeout", "2"])
    assert status == 1
    assert_names(found["hangs"]["error"], "2 s")
    assert "| hangs: before | yes | done |" in text
    assert 'made_up.py", line' in found["hangs"]["output"], "where it hung"
    assert found["fine"]["status"] == "passed"


def test_what_no_longer_fits_is_not_run_and_is_named_with_the_command(made_up):
    status, found, text = made_up("fine", options=["--time-limit", "0.5"])
    assert status == 0
    assert found["fine"]["status"] == "not run"
    assert "| fine | not run |" in text
    assert "`scripts/gpu_check.py --only fine`" in text


@pytest.fixture
def steps_of(monkeypatch, tmp_path, traced_only):
    """Return what compares compiled steps to eager ones, small, and gives its rows."""
    names = ("equality", "findings")
    equality, findings = (helpers.script(f"gpu/{name}", monkeypatch) for name in names)

    def rows():
        report = findings.Findings("cpu", True, tmp_path)
        equality.steps(report)
        return report.rows

    return rows


def test_compiled_steps_are_compared_with_eager_ones_over_ends_and_new_starts(steps_of):
    equal, replayed = steps_of()
    assert equal["passed"] is True, equal["figure"]
    assert equal["numbers"]["ended"] > 16, "each env has had a new start"
    assert_names(replayed["figure"], "CPU")


def test_compiled_steps_that_differ_are_found(steps_of, monkeypatch):
    from lightning_rl.compiled.steps import StepWriter

    take = StepWriter._run_from

    def disturbed(self, t, *rest):
        self.steps.carry["state", "position"].add_(1e-3)
        return take(self, t, *rest)

    monkeypatch.setattr(StepWriter, "_run_from", disturbed)
    equal, _ = steps_of()
    assert equal["passed"] is False


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
