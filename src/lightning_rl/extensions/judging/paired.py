"""Compare paired episodes: McNemar's test, the interval of a difference, episodes to play."""

import math
from collections.abc import Sequence
from statistics import NormalDist

Z, POWER_Z = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.8)
"""Quantiles of the normal distribution: of 95 % intervals, and of a power of 80 %."""


def mcnemar(gains: int, losses: int) -> float:
    """Return the exact two-sided p-value of paired successes (McNemar 1947).

    In `gains` episodes the first policy alone succeeded, in `losses` the second alone.
    """
    trials = gains + losses
    tail = sum(math.comb(trials, i) for i in range(min(gains, losses) + 1))
    return float(min(1.0, 2 * tail / 2**trials))


def difference_interval(gains: int, losses: int, episodes: int) -> list[float]:
    """Return [low, high], a 95 % interval of the difference of paired success rates.

    Agresti and Min 2005: with half an episode more in each of the four cells.
    """
    pairs, shift = episodes + 2, gains - losses
    half = Z * math.sqrt(gains + losses + 1 - shift**2 / pairs) / pairs
    return [max(-1.0, shift / pairs - half), min(1.0, shift / pairs + half)]


def needed_episodes(pairs: int, effect: float, interval: Sequence[float], step: int) -> int | None:
    """Return the pairs that show a mean difference with a power of 80 %; None without a difference.

    The 95 % `interval` of the `effect` in so many `pairs` narrows with the root of their number.
    Differences of whole `step`s need `step / effect` more (Levin and Chen 1999).
    """
    if effect == 0:
        return None
    half = (interval[1] - interval[0]) / 2
    return math.ceil(pairs * (half * (1 + POWER_Z / Z) / effect) ** 2 + step / abs(effect))
