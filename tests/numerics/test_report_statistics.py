"""Scores over seeds: interquartile means, intervals and probabilities, as their definitions have them."""

import numpy as np
import pytest

from lightning_rl.extensions.reports.statistics import (
    interval_of_improvement,
    interval_of_iqm,
    iqm,
    iqm_curve,
    probability_of_improvement,
)
from tests import references

SCORES = {
    "five seeds": [[10.0, 250.0, 260.0, 275.0, 500.0]],
    "three seeds": [[1.0, 2.0, 9.0]],
    "tasks of unequal runs": [[0.1, 0.9, 0.4, 0.4], [0.3, 0.2, 0.8, 0.7, 0.6], [0.5, 0.5]],
    "twelve": [[float(i * i % 17) for i in range(12)]],
}


@pytest.mark.parametrize("name", SCORES)
def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end(name):
    assert iqm(SCORES[name]) == pytest.approx(references.iqm(SCORES[name]), rel=1e-12)


def test_of_five_the_lowest_and_the_highest_do_not_count():
    assert iqm([[-1e9, 1.0, 2.0, 3.0, 1e9]]) == 2.0
    assert iqm([[1.0, 2.0, 6.0]]) == 3.0  # of fewer than four it is the mean


@pytest.mark.parametrize("name", SCORES)
def test_its_interval_is_that_of_runs_drawn_again_within_each_task(name):
    scores = SCORES[name]
    expected = references.stratified_interval(references.iqm, [scores], 500)
    assert interval_of_iqm(scores, resamples=500) == pytest.approx(expected, rel=1e-12)


def test_of_five_runs_it_is_near_the_interval_of_all_the_3125_samples_that_there_are():
    (scores,) = SCORES["five seeds"]
    assert interval_of_iqm([scores]) == pytest.approx(references.exact_interval(scores), rel=0.03)


def test_a_curve_has_at_each_point_what_the_scores_there_have():
    values = np.random.default_rng(3).normal(size=(6, 7))
    curve = iqm_curve(values, resamples=300)
    for i, scores in enumerate(values.T):
        centre, (low, high) = iqm([scores]), interval_of_iqm([scores], resamples=300)
        assert curve[:, i] == pytest.approx([centre, low, high], rel=1e-12)


def test_its_interval_draws_the_runs_of_both():
    x, y = SCORES["tasks of unequal runs"], [[0.2, 0.6], [0.4, 0.1, 0.9], [0.7]]
    expected = references.stratified_interval(references.improvement, [x, y], 200, paired=True)
    assert interval_of_improvement(x, y, resamples=200) == pytest.approx(expected, rel=1e-12)
    low, high = interval_of_improvement(x, y)
    assert 0.0 <= low < probability_of_improvement(x, y) < high <= 1.0
