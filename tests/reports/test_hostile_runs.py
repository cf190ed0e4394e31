"""Run directories and sweeps of others: links, pipes, YAML and JSON that grow, odd values."""

import json
import os
import shutil
from pathlib import Path

import pytest

from lightning_rl.reports import compare
from lightning_rl.sweeps.sweep import _resumed, _Sweep
from lightning_rl.sweeps.sweep_settings import SweepSettings
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import DEEPEST, MOST_BYTES, read_json
from lightning_rl.system.plain_yaml import LONGEST_TEXT, MOST_DEPTH, MOST_VALUES, read_yaml
from tests.cli.test_report import STEPS, make_run, report

SECRET = "what nobody may read"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text(SECRET)


def linked(path):
    path.unlink(missing_ok=True)
    path.symlink_to(Path("secret").resolve())


def piped(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def looped(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def large(path):
    with path.open("wb") as file:
        file.truncate(2**33)


def no_text(path):
    path.write_bytes(b"\xff\xfe")


def a_directory(path):
    path.unlink(missing_ok=True)
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
    "no date": "a: 2024-99-99",
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
    with pytest.raises(ConfigurationError, match="leads out of"):
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
    evaluation = {
        "episodes": 10,
        "env_steps": STEPS[-1],
        "avg_reward": 5.0,
        "std_reward": 1.0,
        "ci95": [4.0, 6.0],
        "avg_length": 9.0,
        "success_rate": None,
        "success_ci95": None,
        "terminations": 10,
        "truncations": 0,
        "intervened_steps": None,
        "metrics": {},
    }
    for i, value in enumerate(ODD):
        bad = make_run(f"bad{i}_20260101_000002", range(len(STEPS)))
        (bad / "evaluation.json").write_text(json.dumps(evaluation))
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
    with pytest.raises(ConfigurationError, match=r"The text (holds|is not valid YAML)"):
        read_yaml(YAMLS[name], "The text")


def test_yaml_within_the_bounds_is_read():
    assert read_yaml("a: &a [1, 2]\nb: [*a, *a]\n", "It")["b"] == [[1, 2], [1, 2]]
    assert read_yaml(nested(MOST_DEPTH), "It")


@pytest.mark.parametrize("name", JSONS)
def test_json_beyond_all_bounds_is_refused_with_one_message(name, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(JSONS[name])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_json(path, tmp_path)


def test_json_of_models_is_bounded_too(tmp_path):
    from lightning_rl.deploy.export.weights import read_exported
    from lightning_rl.policies.weights import read_json as settings_of_model

    path, beside = tmp_path / "a.safetensors", tmp_path / "a.safetensors.json"
    for spoil in (large, endless, lambda path: path.write_text(JSONS["deeper"])):
        beside.unlink(missing_ok=True)
        spoil(beside)
        for read in (lambda: read_exported(path), lambda: settings_of_model(beside)):
            with pytest.raises(ConfigurationError, match=r"a\.safetensors"):
                read()


def test_a_file_of_the_largest_size_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{}".ljust(MOST_BYTES))
    assert read_json(path, tmp_path) == {}


def swept(tmp_path, **state):
    """Return the directory of a sweep of two seeds, with another state."""
    directory = tmp_path / "sweep"
    directory.mkdir()
    trainer = {
        "best_metric": "eval/avg_reward",
        "best_mode": "max",
        "num_threads": 1,
        "devices": 1,
        "accelerator": "cpu",
    }
    (directory / "base.yaml").write_text(json.dumps({"trainer": trainer}))
    text = (directory / "base.yaml").read_text()
    made = _Sweep(directory, SweepSettings(seeds=[1, 2], search="grid"), text)
    made.save()
    content = json.loads((directory / "sweep.json").read_text())
    for path, value in state.items():
        with_value(content if "." in path else {path: content}, path, value)
    return directory, content


FORGED = {
    "settings": {"seeds": "/../../victim"},
    "seeds": {"seeds": ["/../../victim", 2]},
    "cores": {"jobs": "a"},
}
FORGED_TRIALS = {
    "seed": "/../../victim",
    "run": "../victim",
    "number": "x",
    "point": 7,
    "outcome": 3,
    "score": "a",
    "env_steps": [],
    "seconds": None,
    "unknown": 1,
}


@pytest.mark.parametrize("name", [*FORGED, *FORGED_TRIALS, "points", "trials"])
def test_a_forged_sweep_is_refused_and_removes_nothing(name, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.mkdir()
    directory, content = swept(tmp_path)
    if name in FORGED:
        content["settings"] |= FORGED[name]
    elif name in FORGED_TRIALS:
        content["trials"][0][name] = FORGED_TRIALS[name]
    elif name == "points":
        content["points"] = [{"trainer.run_dir": str(victim)}]
    else:
        content["trials"] = {}
    (directory / "sweep.json").write_text(json.dumps(content))
    with pytest.raises((ConfigurationError, SystemExit)) as refusal:
        _resumed(directory, SweepSettings(), [])
    if refusal.type is SystemExit:
        assert capsys.readouterr().err.startswith("rl-cli: error: ")
    assert victim.is_dir()


def test_a_link_in_a_sweep_is_not_removed(tmp_path):
    directory, _ = swept(tmp_path)
    (tmp_path / "victim").mkdir()
    (directory / "trial_000_seed1_2026").symlink_to(tmp_path / "victim")
    made = _resumed(directory, SweepSettings(), [])
    with pytest.raises(ConfigurationError, match="no directory of a run"):
        made._run_of(made.trials[0])
    shutil.rmtree(directory)
    assert (tmp_path / "victim").is_dir()
