"""Run directories and sweeps of others: links, pipes, YAML and JSON that grow, odd values."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from lightning_rl.extensions.reports.comparison import compare
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import DEEPEST, MOST_BYTES, read_json
from lightning_rl.system.plain_yaml import LONGEST_TEXT, MOST_DEPTH, MOST_VALUES, read_yaml
from tests.cli.test_report import STEPS, make_run, report
from tests.messages import refused
from tests.reports.test_reports_on_runs import WHOLE
from tests.security.watch import nothing_happens

SECRET = "what nobody may read"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text(SECRET)


def linked(path):
    path.symlink_to(Path("secret").resolve())


def piped(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def looped(path):
    path.symlink_to(path.name)


def large(path):
    with path.open("wb") as file:
        file.truncate(2**33)


def no_text(path):
    path.write_bytes(b"\xff\xfe")


def a_directory(path):
    path.mkdir()


PLACES = ("config.yaml", "run.json", "evaluation.json", "logs/metrics.csv", "videos/e.mp4")
FILMS_MAY_BE = (large, no_text)


def nested(levels, text="["):
    return text * levels + {"[": "]", "{a: ": "}"}.get(text, "") * levels


ALIASES = "l0: &l0 [x]\n" + "".join(
    f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
YAMLS = {
    "deep list": nested(100_000),
    "deep mapping": nested(100_000, "{a: "),
    "deep, never closed": "[" * 100_000,
    "deep by indents": "".join(f"{' ' * i}a:\n" for i in range(MOST_DEPTH + 2)),
    "deep by dashes": "- " * 10_000,
    "aliases": ALIASES,
    "aliases in keys": "a: &a [1]\nb: {*a: 1}",
    "merges": "m0: &m {a: 1}\n" + "".join(f"m{i}: &m {{<<: [*m, *m]}}\n" for i in range(1, 30)),
    "itself": "&a [*a]",
    "itself as a value": "&a {b: *a}",
    "many values": f"[{'1, ' * MOST_VALUES}1]",
    "base 60": "1" + ":59" * LONGEST_TEXT,
    "digits": "9" * 5000,
    "no int": '!!int ""',
    "no bool": "!!bool x",
    "no time": "!!timestamp x",
    "an object": "!!python/object/apply:os.system [true]",
    "no end": "a: [",
    "a byte of no text": "a: \x00",
}
JSONS = {
    "deep list": '{"a": ' + nested(DEEPEST) + "}",
    "deeper": '{"a": ' + nested(100_000) + "}",
    "digits": '{"a": ' + "9" * 5000 + "}",
    "a list": "[]",
    "no end": "{",
}


@pytest.mark.parametrize("spoil", [linked, piped, endless, looped, large, no_text, a_directory])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_with_an_odd_file_is_left_out_and_spoils_no_other(place, spoil, capsys):
    make_run("good_seed1_20260101_000001", range(len(STEPS)))
    bad = make_run("bad_seed1_20260101_000002", range(len(STEPS)))
    (bad / "videos").mkdir()
    (bad / place).unlink(missing_ok=True)
    spoil(bad / place)
    if (place == "videos/e.mp4" and spoil in FILMS_MAY_BE) or (
        place == "run.json" and spoil is looped  # which makes it no run
    ):
        assert not compare(["outputs"]).left_out
        return
    report("outputs", "--output", "report.html")
    told = capsys.readouterr().err
    assert told.startswith(f"Left out: {bad / place}"), told
    page = Path("report.html").read_text()
    assert SECRET not in page
    assert "good_seed1_20260101_000001" in page


def test_a_directory_of_films_elsewhere_is_not_shown():
    run = make_run("bad_seed1_20260101_000002", range(len(STEPS)))
    Path("elsewhere").mkdir()
    Path("elsewhere", "e.mp4").write_text(SECRET)
    (run / "videos").symlink_to(Path("elsewhere").resolve())
    with refused(names=("e.mp4", "link")):
        compare([run])


def with_value(content, path, value):
    *above, last = path.split(".")
    place = content
    for name in above:
        place = place[name]
    place[last] = value


ODD = [None, -1, 1.5, 1e308, 10**400, float("nan"), "5", "\ud800", [], [1], {}, {"a": 1}, True]
VALUES = {
    "run.json": ("outcome", "seed", "seconds", "seconds.total", "peak_memory.process", "earlier"),
    "evaluation.json": ("episodes", "env_steps", "avg_reward", "success_rate", "ci95", "metrics"),
}


@pytest.mark.parametrize(
    ("file", "path"), [(file, path) for file, paths in VALUES.items() for path in paths]
)
def test_odd_values_end_in_a_message_or_a_page(file, path, capsys):
    make_run("good_seed1_20260101_000001", range(len(STEPS)))
    for i, value in enumerate(ODD):
        bad = make_run(f"bad{i}_20260101_000002", range(len(STEPS)))
        (bad / "evaluation.json").write_text(json.dumps(WHOLE))
        content = json.loads((bad / file).read_text())
        with_value(content, path, value)
        (bad / file).write_text(json.dumps(content))
    for suffix in ("html", "md", "json"):
        report("outputs", "--output", f"report.{suffix}")
    assert "good" in Path("report.md").read_text()


def test_odd_settings_end_in_a_page():
    for i, text in enumerate(
        ("2024-01-01", "[{2024-01-01: 1}]", "[{1: a, b: c}]", "!!set {a}", "!!binary aGk=", ".nan")
    ):
        run = make_run(f"odd{i}_20260101_000002", range(len(STEPS)))
        with (run / "config.yaml").open("a") as file:
            file.write(f"odd: {text}\n2024-01-01: {{1: 2}}\n")
    for suffix in ("html", "md", "json"):
        report("outputs", "--output", f"report.{suffix}")


@pytest.mark.parametrize("name", YAMLS)
def test_yaml_beyond_all_bounds_is_refused_with_one_message(name):
    with refused(names="text"):
        read_yaml(YAMLS[name], "The text")


def test_yaml_within_the_bounds_is_read():
    assert read_yaml("a: &a [1, 2]\nb: [*a, *a]\n", "It")["b"] == [[1, 2], [1, 2]]
    assert read_yaml(nested(MOST_DEPTH), "It")


@pytest.mark.parametrize("name", JSONS)
def test_json_beyond_all_bounds_is_refused_with_one_message(name, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(JSONS[name])
    with refused(names="a.json"):
        read_json(path, tmp_path)


def test_json_of_models_is_bounded_too(tmp_path):
    from lightning_rl.extensions.export.weights import read_exported

    path, beside = tmp_path / "a.safetensors", tmp_path / "a.safetensors.json"
    for spoil in (large, endless, lambda path: path.write_text(JSONS["deeper"])):
        beside.unlink(missing_ok=True)
        spoil(beside)
        with refused(names="a.safetensors"):
            read_exported(path)


def test_a_file_of_the_largest_size_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{}".ljust(MOST_BYTES))
    assert read_json(path, tmp_path) == {}


def swept(tmp_path):
    """Return the directory of a sweep of two seeds, of which the first trial has a run and the other begins."""
    pytest.importorskip("optuna", reason="the extra sweep (optuna) is not installed")
    from lightning_rl.extensions.sweeps.sweep import _Sweep
    from lightning_rl.extensions.sweeps.sweep_settings import SweepSettings

    directory = tmp_path / "sweep"
    directory.mkdir()
    trainer = {"best_metric": "eval/avg_reward", "best_mode": "max", "num_threads": 1, "devices": 1}
    text = json.dumps({"trainer": trainer})
    (directory / "base.yaml").write_text(text)
    space = {"model.gamma": {"low": 0.8, "high": 0.9}}
    made = _Sweep(directory, SweepSettings(seeds=[1, 2], space=space, trials=1), text)
    made.save_settings()
    made.open()
    made.journal.finish(made.journal.claim(), 1.0, pruned=False)
    made.journal.claim()
    return directory


def resumed(directory):
    """All that `rl-cli sweep --resume` does before its first trial begins; return that trial."""
    from lightning_rl.extensions.sweeps.sweep import _existing
    from lightning_rl.extensions.sweeps.sweep_settings import SweepSettings

    made = _existing(SweepSettings(), ["--resume", str(directory)], [])
    made.open()
    made.journal.enter()
    trial = made.journal.claim()
    made.journal.leave()
    made._run_of(trial)
    return trial


FORGED = {
    "settings": {"seeds": "/../../victim"},
    "seeds": {"seeds": ["/../../victim", 2]},
    "cores": {"jobs": "a"},
    "space": {"space": {"trainer.run_dir": ["/victim"]}},
    "unknown": {"directory": "/victim"},
    "first": {"first": [{"model.gamma": 5}]},
    "no mapping": [],
    "null space": {"space": None},
    "null first": {"first": None},
    "no low": {"space": {"model.gamma": {"low": None, "high": 1.0}}},
    "beyond all floats": {"space": {"model.gamma": {"low": 0, "high": 10**400}}},
    "an alias of itself": {"space": {"model.gamma": "&a [*a]"}},
    "a sampler by its path": {
        "search": "QMCSampler",
        "search_args": {"independent_sampler": "evilmod.x"},
    },
}
"""Settings in `sweep.yaml`."""

LINES = {
    "seed": ('"seed":2', '"seed":"/../../victim"'),
    "another seed": ('"seed":2', '"seed":3'),
    "point": ('"point":0,"seed":2', '"point":7,"seed":2'),
    "negative point": ('"point":0,"seed":2', '"point":-1,"seed":2'),
    "operation": ('"op_code":5', '"op_code":99'),
    "no operation": ('"op_code":5', '"operation":5'),
    "value": ('"values":[1.0]', '"values":["a"]'),
    "values": ('"values":[1.0]', '"values":[1.0,2.0]'),
    "state": ('"state":1', '"state":"a"'),
    "date": ('"datetime_complete":"20', '"datetime_complete":"a'),
    "setting": ('"param_name":"model.gamma"', '"param_name":"trainer.run_dir"'),
    "out of range": ('"fixed_params":{"model.gamma":0.', '"fixed_params":{"model.gamma":10.'),
    "fixed setting": ('"fixed_params":{"model.gamma"', '"fixed_params":{"trainer.run_dir"'),
    "distribution": ("FloatDistribution", "os.system"),
    "depth": ('"seed":2', '"seed":' + "[" * 100_000),
    "no JSON": ('"op_code":5', "op_code:5"),
    "direction": ('"directions":[2]', '"directions":[1]'),
}
"""Texts in `journal.log`, and what takes their place."""


@pytest.mark.parametrize(
    "name", [*FORGED, *LINES, "journal link", "journal pipe", "base", "threads", "a last line"]
)
def test_a_forged_sweep_is_refused_and_removes_nothing(name, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.mkdir()
    directory = swept(tmp_path)
    journal = directory / "journal.log"
    if name in FORGED:
        content = yaml.safe_load((directory / "sweep.yaml").read_text())
        content = {**content, **FORGED[name]} if FORGED[name] else []
        (directory / "sweep.yaml").write_text(yaml.safe_dump(content))
    elif name in LINES:
        before = journal.read_text()
        assert LINES[name][0] in before
        journal.write_text(before.replace(*LINES[name]))
    elif name == "a last line":  # which Optuna reads only with the next
        journal.write_text(journal.read_text()[:-3] + "\n")
    elif name == "threads":
        trainer = "{best_metric: a, best_mode: max, num_threads: 0, devices: 1}"
        (directory / "base.yaml").write_text(f"trainer: {trainer}")
    elif name == "base":
        (directory / "base.yaml").write_text("trainer: {best_metric: a}")
    else:
        journal.rename(tmp_path / "journal")
        journal.symlink_to(tmp_path / "journal") if "link" in name else os.mkfifo(journal)
    with nothing_happens(), pytest.raises((ConfigurationError, SystemExit)) as refusal:
        resumed(directory)
    if refusal.type is SystemExit:
        assert capsys.readouterr().err.startswith("rl-cli: error: ")
    assert victim.is_dir()


@pytest.mark.parametrize("name", ["trial_001_seed2_2026", "trial_001_seed2.log"])
def test_a_link_in_a_sweep_is_not_removed_or_written(name, tmp_path):
    directory = swept(tmp_path)
    (tmp_path / "victim").mkdir()
    (directory / name).symlink_to(tmp_path / "victim")
    with refused(names=("link", "remove")):
        resumed(directory)
    shutil.rmtree(directory)
    assert (tmp_path / "victim").is_dir()


def test_a_sweep_that_nobody_forged_is_resumed(tmp_path):
    trial = resumed(swept(tmp_path))
    assert (trial.number, trial.seed) == (1, 2)
