"""Runs that diverged, whose files are partial, of unequal length, or of one seed twice."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from lightning_rl.extensions.reports.comparison import compare
from lightning_rl.extensions.reports.statistics import (
    interval_of_improvement,
    interval_of_iqm,
    iqm,
    iqm_curve,
    probability_of_improvement,
)
from tests.cli.test_report import make_run, report
from tests.messages import assert_names, refused

WHOLE = {
    "episodes": 10,
    "env_steps": 4000,
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


pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused_by_all_statistics(bad):
    scores, good = [[1.0, 2.0, 3.0, bad]], [[1.0, 2.0]]
    for call in (
        lambda: iqm(scores),
        lambda: interval_of_iqm(scores, resamples=10),
        lambda: iqm_curve(np.array(scores).T, resamples=10),
        lambda: probability_of_improvement(scores, good),
        lambda: probability_of_improvement(good, scores),
        lambda: interval_of_improvement(good, scores, resamples=10),
    ):
        with refused(names=("score", bad)):
            call()


def in_all_formats(capsys):
    """Write each format; return the JSON and what was told."""
    for name in ("html", "md", "json"):
        report("outputs", "--output", f"report.{name}")
    told = capsys.readouterr().err
    return json.loads(Path("report.json").read_text()), told


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_run_whose_last_evaluation_is_not_finite_is_left_out(bad, capsys):
    make_run("good_20260101_000000", [1, 2, 3, 4])
    make_run("bad_20260101_000000", [1, 2, 300, bad], seed=2)
    found, told = in_all_formats(capsys)
    assert [group["score"] for group in found["groups"]] == [4.0]
    assert "bad_20260101_000000" in found["left_out"][0]["run"]
    assert_names(told, "bad_20260101_000000", "evaluation")


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_an_earlier_one_is_a_gap_that_is_told(bad, capsys):
    make_run("a_20260101_000000", [1, bad, 3, 4])
    found, told = in_all_formats(capsys)
    assert found["groups"][0]["runs"][0]["curves"]["eval/avg_reward"]["values"] == [1, 3, 4]
    assert_names(told, "2,000 env steps")
    assert found["notes"] == [told.split("Note: ")[1].split("\n")[0]]


def test_a_speed_that_is_not_finite_ends_no_report(capsys):
    make_run("a_20260101_000000", [1, 2, 3, 4], speed=math.inf)
    make_run("b_20260101_000000", [1, 2, 3, 4], seed=2)
    found, _ = in_all_formats(capsys)
    assert len(found["groups"][0]["runs"]) == 2


@pytest.mark.parametrize(
    "evaluation",
    [
        {"avg_reward": 5.0},
        {name: value for name, value in WHOLE.items() if name != "ci95"},
        WHOLE | {"ci95": None},
        WHOLE | {"avg_reward": math.nan},
        WHOLE | {"avg_reward": math.inf},
        WHOLE | {"avg_reward": "5"} | {"metrics": None},
        WHOLE | {"metrics": {"height": math.nan}},
        WHOLE | {"ci95": [4.0]},
    ],
)
def test_a_partial_evaluation_leaves_its_run_out_and_no_other(evaluation, capsys):
    for seed, content in enumerate((WHOLE, evaluation), 1):
        run = make_run(f"a{seed}_20260101_000000", [1, 2, 3, 4], seed=seed)
        (run / "evaluation.json").write_text(json.dumps(content))
    found, told = in_all_formats(capsys)
    assert [run["seed"] for group in found["groups"] for run in group["runs"]] == [1]
    assert found["groups"][0]["score"] == 5.0
    assert "a2_20260101_000000/evaluation.json" in told


@pytest.mark.parametrize(
    "manifest", [{"seconds": None}, {"seconds": {"total": math.nan}}, {"earlier": [None]}]
)
def test_a_damaged_manifest_ends_no_report(manifest, capsys):
    make_run("good_20260101_000000", [1, 2, 3, 4])
    bad = make_run("bad_20260101_000000", [1, 2, 3, 4], seed=2) / "run.json"
    bad.write_text(json.dumps(json.loads(bad.read_text()) | manifest))
    found, _ = in_all_formats(capsys)
    assert found["groups"][0]["runs"][-1]["seed"] in (1, 2)


def test_runs_of_unequal_length_and_one_seed_twice_are_told(capsys):
    make_run("a_20260101_000000", [1, 2, 3, 4])
    make_run("b_20260101_000000", [1, 2], steps=[1000, 2000], seed=2)
    make_run("c_20260101_000000", [2, 3, 4, 5], seed=2)
    notes = compare(["outputs"]).notes
    assert_names(notes[0], "length")
    assert_names(notes[0], "2,000 env steps")
    assert_names(notes[1], "seed 2", "2 times")
    found, told = in_all_formats(capsys)
    assert found["notes"] == notes
    assert all(note in told for note in notes)
    assert_names(Path("report.md").read_text(), "length")


def test_a_run_that_is_named_twice_counts_once():
    run = make_run("a_20260101_000000", [1, 2, 3, 4])
    Path("again").symlink_to(run)
    compared = compare(["outputs", run.resolve(), "again"])
    assert len(compared.groups[0].runs) == 1
    assert compared.notes == []
