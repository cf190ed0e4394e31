"""Aggregate scores over seeds, with intervals: Agarwal et al. 2021, as in rliable.

"Deep Reinforcement Learning at the Edge of the Statistical Precipice", arXiv:2108.13264. Scores are
grouped by task; scores of several tasks must have the same scale.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_rl.extend.errors import require

RESAMPLES = 10_000
"""Number of bootstrap samples."""

CHUNK = 2**22
"""Numbers per resampled block: 32 MiB."""

Scores = Sequence[Sequence[float]]
"""Scores of each task's runs; tasks may have different numbers of runs."""


def iqm(scores: Scores) -> float:
    """Return the interquartile mean: the mean without the lowest and the highest quarter.

    Of n scores, floor(n / 4) are dropped at each end.

    Raises:
        ConfigurationError: for a score that is not finite: NaN would sort as the best score.
    """
    return float(_trimmed_mean(np.concatenate([_finite(task) for task in scores])))


def interval_of_iqm(scores: Scores, *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return (low, high), the 95 % percentile-bootstrap interval of the interquartile mean.

    The bootstrap is stratified: it draws runs with replacement within each task, with a fixed seed.

    Raises:
        ConfigurationError: for a score that is not finite.
    """
    # A fixed seed, so that the same runs give the same report.
    generator = np.random.default_rng(0)
    samples = np.concatenate([_resampled(task, resamples, generator) for task in scores], axis=1)
    return _interval(_trimmed_mean(samples))


def iqm_curve(values: np.ndarray, *, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the interquartile mean at each point of a curve and its interval: [3, T].

    The bootstrap draws whole runs, as in rliable's sample-efficiency curves. One run has no
    interval: NaN.

    Args:
        values: values of R runs at T points, [R, T].
        resamples: number of bootstrap samples.

    Raises:
        ConfigurationError: for a value that is not finite.
    """
    runs, points = _finite(values).shape
    result = np.full((3, points), np.nan)
    result[0] = _trimmed_mean(values.T)
    if runs > 1:
        index = np.random.default_rng(0).integers(runs, size=(resamples, runs))
        # Points per block, so that the indexed array stays within CHUNK numbers.
        step = max(1, CHUNK // index.size)
        for first in range(0, points, step):
            part = values.T[first : first + step]  # [points, R]
            means = _trimmed_mean(part[:, index])  # [points, resamples]
            result[1:, first : first + step] = np.percentile(means, [2.5, 97.5], axis=1)
    return result


def probability_of_improvement(scores: Scores, other_scores: Scores) -> float:
    """Return the probability that a run has a higher score than a run of `other_scores`.

    Mann-Whitney U statistic divided by the number of pairs, averaged over tasks; ties count one
    half. Both arguments need the same tasks.

    Raises:
        ConfigurationError: for a score that is not finite.
    """
    pairs = zip(scores, other_scores, strict=True)
    return float(np.mean([_share_above(_finite([x]), _finite([y])) for x, y in pairs]))


def interval_of_improvement(
    scores: Scores, other_scores: Scores, *, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return (low, high), the 95 % percentile-bootstrap interval of the probability of improvement.

    Raises:
        ConfigurationError: for a score that is not finite.
    """
    generator = np.random.default_rng(0)
    shares = [
        _share_above(_resampled(x, resamples, generator), _resampled(y, resamples, generator))
        for x, y in zip(scores, other_scores, strict=True)
    ]
    return _interval(np.mean(shares, axis=0))


def _finite(scores: Any) -> np.ndarray:
    # Checked here, where all scores pass: NumPy sorts NaN as the largest number.
    values = np.asarray(scores, float)
    invalid = values[~np.isfinite(values)]
    require(
        len(invalid) == 0,
        f"A score is {invalid[:1]}, which cannot be compared: remove that run, or give it the "
        "score of a failure.",
    )
    return values


def _trimmed_mean(values: np.ndarray) -> np.ndarray:
    count = values.shape[-1]
    cut = count // 4
    mean: np.ndarray = np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1)
    return mean


def _resampled(
    scores: Sequence[float], resamples: int, generator: np.random.Generator
) -> np.ndarray:
    values = _finite(scores)
    return values[generator.integers(len(values), size=(resamples, len(values)))]


def _share_above(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the share [B] of pairs of x [B, X] and y [B, Y] with higher x."""
    higher = np.zeros(len(x))
    for column in y.T[:, :, None]:  # [Y, B, 1], which avoids an array of all pairs
        higher += (x > column).mean(axis=1) + 0.5 * (x == column).mean(axis=1)
    share: np.ndarray = higher / y.shape[1]
    return share


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
