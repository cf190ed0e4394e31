"""Compute the statistics of a dataset's columns as LeRobot does."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_rl.extensions.datasets.lerobot_format import QUANTILES

SAMPLE = 4096
"""Maximum number of frames, evenly spaced, for the quantiles of an episode's numbers."""

STATISTICS = ("min", "max", "mean", "std", "count", *QUANTILES)
"""Names of the statistics."""

LEVELS = 256
"""Number of values of a picture's channel."""


class ColumnStatistics:
    """Statistics of one episode's frames of shape `shape`, in constant memory.

    With `picture`, frames are [H, W, C]: exact statistics per channel, scaled to [0, 1].
    """

    def __init__(self, shape: tuple[int, ...], picture: bool) -> None:
        self._shape, self._picture = shape, picture
        self._count = 0
        self._levels = np.zeros((shape[-1], LEVELS), np.int64) if picture else np.empty(0)
        self._sample: list[np.ndarray] = []
        self._stride = 1
        self._minimum = np.full(shape, np.inf)
        self._maximum = np.full(shape, -np.inf)
        self._mean = np.zeros(shape)
        self._squares = np.zeros(shape)  # sum of squared distances from the mean

    def add(self, frames: np.ndarray) -> None:
        count = len(frames)
        if self._picture:
            for channel in range(len(self._levels)):
                counts = np.bincount(frames[..., channel].ravel(), minlength=LEVELS)
                self._levels[channel] += counts
            self._count += count
            return
        values = frames.astype(np.float64).reshape(count, *self._shape)
        # Every stride-th frame of the episode, counted over the calls of `add`; at SAMPLE frames
        # the stride doubles, so the sample stays evenly spaced.
        self._sample += list(values[-self._count % self._stride :: self._stride])
        while len(self._sample) > SAMPLE:
            self._sample, self._stride = self._sample[::2], 2 * self._stride
        self._minimum = np.minimum(self._minimum, values.min(0))
        self._maximum = np.maximum(self._maximum, values.max(0))
        # Chan et al. (1979): join two means and sums of squares without the earlier frames.
        mean, total = values.mean(0), self._count + count
        distance = mean - self._mean
        self._squares += ((values - mean) ** 2).sum(0)
        self._squares += distance**2 * (self._count * count / total)
        self._mean += distance * (count / total)
        self._count = total

    def result(self) -> dict[str, np.ndarray]:
        """Return min, max, mean, std, count and the quantiles; [C, 1, 1] for pictures."""
        # A picture has only LEVELS values per channel, so a histogram gives exact statistics.
        count = np.array([self._count])
        if self._picture:
            parts = [_of_levels(levels) for levels in list(self._levels)]
            joined = {name: np.array([part[name] for part in parts]) for name in parts[0]}
            return {k: v.reshape(-1, 1, 1) for k, v in joined.items()} | {"count": count}
        sample = np.stack(self._sample)
        quantiles = np.quantile(sample, list(QUANTILES.values()), axis=0)
        return {
            "min": self._minimum,
            "max": self._maximum,
            "mean": self._mean,
            "std": np.sqrt(self._squares / self._count),
            "count": count,
            **dict(zip(QUANTILES, quantiles, strict=True)),
        }


def _of_levels(levels: Any) -> dict[str, float]:
    values, total = np.arange(LEVELS) / (LEVELS - 1), levels.sum()
    levels_present = values[levels > 0]
    mean = (levels * values).sum() / total
    cumulative = np.cumsum(levels)
    quantiles = {
        name: float(values[np.searchsorted(cumulative, share * total)])
        for name, share in QUANTILES.items()
    }
    deviation = np.sqrt((levels * (values - mean) ** 2).sum() / total)
    ends = {"min": float(levels_present[0]), "max": float(levels_present[-1])}
    return {**ends, "mean": float(mean), "std": float(deviation), **quantiles}


def joined_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Combine the statistics of episodes as LeRobot does.

    Quantiles of parts do not give the quantiles of the whole: the result is the smallest of
    the lower ones and the largest of the upper ones. See `quantiles_of` for exact ones.
    """
    arrays = [{name: np.array(part[name], np.float64) for name in part} for part in parts]
    counts = np.array([part["count"][0] for part in arrays])
    weights = (counts / counts.sum()).reshape(-1, *[1] * arrays[0]["mean"].ndim)
    columns = {name: np.stack([part[name] for part in arrays]) for name in arrays[0]}
    # The variance of the whole is the mean variance plus the variance of the means.
    mean = (weights * columns["mean"]).sum(0)
    variance = (weights * (columns["std"] ** 2 + (columns["mean"] - mean) ** 2)).sum(0)
    joined = {
        "min": columns["min"].min(0),
        "max": columns["max"].max(0),
        "mean": mean,
        "std": np.sqrt(variance),
    }
    for name in QUANTILES.keys() & columns.keys():
        joined[name] = columns[name].min(0) if QUANTILES[name] <= 0.5 else columns[name].max(0)
    return {name: value.tolist() for name, value in joined.items()} | {"count": [int(counts.sum())]}


def quantiles_of(frames: np.ndarray) -> dict[str, list[float]]:
    """Return the exact quantiles of frames [L, *shape], [*shape] each."""
    quantiles = np.quantile(frames.astype(np.float64), list(QUANTILES.values()), axis=0)
    return dict(zip(QUANTILES, quantiles.tolist(), strict=True))
