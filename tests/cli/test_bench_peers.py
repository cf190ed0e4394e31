"""The script that compares speeds: its tables, its clock, and runners of W4; no network, no peer."""

import json
import sys
from pathlib import Path

import pytest

from tests.commands import rl_cli as run_script
from tests.helpers import script

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch):
    return script("bench_peers", monkeypatch)


@pytest.fixture
def common(monkeypatch):
    return script("peers/common", monkeypatch)


def test_every_workload_is_described_and_every_library_can_run(bench, common):
    assert set(bench.ALL) == set(bench.ABOUT) == set(common.WORKLOADS)
    assert set(bench.W4) == set(common.W4)
    for library in bench.LIBRARIES.values():
        assert (SCRIPTS / "peers" / library.script).is_file()
        assert library.venv in bench.REQUIREMENTS
        assert set(library.workloads) <= set(bench.ALL)
        assert library.uncompiled in ("", *bench.LIBRARIES)


RUNNER = """
import json, os, pathlib
graphs = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
filled = graphs.exists()
graphs.mkdir(parents=True, exist_ok=True)
print(json.dumps({"sps": 1.0, "filled": filled}))
"""


def test_graphs_are_compiled_anew_in_the_first_repeat_alone(bench, tmp_path, monkeypatch):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "ours.py").write_text(RUNNER)
    monkeypatch.setattr(bench, "HERE", tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    pythons = {bench.OURS: Path(sys.executable)}

    def filled(repeat):
        result = bench.run("lightning_rl-compiled", "W4-8", repeat, pythons, tmp_path)
        assert "error" not in result
        return result["filled"]

    assert [filled(repeat) for repeat in (0, 1, 0)] == [False, True, False]


def test_a_block_of_iterations_is_shared_out_to_them_and_what_was_before_is_not(
    common, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["runner", "W4-8", "--warmup", "2", "--iterations", "4"])
    monkeypatch.setattr(common.os, "sched_setaffinity", lambda *_: None, raising=False)
    clock = common.Clock(common.parse(("W4-8",), torch=False))
    seconds = iter([10.0, 20.0, 24.0, 26.0])
    monkeypatch.setattr(clock, "now", lambda: next(seconds))
    clock.start()
    for _ in range(3):
        clock.end_iterations(2)
    clock.report("name", "numpy")
    told = json.loads(capsys.readouterr().out)
    assert clock.ends == [10.0, 15.0, 20.0, 22.0, 24.0, 25.0, 26.0]
    assert told["env_steps"] == 4 * 8 * 128
    assert told["sps"] == pytest.approx(4 * 8 * 128 / 6.0)


def test_our_runner_trains_in_envs_of_the_framework(common):
    script = SCRIPTS / "peers" / "ours.py"
    done = run_script("W4-8", "--warmup", "1", "--iterations", "1", program=script)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["env_steps"] == common.WORKLOADS["W4-8"].env_steps
    assert told["computing"]["stepping"] == "StepwiseStepper"
    assert told["start_cpu_seconds"] > 0
