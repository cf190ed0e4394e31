"""Checksums of episodes: a replay that differs is noticed."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lightning_rl.envs.infos import RECORDED, TREES, EnvReport

MOST_NUMBERS = 64
"""Maximum numbers of one array of an observation that are summed up; a regular sample of more."""

FOLD_STEPS = 1024
"""Steps that are kept before they are summed up: sums of single steps would take longer."""

Checksums = dict[str, int]
"""CRC-32 of all values of an episode by name: observations, rewards and numbers of infos."""


class EpisodeChecksums:
    """Checksums of the running episodes of N envs.

    Attributes:
        steps: results of the last steps, not yet summed up: bytes of `views`, bytes of the rewards,
            the report, and `done` [N] bool (None: no episode ended). A step of 8 CartPoles takes
            .7 µs, and its share of `fold` .5 µs: .6 % of 205 µs in PPO.
        observation: the observation [N, ...] that `views` look at.
    """

    steps: list[tuple[list[bytes], bytes, EnvReport | None, Any]]

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self.observation: Any = None
        self.restore([{}] * num_envs)

    def restore(self, checksums: Sequence[Checksums]) -> None:
        """Continue saved checksums of each env."""
        self._sums = [dict(of_env) for of_env in checksums]
        self.steps = []

    def begin(self, observation: Any) -> None:
        """Begin an episode in every env, with observation [N, ...]."""
        self.restore([{}] * self._num_envs)
        self.add(observation, np.zeros(self._num_envs), None, np.ones(self._num_envs, bool))

    def add(
        self, observation: Any, reward: np.ndarray, report: EnvReport | None, done: Any
    ) -> None:
        """Add the results of a step: `done` [N] bool, or None if no episode ended."""
        self.look_at(observation)
        view_bytes = [view.tobytes() for view in self.views]
        self.steps.append((view_bytes, reward.tobytes(), report, done))

    def look_at(self, observation: Any) -> None:
        """Make the views of an observation [N, ...], whose arrays later steps overwrite."""
        views = dict(_views("observation", observation, self._num_envs))
        self.observation, self._names, self.views = observation, list(views), list(views.values())

    def values(self) -> list[Checksums]:
        """Return the checksums of all steps so far, of each env."""
        if self.steps:
            self.fold()
        return [dict(of_env) for of_env in self._sums]

    def fold(self) -> None:
        """Sum up `steps`."""
        views, rewards, reports, ends = zip(*self.steps, strict=True)
        self.steps = []
        starts = np.full(self._num_envs, -1)  # the last step after which a new episode began
        for t, done in enumerate(ends):
            if done is not None:
                starts[done] = t
        for i in np.flatnonzero(starts >= 0):
            self._sums[i] = {}
        every = np.arange(len(ends))
        for number, name in enumerate(self._names):
            # The last step of an episode returns the next one's first observation.
            values = self._of_bytes([of_step[number] for of_step in views])
            self._add_column(name, every, values, starts - 1)
        self._add_column("reward", every, self._of_bytes(rewards), starts)
        columns: dict[str, dict[int, np.ndarray]] = {}
        for t, report in enumerate(reports):
            for name, column in _columns(report) if report else ():
                columns.setdefault(name, {})[t] = column.reshape(self._num_envs, -1)
        for name, rows in columns.items():
            self._add_column(name, np.array(list(rows)), np.stack(list(rows.values())), starts)

    def _of_bytes(self, rows: Sequence[bytes]) -> np.ndarray:
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), self._num_envs, -1)

    def _add_column(
        self, name: str, times: np.ndarray, values: np.ndarray, starts: np.ndarray
    ) -> None:
        """Add `values` [T, N, ...] of steps `times` [T], of env i those after step `after[i]`."""
        for i, sums in enumerate(self._sums):
            of_env = values[times > starts[i], i]
            if values.dtype.kind == "f":  # a report, NaN in envs without it
                of_env = of_env[~np.isnan(of_env).all(-1)]
            if of_env.size:
                sums[name] = zlib.crc32(of_env.tobytes(), sums.get(name, 0))


def _views(name: str, observation: Any, num_envs: int) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(observation, dict):
        for key, child in observation.items():
            yield from _views(f"{name}.{key}", child, num_envs)
    else:
        rows = observation.reshape(num_envs, -1)
        yield name, rows[:, :: -(-rows.shape[1] // MOST_NUMBERS)]  # a regular sample of images


def _columns(report: EnvReport) -> Iterator[tuple[str, np.ndarray]]:
    yield from ((key, report[key]) for key in ("success", "penalty") if key in report)
    for tree in (*TREES, RECORDED):
        yield from ((f"{tree}.{name}", column) for name, column in report.get(tree, {}).items())
