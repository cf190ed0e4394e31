"""A reader of datasets: a CSV file for each episode."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from lightning_rl import Episode, Episodes


class CsvEpisodes(Episodes):
    """Read `<directory>/*.csv` with rows of observation, action and reward; the last is an end.

    An episode of L steps has L + 1 rows; the action and the reward of its last row do not count.
    """

    fps = None

    def __init__(
        self,
        path: Path,
        keys: Mapping[str, str],
        observation_space: gymnasium.Space[Any] | None,
        action_space: gymnasium.Space[Any] | None,
        ends: str | None,
    ) -> None:
        self.path, self.files = path, sorted(path.glob("*.csv"))
        self.rows = [np.loadtxt(file, np.float32, delimiter=",", ndmin=2) for file in self.files]
        self.lengths = [len(rows) - 1 for rows in self.rows]

    def read(self, index: int) -> Episode:
        rows = torch.from_numpy(self.rows[index])
        no = torch.zeros(len(rows) - 1, dtype=torch.bool)
        end = no.index_fill(0, torch.tensor([len(no) - 1]), True)
        action, reward = rows[:-1, -2:-1], rows[:-1, -1]
        return Episode(rows[:, :-2], action, reward, end, no, True, no, task="")

    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        size = self.rows[0].shape[1] - 2
        return gymnasium.spaces.Box(-4, 4, (size,)), gymnasium.spaces.Box(-1, 1, (1,))
