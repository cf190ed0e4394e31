"""Tests of paired comparisons against enumerations and simulations."""

from itertools import product

import numpy as np
import pytest

from lightning_rl.extensions.judging.command import comparison, seed_of
from lightning_rl.extensions.judging.paired import (
    difference_interval,
    mcnemar,
    needed_episodes,
    sign_flips,
)


def episode(success, total=0.0):
    ended = {"length": 1, "terminated": True, "cut": False, "seed": 0}
    return {"success": success, "return": total} | ended


@pytest.mark.parametrize(("gains", "losses"), [(0, 0), (1, 0), (3, 3), (0, 6), (9, 2), (5, 7)])
def test_the_p_value_is_the_share_of_all_assignments(gains, losses):
    """Of all that give each disagreement to one of the two: those that are at least as uneven."""
    assignments = list(product((-1, 1), repeat=gains + losses))
    uneven = [abs(sum(signs)) >= abs(gains - losses) for signs in assignments]
    assert mcnemar(gains, losses) == pytest.approx(np.mean(uneven), abs=1e-15)


@pytest.mark.parametrize("count", [1, 5, 12, 14])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_p_value_of_returns_is_the_share_of_signs(count, shift):
    """Sums of whole numbers are often equal; those of tenths are rounded."""
    values = (np.random.default_rng(count).integers(-9, 9, count) + 9 * shift).tolist()
    sums = [0.0]
    for value in values:
        sums = [total + sign * value for total in sums for sign in (-1, 1)]
    share = sum(abs(total) >= abs(sum(values)) for total in sums) / len(sums)
    assert sign_flips([0.1 * value for value in values]) == pytest.approx(
        share, abs=1e-12 if count <= 12 else 0.02
    )


def test_equal_policies_seldom_differ_in_their_returns():
    draws = np.random.default_rng(0).normal(size=(400, 20))
    assert np.mean([sign_flips(draw) <= 0.05 for draw in draws]) <= 0.08
    for count in (1, 2, 5):  # even if the first is better in each
        row = comparison([(episode(None, 1.0 + i), episode(None)) for i in range(count)])
        assert (row["differ"], row["ci95"] is None) == (False, count == 1)
        assert row["needed_episodes"] == (None if count == 1 else 6)


def draw_thousand(gain, loss, pairs):
    """The numbers of pairs of which the first, and of which the second alone succeeds, [1000, 2]."""
    generator = np.random.default_rng(0)
    return generator.multinomial(pairs, [gain, loss, 1 - gain - loss], 1_000)[:, :2].tolist()


@pytest.mark.parametrize(("pairs", "apart"), [(20, 0.4), (50, 0.1), (50, 0.5)])
def test_equal_policies_are_called_different_in_at_most_one_comparison_of_twenty(pairs, apart):
    draws = draw_thousand(apart / 2, apart / 2, pairs)
    assert np.mean([mcnemar(*draw) <= 0.05 for draw in draws]) <= 0.05


@pytest.mark.parametrize(("gain", "loss"), [(0.1, 0.1), (0.25, 0.1)])
def test_the_interval_covers_the_difference(gain, loss):
    draws = draw_thousand(gain, loss, 50)
    intervals = np.array([difference_interval(*draw, 50) for draw in draws])
    covered = (intervals[:, 0] <= gain - loss) & (gain - loss <= intervals[:, 1])
    assert covered.mean() >= 0.93


def test_the_needed_episodes_show_the_difference_in_four_of_five_comparisons():
    gain, loss, pairs = 0.25, 0.1, 1_000
    interval = difference_interval(250, 100, pairs)
    needed = needed_episodes(pairs, gain - loss, interval, 1)
    draws = draw_thousand(gain, loss, needed)
    assert 0.77 <= np.mean([mcnemar(*draw) <= 0.05 for draw in draws]) <= 0.85


def test_returns_are_compared_pair_by_pair():
    """A difference of .5 is lost in the spread of the returns, but not in the pairs."""
    totals = np.random.default_rng(0).normal(0, 100, 40)
    row = comparison([(episode(None, total + 0.5), episode(None, total)) for total in totals])
    assert row["differ"]
    assert row["ci95"] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("silent", [None, False])
def test_an_episode_without_a_report_is_a_failure_once_another_has_reported_success(silent):
    """The second policy solves 5 of 20, and the env says nothing of a failure; its return is higher."""
    pairs = [(episode(True), episode(True if i < 5 else silent, 0.1)) for i in range(20)]
    row = comparison(pairs)
    assert (row["success_rate"], row["p"]) == (0.75, mcnemar(15, 0))
    quiet = [(episode(silent), episode(silent))] * 3  # a task without a success
    assert comparison(quiet, reports_success=True)["success_rate"] == 0.0


def test_seeds_of_tasks_are_apart_and_follow_each_other():
    assert [seed_of(0, "task_id=3", k) % 50 for k in (0, 1, 49, 50)] == [0, 1, 49, 0]
    seeds = {seed_of(seed, task, 0) for seed in range(10) for task in ("a", "b", "task_id=3")}
    assert len(seeds) == 30
    assert max(seeds) < 2**31
