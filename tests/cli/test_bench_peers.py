"""The script that compares speeds: its tables, its clock, and runners of W4; no network, no peer."""

import importlib
import json
import os
import sys
import types
from pathlib import Path

import pytest

from tests.commands import rl_cli as run_script
from tests.helpers import script
from tests.messages import refused

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


def test_the_requirements_of_rejax_are_pinned(bench):
    assert all("==" in requirement for requirement in bench.REQUIREMENTS["rejax"])


def row(name, repeat, sps, cpu_rate, start, **more):
    told = {"sps": sps, "steps_per_cpu_second": cpu_rate, "start_cpu_seconds": start}
    of = {"name": name, "library": name, "version": "1", "key": "W4-8", "repeat": repeat}
    return of | told | {"peak_rss_mb": 100.0} | more


def cells_of(lines, name):
    (line,) = [line for line in lines if line.startswith((f"| {name} ", f"| **{name}** "))]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_w4_tells_first_starts_from_later_ones_and_what_compiling_costs(bench):
    lines = bench.table(
        "W4-8",
        [
            row("lightning_rl", 0, 10.0, 20.0, 4.0),
            row("lightning_rl-compiled", 0, 90.0, 300.0, 30.0),
            row("lightning_rl-compiled", 1, 110.0, 300.0, 8.0),
            row("rejax", 0, 180.0, 250.0, 9.0, compile_seconds=4.0),
            row("rejax", 1, 275.0, 250.0, 11.0, compile_seconds=6.0),
            row("floor-matmuls", 0, 400.0, 500.0, 1.0),
        ],
    )
    compiled = cells_of(lines, "lightning_rl-compiled")
    assert compiled[2:4] == ["100 (90–110)", "0.45"], "pairs of .50 and .40"
    assert compiled[6:] == ["300", "1.20", "30.0", "8.0", "26.0", "100"]
    assert cells_of(lines, "rejax")[6:] == ["250", "1.00", "9.0", "11.0", "5.0", "100"]
    assert cells_of(lines, "lightning_rl")[8:] == ["4.0", "–", "–", "100"]
    assert cells_of(lines, "floor-matmuls")[6:] == ["500", "–", "–", "–", "–", "–"]
    assert len({line.count("|") for line in lines}) == 1


def test_a_library_that_failed_has_a_row_as_long_as_the_others(bench):
    failed = {"name": "rejax", "key": "W4-8", "repeat": 0, "error": "no network"}
    lines = bench.table("W4-8", [row("lightning_rl", 0, 10.0, 20.0, 4.0), failed])
    assert cells_of(lines, "rejax")[:3] == ["rejax", "–", "failed"]
    assert len({line.count("|") for line in lines}) == 1


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


@pytest.fixture
def rejax(monkeypatch, common):
    """Return rejax's runner with stand-ins for JAX and rejax, and what they are asked for."""
    asked = types.SimpleNamespace(calls=0)

    class Algorithm:
        def __init__(self, **settings):
            vars(asked).update(settings)

        def replace(self, eval_callback):
            asked.evaluated = eval_callback(self, None, None)
            return self

        def init_state(self, key):
            return types.SimpleNamespace(global_step=0)

        def train(self, train_state):
            train_state.global_step += asked.total_timesteps
            asked.calls += 1
            return train_state, ()

    def jit(function, donate_argnums=()):
        def call(state):
            return function(state)

        call.lower = lambda state: types.SimpleNamespace(compile=lambda: function)
        return call

    jax = types.ModuleType("jax")
    jax.jit, jax.block_until_ready = jit, lambda state: state
    jax.random = types.SimpleNamespace(key=lambda seed: seed)
    package = types.ModuleType("rejax")
    package.PPO = types.SimpleNamespace(create=lambda **settings: Algorithm(**settings))
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "rejax", package)
    monkeypatch.setattr(common.os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.delitem(sys.modules, "rejax_ppo", raising=False)
    return importlib.import_module("rejax_ppo"), asked


def test_rejax_takes_as_many_env_steps_as_are_counted_and_does_not_evaluate(
    rejax, common, monkeypatch, capsys
):
    runner, asked = rejax
    options = ["--warmup", "2", "--iterations", "6"]
    monkeypatch.setattr(sys, "argv", ["rejax_ppo.py", "W4-64", *options])
    runner.main()
    told = json.loads(capsys.readouterr().out)
    work = common.WORKLOADS["W4-64"]
    assert asked.calls == 4
    assert asked.total_timesteps == asked.eval_freq == 2 * work.env_steps
    assert asked.skip_initial_evaluation
    assert asked.evaluated == ()
    assert told["env_steps"] == 6 * work.env_steps
    assert (asked.num_envs, asked.num_steps) == (work.num_envs, work.steps)
    assert (asked.num_epochs, asked.num_minibatches) == (work.epochs, work.minibatches)


def test_rejax_refuses_iterations_that_its_program_does_not_divide(rejax, monkeypatch):
    runner, _ = rejax
    options = ["--warmup", "2", "--iterations", "5"]
    monkeypatch.setattr(sys, "argv", ["rejax_ppo.py", "W4-64", *options])
    with refused(SystemExit, names=("--iterations 5", "--warmup 2")):
        runner.main()


def test_the_floor_has_the_sizes_of_the_envs(common, monkeypatch):
    floors = importlib.import_module("floors")
    for name, sizes in {"W4-8": (6, 2), "S64": (3, 1), "W1": (4, 2)}.items():
        run = types.SimpleNamespace(name=name, workload=common.WORKLOADS[name])
        assert floors.sizes_of(run) == sizes
    assert os.path.samefile(floors.__file__, SCRIPTS / "peers" / "floors.py")
