"""`rl-cli sweep`: trials that are chosen, run beside each other, cut off, resumed, shared, and ended."""

import contextlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.messages import assert_names, refused

pytest.importorskip("optuna", reason="the extra sweep (optuna) is not installed")

from lightning_rl.cli.app import run
from lightning_rl.extensions.sweeps import sweep as sweeps
from lightning_rl.extensions.sweeps import sweep_settings
from lightning_rl.extensions.sweeps.journal import JOURNAL, SweepJournal
from lightning_rl.extensions.sweeps.search import space_of
from lightning_rl.extensions.sweeps.sweep import OUTCOMES, _count, _Sweep
from lightning_rl.extensions.sweeps.trials import TrialProcess
from tests.cli import fake_trial
from tests.commands import ROOT, Command, rl_cli
from tests.helpers import error_of

SMALL = [
    *("--config", "ppo.yaml", "--data.num_envs", "4", "--data.buffer_size", "16"),
    *("--model.batch_size", "64", "--model.n_epochs", "1", "--data.iterations_per_epoch", "2"),
    *("--data.num_eval_episodes", "1", "--data.eval_env", "GymnasiumEnv"),
    *("--data.eval_env.id", "CartPole-v1", "--data.eval_env.env_kwargs", "{max_episode_steps: 20}"),
    *("--sweep.jobs", "2"),
]

REPORTED_SEEDS = {*range(11, 16), *range(41, 46), *range(61, 71), *range(81, 91)}
"""Of the returns of configs/tuned in docs/results.md, which no search may have seen."""
pytestmark = pytest.mark.usefixtures("own_directory")


def journal_of(directory):
    """The journal of a sweep, as another process reads it."""
    settings = sweep_settings.kept_settings(directory / "sweep.yaml")
    return SweepJournal(directory, settings, space_of(settings.space), "max")


def state():
    """The directory of the only sweep, and the latest try of each of its trials."""
    (path,) = Path("outputs").glob("*_sweep_*/sweep.yaml")
    return path.parent, list(journal_of(path.parent).trials().values())


def outcomes():
    return [OUTCOMES[trial.state] for trial in state()[1]]


def saved(directory):
    """What fake trials have saved, by the number of the trial."""
    found = sorted(directory.glob("trial_*/checkpoints/last.ckpt"))
    return {int(path.parts[-3].split("_")[1]): json.loads(path.read_text()) for path in found}


@pytest.fixture
def fakes(monkeypatch):
    """Trials of milliseconds, in this process and in those that `fake_sweep` starts."""
    monkeypatch.setattr(sweeps, "TrialProcess", fake_trial.FakeTrial)


def fake_sweep(*arguments, pause=0.0, **kwargs):
    """A sweep of fake trials in a process of its own."""
    script = Path(fake_trial.__file__)
    return Command(*arguments, program=script, env={"TRIAL_PAUSE": str(pause)}, **kwargs)


def alive(pids):
    """Those of some processes that are still there, and no zombies that nobody has waited for."""
    found = []
    for pid in map(int, pids):
        with contextlib.suppress(OSError):
            if ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                found.append(pid)
    return found


def soon(condition):
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
    return found


def is_saved(sweep, number):
    """Whether a trial of the only sweep has a checkpoint, and the sweep goes on."""
    assert sweep.poll() is None, sweep.stderr
    return list(Path("outputs").glob(f"*_sweep_*/trial_{number:03d}_*_2*/checkpoints/last.ckpt"))


def test_trials_that_had_finished_when_a_sweep_was_killed_are_not_repeated():
    """The one that was cut off goes on from its checkpoint; no process is left by the kill."""
    budgets = [129, 2560]  # the second is long enough to be met
    space = f"{{data.total_env_steps: {budgets}}}"
    sweep = Command("sweep", *SMALL, "--sweep.space", space, "--sweep.jobs", "1")
    try:
        ((last,),) = [soon(lambda: is_saved(sweep, 1))]
        children = sweep.children()
    finally:
        sweep.kill()
    soon(lambda: not alive(children))
    assert len(children) == 1
    assert outcomes() == ["finished", "running"]
    directory = last.parents[2]
    (first,) = directory.glob("trial_000_*/checkpoints/last.ckpt")
    before = first.stat().st_mtime_ns

    again = rl_cli("sweep", "--resume", directory)
    assert again.returncode == 0, again.stderr
    assert_names(
        again.stdout, "2 trials", "1 of them", "trial 2/2", "seed 1", "total_env_steps 2560"
    )
    assert again.stdout.count(" begins: ") == 0
    assert outcomes() == ["finished"] * 2
    for number, steps in enumerate([192, 2560]):
        assert f"trial {number + 1}/2 finished" in sweep.stdout + again.stdout
        assert_names(sweep.stdout + again.stdout, f"{steps:,} env steps")
    assert len(list(directory.glob("trial_*_2*"))) == 2
    assert first.stat().st_mtime_ns == before
    parts = json.loads((last.parents[1] / "run.json").read_text())
    assert parts["env_steps_at_start"] > 0
    assert [part["outcome"] for part in parts["earlier"]] == ["running"]
    # Each is a run like any other.
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(["validate", "--ckpt_path", "best", "--output_dir", str(directory)])
    assert "trained for" in out.getvalue()
    run(["report", str(directory), "--output", "report.json"])
    groups = json.loads(Path("report.json").read_text())["groups"]
    assert {group["name"] for group in groups} == {f"total_env_steps {one}" for one in budgets}


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM,), (signal.SIGHUP, signal.SIGHUP)],
    ids=["SIGTERM", "a terminal closes, and its shell repeats it"],
)
def test_a_signal_has_the_trials_save_and_ends_them_all(numbers, fakes, capfd):
    options = ["--sweep.seeds", "2", "--sweep.jobs", "2", "--data.total_env_steps", "12800"]
    sweep = fake_sweep(*SMALL, *options, pause=0.2)
    try:
        soon(lambda: is_saved(sweep, 0) and is_saved(sweep, 1))
        children = sweep.children()
        for number in numbers:
            os.kill(sweep.pid, number)
        assert sweep.wait().returncode == 128 + numbers[0]
    finally:
        sweep.kill()
    assert len(children) == 2
    assert not alive(children)
    directory, _ = state()
    assert f"Resume: rl-cli sweep --resume {directory}" in sweep.stdout
    said = f"{numbers[0].name}: the running trials save and stop (again to stop them immediately)"
    assert said in sweep.stderr
    assert outcomes() == ["waiting", "waiting"]
    run(["sweep", "--resume", str(directory)])
    assert capfd.readouterr().out.count(" continues: ") == 2
    assert [(one["at"], one["parts"]) for one in saved(directory).values()] == [(12800, 2)] * 2


def test_a_trial_that_fails_is_shown_with_its_last_line_and_ends_no_other(fakes, capfd):
    space = "{model.gamma: [0.9, 1.5]}"
    options = ["--sweep.space", space, "--sweep.jobs", "1", "--data.total_env_steps", "128"]
    with pytest.raises(SystemExit) as stop:
        run(["sweep", *SMALL, *options])
    assert stop.value.code == 1
    said = capfd.readouterr().out
    directory, _ = state()
    assert outcomes() == ["finished", "failed"]
    failed = "trial 2/2 failed: rl-cli: error: gamma must lie in [0, 1], got 1.5. (full output: "
    assert f"{failed}{directory}/trial_001_seed1.log)" in said
    assert_names(said, "1 of 2 trials")
    assert "gamma" in said.split("trials failed")[0].splitlines()[-8]  # the table
    with pytest.raises(SystemExit):
        run(["sweep", "--resume", "last"])
    said = capfd.readouterr().out
    assert_names(said, "2 trials", "1 of them")
    assert said.count("begins: ") == 1, "what has failed is tried again, what has finished is not"


def crash(arguments):
    raise RuntimeError("the arm is on fire")


def test_of_a_traceback_the_last_line_is_shown(tmp_path):
    process = TrialProcess(crash, [], None, tmp_path / "log")
    assert process.wait(30)
    assert process.exit_code == 1
    assert process.last_line() == "RuntimeError: the arm is on fire"


def tell(arguments):
    told = {"threads": os.environ["OMP_NUM_THREADS"]}
    Path(arguments[0]).write_text(json.dumps(told | {"argv": sys.argv}))


def test_a_trial_has_the_threads_that_it_was_given(tmp_path):
    process = TrialProcess(tell, [str(tmp_path / "told")], 3, tmp_path / "log")
    assert process.wait(30)
    assert process.exit_code == 0, process.last_line()
    told = json.loads((tmp_path / "told").read_text())
    assert told == {"threads": "3", "argv": ["rl-cli", str(tmp_path / "told")]}


def test_a_trial_of_two_processes_is_one_trial():
    ended = rl_cli("sweep", *SMALL, "--config", "trainer/ddp.yaml", "--data.total_env_steps", "512")
    assert ended.returncode == 0, ended.stderr
    assert_names(ended.stdout, "eval/avg_reward 20", "512 env steps")
    (manifest,) = state()[0].glob("trial_000_*_2*/run.json")
    assert json.loads(manifest.read_text())["world_size"] == 2


@pytest.mark.parametrize(
    ("devices", "count"), [("auto", 1), (-1, 1), (3, 3), ("3", 3), ([0, 2], 2), ("0,2,3", 3)]
)
def test_devices_are_counted(devices, count):
    assert _count(devices) == count


GAMMAS = ["--sweep.space", "{model.gamma: [0.9, 0.99]}"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
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
            "sweep.search: grid tries every value, but model.gamma is a range",
        ),
        (
            ["--sweep.space", "{seed_everything: [1, 2]}"],
            1,
            "sweep.space: seed_everything is set by the sweep itself.",
        ),
        (["--seed_everything", "3"], 1, "A sweep takes no --seed_everything: set --sweep.seeds."),
        (["--sweep.space", "{data.seed: [1, 2]}"], 1, "sweep.space: data.seed is set by the sweep"),
        (
            ["--data.seed", "7", "--sweep.seeds", "2"],
            1,
            "data.seed is 7 in the configuration: all 2",
        ),
        (["--sweep.trials", "3"], 1, "sweep.trials is 3, but a grid tries every point: remove it"),
        (
            ["--sweep", "serch.yaml"],
            2,
            "the file serch.yaml, which does not exist; close matches: search.yaml.",
        ),
        (
            ["--sweep.first", "[{model.gamma: 0.9}]", *GAMMAS],
            1,
            "sweep.first is tried before the points of a search, but a grid",
        ),
        (
            ["--sweep.first", "[{model.gamma: 0.8}]", *GAMMAS],
            1,
            "sweep.first: model.gamma is 0.8, but sweep.space has it among 0.9, 0.99.",
        ),
        (["--resume", "nowhere"], 1, "A resumed sweep keeps its settings: --config, --data.buffer"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_a_trial_begins(arguments, code, message, capsys):
    Path("search.yaml").touch()
    assert message in error_of(capsys, "sweep", *SMALL, *arguments, status=code)
    assert not Path("outputs").exists()


def test_a_sweep_that_is_not_there_is_refused(capsys):
    for name in ("ppo_sweep_1", "ppo_sweep_3"):
        Path("outputs", name).mkdir(parents=True)
    Path("outputs", "ppo_sweep_1", "sweep.yaml").write_text("sedes: 1")
    Path("outputs", "ppo_sweep_3", "sweep.json").touch()
    for given, message in {
        "outputs/ppo_sweep_2": "it has no sweep.yaml; close matches: ppo_sweep_1. Give",
        "outputs/ppo_sweep_1": "sweep.yaml has an unknown setting 'sedes'; close matches: seeds, ",
        "outputs/ppo_sweep_3": "It was written by an earlier version: begin a new sweep.",
    }.items():
        assert message in error_of(capsys, "sweep", "--resume", given)


def test_alone_it_says_that_it_needs_a_config(capsys):
    assert_names(error_of(capsys, "sweep"), "--config FILE", "--resume")


def opened(directory, search, space, trials=None, **settings):
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    given = sweep_settings.SweepSettings(
        seeds=[1], search=search, space=space, trials=trials, **settings
    )
    journal = SweepJournal(directory, given, space_of(space), "max")
    journal.enter()
    return journal


def points(search, space, count=None, directory=None, **settings):
    """The points that a sweep tries from here on."""
    directory = directory or f"study_{len(list(Path().glob('study_*')))}"
    journal = opened(directory, search, space, count, **settings)
    found = []
    while (trial := journal.claim()) is not None:
        found.append(trial.point)
        journal.finish(trial, float(trial.point["x"]), pruned=False)
    journal.leave()
    return found


def test_a_grid_is_all_combinations():
    found = points("grid", {"x": [1, 2], "y": [[64], None, "a"]})
    assert found == [{"x": x, "y": y} for x in (1, 2) for y in ([64], None, "a")]


SPACES = {
    "x": {"low": 1.0e-5, "high": 1.0e-1, "log": True},
    "whole": {"low": 1, "high": 3},
    "stepped": {"low": 0.0, "high": 1.0, "step": 0.25},
    "choice": ["a", [1, 2]],
}


def test_random_points_lie_in_their_ranges_and_are_the_same_again():
    found = points("random", SPACES, 100)
    assert found[:20] == points("random", SPACES, 20)
    assert {point["whole"] for point in found} == {1, 2, 3}
    assert {point["stepped"] for point in found} == {0.0, 0.25, 0.5, 0.75, 1.0}
    below = sum(point["x"] < 1e-3 for point in found)
    assert 30 < below < 70  # half of the decades
    assert all(1e-5 <= point["x"] <= 1e-1 for point in found)
    assert all(point["choice"] in ("a", [1, 2]) for point in found)


@pytest.mark.parametrize("search", ["random", "TPESampler"])
def test_a_resumed_search_chooses_what_one_in_a_piece_would(search):
    """And not the same points once more (Optuna's issue 3255)."""
    whole = points(search, SPACES, 14)
    begun = points(search, SPACES, 11, "resumed")
    killed = opened("resumed", search, SPACES, 12)
    assert killed.claim().point == whole[11]
    killed.leave()
    assert begun + points(search, SPACES, 14, "resumed") == whole
    assert len({point["x"] for point in whole}) == 14


def test_a_search_goes_on_with_more_trials_and_alone(fakes, capfd):
    space = "{model.gamma: {low: 0.9, high: 0.99}}"
    options = ["--sweep.space", space, "--sweep.trials", "1", "--data.total_env_steps", "64"]
    run(["sweep", *SMALL, *options])
    directory, (before,) = state()
    error = error_of(capfd, "sweep", "--resume", "last", "--sweep.trials", "0")
    assert_names(error, "trials", "1", "0")
    error = error_of(capfd, "sweep", "--resume", "last", "--sweep.seeds", "2")
    assert_names(error, "--sweep.seeds", "--sweep.jobs", "--sweep.trials")
    run(["sweep", "--resume", str(directory), "--sweep.trials", "2"])
    _, after = state()
    assert after[0].params == before.params
    assert outcomes() == ["finished", "finished"]


def test_a_sweep_is_run_by_one_process(fakes, capfd):
    first = fake_sweep(*SMALL, "--sweep.seeds", "1", "--data.total_env_steps", "128", pause=60)
    try:
        soon(lambda: is_saved(first, 0))
        error = error_of(capfd, "sweep", "--resume", "last")
        assert_names(error, f"process {first.pid} on ", str(state()[0]))
    finally:
        first.kill()


def test_a_full_disk_is_one_message_and_the_sweep_goes_on_later(fakes):
    options = ["--sweep.seeds", "12", "--sweep.jobs", "1", "--data.total_env_steps", "64"]
    full = fake_sweep(*SMALL, *options, largest_file=6 * 2**10).wait()
    assert full.returncode == 1
    (directory,) = Path("outputs").glob("*_sweep_*")
    said = full.stderr.strip().splitlines()[-1]
    assert said.startswith(f"rl-cli: error: Cannot write {directory}/{JOURNAL}: File too large."), (
        said
    )
    done = outcomes().count("finished")
    assert done > 3
    again = fake_sweep("--resume", "last").wait()
    assert again.returncode == 0, again.stderr
    assert_names(again.stdout, "12 trials", f"{done} of them")
    assert all(one["parts"] == 1 for number, one in saved(directory).items() if number < done)


def test_what_is_known_to_be_good_comes_first():
    space = {"x": {"low": 0.0, "high": 1.0}, "z": [[1], None]}
    first = [{"x": 0.5, "z": [1]}, {"x": 0.25, "z": None}]
    assert points("TPESampler", space, 4, first=first)[:2] == first
    assert points("TPESampler", space, 1, first=first) == first[:1]


SEARCHES = sorted((ROOT / "scripts/searches").glob("*.yaml"))


@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.stem)
def test_a_search_behind_a_tuned_config_can_be_run_as_it_says(path, monkeypatch, tmp_path):
    def run_none(made, *_):
        begun.append(made)

    begun = []
    monkeypatch.setattr(_Sweep, "run", run_none)
    monkeypatch.chdir(ROOT)
    comment = "".join(line[1:] for line in path.read_text().splitlines() if line.startswith("#   "))
    run([*comment.split()[1:], "--output_dir", str(tmp_path)])
    (made,) = begun
    assert set(made.settings.seeds).isdisjoint(REPORTED_SEEDS)


def test_what_optuna_does_not_have_is_refused():
    with refused(
        names=("sweep.search", "grid, random", "'TPESampeler'", "close matches: TPESampler")
    ):
        points("TPESampeler", {"x": [1]})
    with refused(names=("TPESampler", "'startup'", "3")):
        points("TPESampler", {"x": [1]}, search_args={"startup": 3})
    with refused(names="sweep.pruner"):
        points("grid", {"x": [1]}, pruner="MediumPruner")


def test_without_optuna_it_is_said_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("lightning_rl.extensions.sweeps")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    expected = "rl-cli sweep needs a package that is not installed: pip install -e '.[sweep]'"
    assert expected in error_of(capsys, "sweep", "--config", "ppo.yaml")


def test_a_sampler_that_unpickles_the_journal_needs_trust(fakes, capsys):
    """Of a directory that is there: a new one is this process's own."""
    directory = Path("outputs", "ppo_sweep_1")
    directory.mkdir(parents=True)
    settings = {"seeds": [1], "search": "CmaEsSampler", "space": {"x": {"low": 0, "high": 1}}}
    (directory / "sweep.yaml").write_text(yaml.safe_dump(settings))
    (directory / "base.yaml").write_text("trainer: 1")
    for trust, message in {
        (): "is CmaEsSampler, which unpickles the content of journal.log: that can run code. Add --trust",
        ("--trust_code", "true"): "base.yaml is no configuration",
    }.items():
        assert message in error_of(capsys, "sweep", "--resume", directory, *trust)


def test_a_trial_whose_evaluations_fall_behind_is_pruned_and_not_begun_again(fakes, capfd):
    options = ["--sweep.space", "{model.gamma: [0.9, 0.5]}", "--sweep.jobs", "1"]
    options += ["--sweep.pruner", "MedianPruner", "--sweep.pruner_args", "{n_startup_trials: 1}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIAL_PAUSE", "0.02")
        run(["sweep", *SMALL, *options, "--data.total_env_steps", "3200"])
    assert outcomes() == ["finished", "pruned"]
    directory, (first, second) = state()
    numbers = saved(directory)
    assert numbers[1]["at"] < numbers[0]["at"] == 3200
    assert second.value < first.value
    assert max(first.intermediate_values) == 3200, "the last one counts for the pruner, too"
    run(["sweep", "--resume", str(directory)])
    assert_names(capfd.readouterr().out, "2 trials", "2 of them")


def test_a_trial_that_diverged_has_no_score_of_an_earlier_evaluation(fakes, capfd):
    options = ["--sweep.space", "{model.gamma: [0.5, 0.0]}", "--sweep.score", "best"]
    options += ["--sweep.pruner", "NopPruner", "--data.total_env_steps", "256"]
    with pytest.raises(SystemExit):
        run(["sweep", *SMALL, *options])
    assert outcomes() == ["finished", "failed"]
    _, (first, second) = state()
    assert (first.value, second.value) == (128.0, None)
    assert list(second.intermediate_values.values()) == [0.0], "the pruner gets what is finite"
    assert_names(capfd.readouterr().out, "diverged", "eval/avg_reward")
