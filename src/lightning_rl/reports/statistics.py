"""Aggregate the scores of several seeds, with intervals: Agarwal et al. 2021, as rliable does.

"Deep Reinforcement Learning at the Edge of the Statistical Precipice", arXiv:2108.13264. Scores
come by task: a sequence of tasks, each with the scores of its runs. Scores of several tasks have to
be of one scale.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_rl.system.errors import require

RESAMPLES = 10_000
"""How many samples a bootstrap draws."""

CHUNK = 2**22
"""Numbers that are resampled at a time: 32 MiB."""

Scores = Sequence[Sequence[float]]
"""By task: the scores of its runs, of which there may be more for some tasks."""


def iqm(scores: Scores) -> float:
    """Return the interquartile mean: of all scores but the lowest and the highest quarter.

    Of n scores the floor(n / 4) lowest and as many of the highest are left out, so that of fewer
    than four it is their mean.

    Args:
        scores: by task.

    Raises:
        ConfigurationError: for a score that is not finite: NaN would sort as the best one.
    """
    return float(_trimmed_mean(np.concatenate([_finite(task) for task in scores])))


def interval_of_iqm(scores: Scores, *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return (low, high), the 95 % percentile-bootstrap interval of the interquartile mean.

    The bootstrap is stratified: of each task as many runs are drawn as it has, with replacement.
    The samples are the same at every call.

    Args:
        scores: by task.
        resamples: how many samples are drawn.

    Raises:
        ConfigurationError: for a score that is not finite.
    """
    generator = np.random.default_rng(0)
    drawn = np.concatenate([_resampled(task, resamples, generator) for task in scores], axis=1)
    return _interval(_trimmed_mean(drawn))


def iqm_curve(values: np.ndarray, *, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the interquartile mean at each point of a curve, and its interval: [3, T].

    Runs are drawn whole, as rliable does for a sample-efficiency curve. Of one run there is no
    interval: NaN.

    Args:
        values: of R runs at T points, [R, T].
        resamples: how many samples are drawn.

    Raises:
        ConfigurationError: for a value that is not finite.
    """
    runs, points = _finite(values).shape
    result = np.full((3, points), np.nan)
    result[0] = _trimmed_mean(values.T)
    if runs > 1:
        index = np.random.default_rng(0).integers(runs, size=(resamples, runs))
        step = max(1, CHUNK // index.size)
        for first in range(0, points, step):
            part = values.T[first : first + step]  # [points, R]
            drawn = _trimmed_mean(part[:, index])  # [points, resamples]
            result[1:, first : first + step] = np.percentile(drawn, [2.5, 97.5], axis=1)
    return result


def probability_of_improvement(scores: Scores, others: Scores) -> float:
    """Return how probable it is that a run has a higher score than a run of others.

    It is the Mann-Whitney U statistic over the number of pairs, averaged over the tasks: the share
    of the pairs in which it is higher, those with equal scores counted by a half.

    Args:
        scores: by task.
        others: by task, of the same tasks.

    Raises:
        ConfigurationError: for a score that is not finite.
    """
    pairs = zip(scores, others, strict=True)
    return float(np.mean([_share_above(_finite([x]), _finite([y])) for x, y in pairs]))


def interval_of_improvement(
    scores: Scores, others: Scores, *, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return (low, high), the 95 % percentile-bootstrap interval of that probability.

    Runs of both are drawn, each within their task; the samples are the same at every call.

    Args:
        scores: by task.
        others: by task, of the same tasks.
        resamples: how many samples are drawn.

    Raises:
        ConfigurationError: for a score that is not finite.
    """
    generator = np.random.default_rng(0)
    shares = [
        _share_above(_resampled(x, resamples, generator), _resampled(y, resamples, generator))
        for x, y in zip(scores, others, strict=True)
    ]
    return _interval(np.mean(shares, axis=0))


def _finite(scores: Any) -> np.ndarray:
    """Return scores as an array.

    Raises:
        ConfigurationError: if one is not finite.
    """
    values = np.asarray(scores, float)
    wrong = values[~np.isfinite(values)]
    require(
        len(wrong) == 0,
        f"A score is {wrong[:1]}, and scores are compared by their order and mean: leave that run "
        "out, or give it the score of a failure.",
    )
    return values


def _trimmed_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis of all but a quarter at either end."""
    count = values.shape[-1]
    cut = count // 4
    mean: np.ndarray = np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1)
    return mean


def _resampled(
    scores: Sequence[float], resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """Return samples [resamples, R] of R scores."""
    values = _finite(scores)
    return values[generator.integers(len(values), size=(resamples, len(values)))]


def _share_above(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the share [B] of pairs of x [B, X] and y [B, Y] in which x is higher."""
    higher = np.zeros(len(x))
    for column in y.T[:, :, None]:  # [Y, B, 1]: no array of all pairs of all samples
        higher += (x > column).mean(axis=1) + 0.5 * (x == column).mean(axis=1)
    share: np.ndarray = higher / y.shape[1]
    return share


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
