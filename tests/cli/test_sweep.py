"""`rl-cli sweep`: trials that are chosen, run beside each other, cut off, gone on with, and ended."""

import contextlib
import io
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from lightning_rl.cli.app import run
from lightning_rl.sweeps.search import Range, Search, check_first, space_of
from lightning_rl.sweeps.sweep import _count, _Sweep
from lightning_rl.sweeps.sweep_settings import sweep_settings
from lightning_rl.sweeps.trials import TrialProcess, cores_of
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import lock_file
from tests.commands import ROOT, Command, rl_cli

SMALL = [
    *("--config", "ppo.yaml", "--data.num_envs", "4", "--data.buffer_size", "16"),
    *("--model.batch_size", "64", "--model.n_epochs", "1", "--data.iterations_per_epoch", "2"),
    *("--data.num_eval_episodes", "1", "--data.eval_env", "GymnasiumEnv"),
    *("--data.eval_env.id", "CartPole-v1", "--data.eval_env.env_kwargs", "{max_episode_steps: 20}"),
    *("--sweep.cores_per_trial", "0"),  # other tests run on these cores
]

REPORTED_SEEDS = {*range(11, 16), *range(21, 26), *range(31, 36), *range(41, 46)}
"""Of the returns of configs/tuned in docs/results.md, which no search may have seen."""


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def state():
    (path,) = Path("outputs").glob("*_sweep_*/sweep.json")
    return path.parent, json.loads(path.read_text())["trials"]


def outcomes():
    return [trial["outcome"] for trial in state()[1]]


def alive(pids):
    """Those of some processes that are still there, and no zombies that nobody has waited for."""
    found = []
    for pid in map(int, pids):
        with contextlib.suppress(OSError):
            if ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                found.append(pid)
    return found


def soon(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
    return found


def cut_off(half):
    """The run directories of trials that run, and have a checkpoint; once so many have finished."""
    if len(list(Path("outputs").glob("*_sweep_*/sweep.json"))) != 1:
        return []
    directory, trials = state()
    if sum(trial["outcome"] == "finished" for trial in trials) < half:
        return []
    running = [f"trial_{t['number']:03d}_*" for t in trials if t["outcome"] == "running"]
    return [
        path.parents[1]
        for name in running
        for path in directory.glob(f"{name}/checkpoints/last.ckpt")
    ]


def test_of_six_trials_those_that_had_finished_when_it_was_killed_are_not_repeated():
    """The one that was cut off goes on from its checkpoint; no process is left by the kill."""
    budgets = [129, 130, 5120, 131, 132, 133]  # the third is long enough to be met
    space = f"{{data.total_env_steps: {budgets}}}"
    sweep = Command("sweep", *SMALL, "--sweep.space", space, "--sweep.jobs", "1")
    try:
        (run_dir,) = soon(lambda: sweep.poll() is not None or cut_off(2))
        children = sweep.children()
    finally:
        sweep.kill()
    soon(lambda: not alive(children), timeout=10)
    directory, trials = state()
    before = {p: p.stat().st_mtime_ns for p in directory.glob("trial_*/checkpoints/last.ckpt")}
    finished = [trial["run"] for trial in trials if trial["outcome"] == "finished"]
    assert len(children) == 1
    assert len(finished) == 2

    again = rl_cli("sweep", "--resume", directory)
    assert again.returncode == 0, again.stderr
    assert "6 trials, 2 of them done, 1 at a time" in again.stdout
    assert "trial 3/6 goes on: seed 1, total_env_steps 5120\n" in again.stdout
    assert again.stdout.count(" begins: ") == 3
    directory, trials = state()
    assert [trial["outcome"] for trial in trials] == ["finished"] * 6
    assert [trial["env_steps"] for trial in trials] == [192] * 2 + [5120] + [192] * 3
    after = {p: p.stat().st_mtime_ns for p in directory.glob("trial_*/checkpoints/last.ckpt")}
    assert len(after) == 6
    for name in finished:
        path = directory / name / "checkpoints" / "last.ckpt"
        assert after[path] == before[path]
    parts = json.loads((run_dir / "run.json").read_text())
    assert parts["env_steps_at_start"] > 0
    assert [part["outcome"] for part in parts["earlier"]] == ["running"]
    done = rl_cli("sweep", "--resume", "last")  # nothing is left to do
    assert "6 trials, 6 of them done" in done.stdout
    assert "begins" not in done.stdout
    # Each is a run like any other.
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(["validate", "--ckpt_path", "best", "--output_dir", str(directory)])
    assert "trained for" in out.getvalue()
    run(["report", str(directory), "--output", "report.json"])
    groups = json.loads(Path("report.json").read_text())["groups"]
    assert {group["name"] for group in groups} == {f"total_env_steps {one}" for one in budgets}


def test_a_signal_has_the_trials_save_and_ends_them_all():
    options = ["--sweep.seeds", "2", "--sweep.jobs", "2", "--data.total_env_steps", "10_000_000"]
    options += ["--model.compile", "false"]
    sweep = Command("sweep", *SMALL, *options)
    try:
        soon(lambda: sweep.poll() is not None or len(cut_off(0)) == 2)
        children = sweep.children()
        os.kill(sweep.pid, signal.SIGTERM)
        assert sweep.wait().returncode == 128 + signal.SIGTERM
    finally:
        sweep.kill()
    assert len(children) == 2
    assert not alive(children)
    directory, trials = state()
    assert f"Resume: rl-cli sweep --resume {directory}" in sweep.stdout
    assert "SIGTERM: the trials that run save, and end (again to end them at once)" in sweep.stderr
    for trial in trials:
        manifest = json.loads((directory / trial["run"] / "run.json").read_text())
        assert manifest["outcome"] == "stopped by SIGTERM"


def test_a_trial_that_fails_is_shown_with_its_last_line_and_ends_no_other():
    space = "{model.gamma: [0.9, 1.5]}"
    options = ["--sweep.space", space, "--sweep.jobs", "1", "--data.total_env_steps", "128"]
    sweep = rl_cli("sweep", *SMALL, *options)
    assert sweep.returncode == 1
    directory, (first, second) = state()
    assert first["outcome"] == "finished"
    assert second["outcome"].startswith("failed: rl-cli: error: gamma must lie in")
    assert f"trial 2/2 {second['outcome']} (all of it: {directory}/trial_001" in sweep.stdout
    assert "1 of 2 trials failed" in sweep.stdout
    assert "gamma" in sweep.stdout.split("trials failed")[0].splitlines()[-8]  # the table
    assert not list(directory.glob("trial_001*_2*"))


def crash(arguments):
    raise RuntimeError("the arm is on fire")


def test_of_a_traceback_the_last_line_is_shown(tmp_path):
    process = TrialProcess(crash, [], None, tmp_path / "log")
    assert process.wait(30)
    assert process.exit_code == 1
    assert process.last_line() == "RuntimeError: the arm is on fire"


def tell(arguments):
    told = {"cores": sorted(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"]}
    Path(arguments[0]).write_text(json.dumps(told | {"argv": sys.argv}))


def test_a_trial_has_the_cores_that_it_was_given_and_as_many_threads(tmp_path):
    (core,) = cores_of(1, 1)[0]
    process = TrialProcess(tell, [str(tmp_path / "told")], [core], tmp_path / "log")
    assert process.wait(30)
    assert process.exit_code == 0, process.last_line()
    told = json.loads((tmp_path / "told").read_text())
    assert told == {"cores": [core], "threads": "1", "argv": ["rl-cli", str(tmp_path / "told")]}
    assert len(os.sched_getaffinity(0)) >= 1


def test_a_trial_of_two_processes_is_one_trial():
    ended = rl_cli("sweep", *SMALL, "--config", "trainer/ddp.yaml", "--data.total_env_steps", "512")
    assert ended.returncode == 0, ended.stderr
    directory, (trial,) = state()
    assert (trial["outcome"], trial["env_steps"]) == ("finished", 512)
    assert json.loads((directory / trial["run"] / "run.json").read_text())["world_size"] == 2


@pytest.mark.parametrize(
    ("devices", "count"), [("auto", 1), (-1, 1), (3, 3), ("3", 3), ([0, 2], 2), ("0,2,3", 3)]
)
def test_a_trial_has_cores_for_each_of_its_processes(devices, count):
    assert _count(devices) == count


def test_cores_are_dealt_out_without_sharing(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7, 8, 9})
    assert cores_of(2, 2) == [[3, 5], [7, 8]]
    assert cores_of(2, 0) == [None, None]


def refused(*arguments, capsys, code=1):
    with pytest.raises(SystemExit) as stop:
        run(["sweep", *SMALL, *arguments])
    assert stop.value.code == code
    assert not Path("outputs").exists()
    return capsys.readouterr().err


GAMMAS = ["--sweep.space", "{model.gamma: [0.9, 0.99]}"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--sweep.space", "{model.clip_coeff: [0.1]}"],
            2,
            "Unknown setting 'clip_coeff' of PPO; close matches: clip_coef",
        ),
        (
            ["--sweep.space", "{model.lr_schedule: [linear, cosine]}"],
            2,
            "must be one of constant, linear, adaptive, got cosine",
        ),
        (
            ["--sweep.seedz", "3"],
            2,
            "--sweep has no option 'seedz'; close matches: seed, seeds. A sweep",
        ),
        (
            ["--sweep", "{spaces: {}}"],
            2,
            "--sweep has an unknown setting 'spaces'; close matches: space. A sweep has seeds,",
        ),
        (
            ["--sweep.space", "{model.gamma: {low: 0.9, hihg: 1.0}}"],
            1,
            "sweep.space: model.gamma: a range has no 'hihg'; it has low, high, log, step; close",
        ),
        (
            ["--sweep.space", "{model.gamma: {low: 0.9, high: 0.99}}", "--sweep.search", "grid"],
            1,
            "sweep.search: grid tries every value, and model.gamma has no end of them",
        ),
        (["--sweep.space", "{model.gamma: 0.9}"], 1, "model.gamma must be a list of values"),
        (
            ["--sweep.space", "{seed_everything: [1, 2]}"],
            1,
            "sweep.space: seed_everything is set by the sweep itself.",
        ),
        (["--seed_everything", "3"], 1, "A sweep takes no --seed_everything: say --sweep.seeds."),
        (["--ckpt_path", "last"], 1, "A sweep takes no --ckpt_path: trials begin with a policy by"),
        (["--sweep.seeds", "[1, 2, 1]"], 1, "sweep.seeds has a seed twice: [1, 2, 1]."),
        (
            ["--sweep.jobs", "999", "--sweep.cores_per_trial", "1"],
            1,
            "sweep.jobs 999 of 1 cores each (sweep.cores_per_trial) are",
        ),
        (
            ["--trainer.num_threads", "4", "--sweep.cores_per_trial", "1"],
            1,
            "sweep.cores_per_trial is 1, and trainer.num_threads 4: its threads would wait",
        ),
        (
            ["--config", "trainer/ddp.yaml", "--sweep.cores_per_trial", "1"],
            1,
            "trainer.num_threads 1 in each of 2 processes (trainer.devices): its threads would",
        ),
        (["--sweep.trials", "3"], 1, "sweep.trials is 3, but a grid tries every point: leave it"),
        (["--sweep.score", "median"], 2, "sweep.score must be one of last, best, got median."),
        (
            ["--sweep", "serch.yaml"],
            2,
            "the file serch.yaml, which is not there; close matches: search.yaml.",
        ),
        (
            ["--sweep.first", "[{model.gamma: 0.9}]", *GAMMAS],
            1,
            "sweep.first is tried before what a search chooses, and a grid",
        ),
        (
            ["--sweep.first", "[{model.gama: 0.9}]", *GAMMAS],
            1,
            "sweep.first has 'model.gama', which is not in sweep.space; close matches: model.gamma.",
        ),
        (
            ["--sweep.first", "[{}]", *GAMMAS],
            1,
            "sweep.first: a point has no model.gamma; it needs all of the space.",
        ),
        (
            ["--sweep.first", "[{model.gamma: 0.8}]", *GAMMAS],
            1,
            "sweep.first: model.gamma is 0.8, and sweep.space has it among 0.9, 0.99.",
        ),
        (
            [
                "--sweep.first",
                "[{model.gamma: 1}]",
                "--sweep.space",
                "{model.gamma: {low: 0.8, high: 0.99}}",
            ],
            1,
            "sweep.first: model.gamma is 1, and sweep.space has it from 0.8 to 0.99.",
        ),
        (["--resume", "nowhere"], 1, "A sweep is resumed as it was begun: --config, --data.buffer"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_a_trial_begins(arguments, code, message, capsys):
    Path("search.yaml").touch()
    assert message in refused(*arguments, capsys=capsys, code=code)


def test_a_sweep_that_is_not_there_is_refused(capsys):
    Path("outputs", "ppo_sweep_1").mkdir(parents=True)
    Path("outputs", "ppo_sweep_1", "sweep.json").write_text("{}")
    for given, message in {
        "outputs/ppo_sweep_2": "it has no sweep.json; close matches: ppo_sweep_1. Give",
        "outputs/ppo_sweep_1": "sweep.json cannot be read: 'settings'. Begin a new sweep.",
    }.items():
        with pytest.raises(SystemExit):
            run(["sweep", "--resume", given])
        assert message in capsys.readouterr().err


def test_a_file_says_what_is_swept_and_options_say_otherwise(capsys):
    Path("search.yaml").write_text(
        yaml.safe_dump({"seeds": 9, "jobs": 1, "space": {"model.gamma": [0.9, 0.95]}})
    )
    options = ["--sweep", "search.yaml", "--sweep.seeds", "[7]", "--data.total_env_steps", "128"]
    sweep = rl_cli("sweep", *SMALL, *options)
    assert sweep.returncode == 0, sweep.stderr
    assert [(trial["seed"], trial["outcome"]) for trial in state()[1]] == [(7, "finished")] * 2
    config = yaml.safe_load(next(state()[0].glob("trial_001*_2*/config.yaml")).read_text())
    assert config["seed_everything"] == 7
    assert config["model"]["init_args"]["gamma"] == 0.95


def test_alone_it_says_that_it_needs_a_config(capsys):
    with pytest.raises(SystemExit):
        run(["sweep"])
    error = capsys.readouterr().err
    assert "sweep needs a config, which all trials begin with: --config FILE; or --resume" in error


def points(how, space, count=6, first=(), **args):
    search = Search(space_of(space), how, args, None, {}, "max", 1)
    found = []
    for point in search.points(count, first):
        chosen, known = search.begin(point)
        search.end(known, chosen["x"])
        found.append(chosen)
    return found


def test_a_grid_is_all_combinations():
    found = points("grid", {"x": [1, 2], "y": [[64], None, "a"]})
    assert found == [{"x": x, "y": y} for x in (1, 2) for y in ([64], None, "a")]


def test_random_points_lie_in_their_ranges_and_are_the_same_again():
    space = {
        "x": {"low": 1.0e-5, "high": 1.0e-1, "log": True},
        "whole": {"low": 1, "high": 3},
        "stepped": {"low": 0.0, "high": 1.0, "step": 0.25},
        "choice": ["a", [1, 2]],
    }
    found = points("random", space, 400)
    assert found == points("random", space, 400)
    assert found[:3] == points("random", space, 3)
    assert {point["whole"] for point in found} == {1, 2, 3}
    assert {point["stepped"] for point in found} == {0.0, 0.25, 0.5, 0.75, 1.0}
    below = sum(point["x"] < 1e-3 for point in found)
    assert 150 < below < 250  # half of the decades
    assert all(1e-5 <= point["x"] <= 1e-1 for point in found)
    whole = Range(1, 1000, log=True)
    drawn = [whole.draw(random.Random(i)) for i in range(300)]
    assert sum(number <= 31 for number in drawn) == pytest.approx(150, abs=40)


def test_a_search_goes_on_with_more_trials_and_alone():
    space = "{model.gamma: {low: 0.9, high: 0.99}}"
    options = ["--sweep.space", space, "--sweep.trials", "1", "--data.total_env_steps", "64"]
    assert rl_cli("sweep", *SMALL, *options).returncode == 0
    directory, before = state()
    less = rl_cli("sweep", "--resume", directory, "--sweep.trials", "0")
    assert "sweep.trials was 1, and can only grow: got 0." in less.stderr
    refusal = f"Sweep {directory} is being run by "
    lock = lock_file(directory / ".lock", "")
    assert refusal in rl_cli("sweep", "--resume", "last").stderr
    os.close(lock)
    assert rl_cli("sweep", "--resume", directory, "--sweep.trials", "2").returncode == 0
    _, after = state()
    assert after[0] == before[0]
    assert [trial["outcome"] for trial in after] == ["finished", "finished"]


def test_a_sampler_alone_prunes_nothing(optuna):
    search = Search(space_of({"x": [1]}), "TPESampler", {}, None, {}, "max", 1)
    for score in [9.0] * 8:
        _, known = search.begin({"x": 1})
        search.report(known, [(1, score)])
        search.end(known, score)
    assert not search.report(search.begin({"x": 1})[1], [(1, 0.0)])


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="the extra sweep (optuna) is not installed")


def test_a_sampler_of_optuna_chooses_by_the_scores(optuna):
    space = {
        "x": {"low": 0.0, "high": 1.0},
        "y": {"low": 1, "high": 8, "log": True},
        "z": [[1], None],
    }
    found = points("TPESampler", space, 40, n_startup_trials=10)
    assert found == points("TPESampler", space, 40, n_startup_trials=10), "its seed is the sweep's"
    late = [point["x"] for point in found[20:]]
    assert sum(late) / len(late) > 0.75
    assert {type(point["y"]) for point in found} == {int}
    assert all(point["z"] in ([1], None) for point in found)


@pytest.mark.parametrize("how", ["random", "TPESampler"])
def test_what_is_known_to_be_good_comes_first(how, optuna):
    space = {"x": {"low": 0.0, "high": 1.0}, "z": [[1], None]}
    first = [{"x": 0.5, "z": [1]}, {"x": 0.25, "z": None}]
    found = points(how, space, 4, first)
    assert found[:2] == first
    search = Search(space_of(space), how, {}, None, {}, "max", 1)
    again = list(search.points(6, first, found))
    assert again[:4] == found, "gone on with, whatever has been chosen is not chosen anew"
    assert points(how, space, 1, first) == first[:1]


def test_a_string_in_quotes_stays_one(tmp_path):
    space = {
        "model.normalize_advantage": ["off", "minibatch"],
        "data.env.env_kwargs": [{"id": "1"}],
    }
    first = [{"model.normalize_advantage": "off", "data.env.env_kwargs": {"id": "1"}}]
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"space": space, "first": first, "search": "random"}))
    read = sweep_settings(["--sweep", str(path), "--sweep.trials", "3"])
    assert (read.space, read.first, read.trials) == (space, first, 3)
    check_first(space_of(read.space), read.first)
    given = [
        "--sweep",
        "{first: [{x: 'off'}], space: {x: ['off']}, search_args: {n: 'no'}}",
    ]
    read = sweep_settings([*given, "--sweep.search_args.n", "6"])
    assert read.first == [{"x": "off"}]
    assert read.search_args == {"n": 6}, "what is said last counts, and is no YAML in quotes"


SEARCHES = sorted((ROOT / "scripts/searches").glob("*.yaml"))


@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.stem)
def test_a_search_behind_a_tuned_config_can_be_run_as_it_says(path, optuna, monkeypatch, tmp_path):
    def run_none(made, place):
        begun.append(made)

    begun = []
    monkeypatch.setattr(_Sweep, "run", run_none)
    monkeypatch.chdir(ROOT)
    comment = "".join(line[1:] for line in path.read_text().splitlines() if line.startswith("#   "))
    run([*comment.split()[1:], "--output_dir", str(tmp_path)])
    (made,) = begun
    assert set(made.settings.seeds).isdisjoint(REPORTED_SEEDS)


def test_what_optuna_does_not_have_is_refused(optuna):
    message = "sweep.search must be one of grid, random, .*; got 'TPESampeler'; close matches: TPES"
    with pytest.raises(ConfigurationError, match=message):
        points("TPESampeler", {"x": [1]})
    with pytest.raises(ConfigurationError, match=r"TPESampler of Optuna takes no .*'startup': 3"):
        points("TPESampler", {"x": [1]}, startup=3)
    with pytest.raises(ConfigurationError, match=r"sweep\.pruner must be one of"):
        Search({}, "grid", {}, "MediumPruner", {}, "max", 1)


def test_without_optuna_a_sampler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigurationError, match="which is not installed: pip install 'lightning-"):
        points("TPESampler", {"x": [1]})


def test_a_trial_whose_evaluations_fall_behind_is_pruned_and_not_begun_again(optuna):
    """CartPole gives 1 a step: of five steps it cannot keep up with 20.

    Of 48 evaluations, so that the trial goes on for seconds after the one that tells.
    """
    longest = "data.eval_env.init_args.env_kwargs"
    space = f"{{{longest}: [{{max_episode_steps: 20}}, {{max_episode_steps: 5}}]}}"
    options = ["--sweep.space", space, "--sweep.jobs", "1", "--sweep.pruner", "MedianPruner"]
    options += ["--sweep.pruner_args", "{n_startup_trials: 1}", "--data.iterations_per_epoch", "5"]
    sweep = rl_cli("sweep", *SMALL, *options, "--data.total_env_steps", str(64 * 5 * 48))
    assert sweep.returncode == 0, sweep.stderr
    directory, (first, second) = state()
    assert (first["outcome"], second["outcome"]) == ("finished", "pruned")
    assert second["env_steps"] < first["env_steps"]
    assert (directory / second["run"] / "checkpoints" / "last.ckpt").is_file()
    again = rl_cli("sweep", "--resume", directory)
    assert again.returncode == 0, again.stderr
    assert "2 trials, 2 of them done" in again.stdout
