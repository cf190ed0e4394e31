"""Compare paired episodes: tests of success and of returns, intervals, episodes to play."""

import math
from collections.abc import Sequence
from itertools import product
from statistics import NormalDist

import numpy as np

Z, POWER_Z = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.8)
"""Quantiles of the normal distribution: of 95 % intervals, and of a power of 80 %."""

MOST_EXACT = 12
"""Maximum differences whose signs are all tried."""

LEAST_EPISODES = 6
"""Minimum pairs for p <= 0.05: of 2**n choices of n signs, two have n equal ones."""


def mcnemar(gains: int, losses: int) -> float:
    """Return the exact two-sided p-value of paired successes (McNemar 1947).

    In `gains` episodes the first policy alone succeeded, in `losses` the second alone.
    """
    trials = gains + losses
    tail = sum(math.comb(trials, i) for i in range(min(gains, losses) + 1))
    return float(min(1.0, 2 * tail / 2**trials))


def sign_flips(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the mean of paired differences (Fisher 1935).

    Between equal policies, each difference might as well have the other sign. p is the share of
    signs whose mean is at least as far from zero: of all, or of 10,000 draws and the actual signs.
    """
    values = np.asarray(differences, np.float64)
    count, sums = len(values), []
    if count <= MOST_EXACT:
        sums = [np.array(list(product((-1, 1), repeat=count))) @ values]
    else:
        generator = np.random.default_rng(0)  # the same episodes give the same answer
        sums = [values.sum(keepdims=True)]
        for _ in range(100):  # parts, because all signs of many episodes fill the memory
            signs = 2.0 * generator.integers(2, size=(100, count), dtype=np.int8) - 1.0
            sums.append(signs @ values)
    limit = abs(values.sum()) - 1e-9 * np.abs(values).sum()  # sums in another order are rounded
    return float(np.mean(~(np.abs(np.concatenate(sums)) < limit)))  # NaN shows no difference


def difference_interval(gains: int, losses: int, episodes: int) -> list[float]:
    """Return [low, high], a 95 % interval of the difference of paired success rates.

    Agresti and Min 2005: with half an episode more in each of the four cells.
    """
    pairs, shift = episodes + 2, gains - losses
    half = Z * math.sqrt(gains + losses + 1 - shift**2 / pairs) / pairs
    return [max(-1.0, shift / pairs - half), min(1.0, shift / pairs + half)]


def needed_episodes(
    pairs: int, effect: float, interval: Sequence[float] | None, step: int
) -> int | None:
    """Return the pairs that show a mean difference with a power of 80 %.

    None without a difference or an interval.

    The 95 % `interval` of the `effect` in so many `pairs` narrows with the root of their number.
    Differences of whole `step`s need `step / effect` more (Levin and Chen 1999).
    """
    if effect == 0 or interval is None:
        return None
    half = (interval[1] - interval[0]) / 2
    needed = math.ceil(pairs * (half * (1 + POWER_Z / Z) / effect) ** 2 + step / abs(effect))
    return max(LEAST_EPISODES, needed)
