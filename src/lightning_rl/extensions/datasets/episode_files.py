"""Write the steps of one episode to its own files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import require
from lightning_rl.extend.files import writing
from lightning_rl.extensions.datasets import lerobot_format as lerobot
from lightning_rl.extensions.datasets.lerobot_format import Leaf
from lightning_rl.extensions.datasets.pictures import PngEncoder, VideoWriter
from lightning_rl.extensions.datasets.statistics import ColumnStatistics

ROW_GROUP_BYTES = 2**20
"""Bytes of an episode in memory before a row group is written."""

ROWS = "data.parquet"


class EpisodeFiles:
    """Files of the unfinished episode.

    Args:
        folder: an existing folder.
        leaves: leaves of the observation.
        action: leaf of the action.
        fps: steps per second.
        video: whether pictures are stored as videos; otherwise as PNG in the table.
        indices: `episode_index`, and the `index` of its first frame.

    Attributes:
        length: L, number of steps.
        tasks: distinct tasks of the steps.
    """

    def __init__(
        self,
        folder: Path,
        leaves: Sequence[Leaf],
        action: Leaf,
        fps: float,
        video: bool,
        indices: Mapping[str, int],
    ) -> None:
        self.folder, self.length = folder, 0
        self.tasks: list[str] = []
        self._leaves, self._action, self._fps, self._indices = leaves, action, fps, indices
        self._statistics: dict[str, ColumnStatistics] = {}
        self._pending: dict[str, list[Any]] = {}
        self._bytes = 0
        self._writer: Any = None
        self._videos: dict[str, VideoWriter] = {}
        self._encoders: dict[str, PngEncoder] = {}
        for leaf in leaves:
            if not leaf.picture:
                continue
            height, width = leaf.kept_shape[:2]
            if video:
                file = self.folder / f"{leaf.key}.mp4"
                self._videos[leaf.key] = VideoWriter(file, height, width, fps)
            else:
                self._encoders[leaf.key] = PngEncoder(height, width)

    def add(
        self, observation: Any, action: Any, numbers: Mapping[str, float | bool], task: int
    ) -> None:
        # A step after the end would be an episode that no reader accepts.
        if self.length and (self._last("next.terminated") or self._last("next.truncated")):
            raise RuntimeError(
                "The episode has ended: call end_episode(final_observation) before the next step."
            )
        if self._bytes > ROW_GROUP_BYTES:  # hold the last row back, because `finish` changes it
            self._flush()
        values = {leaf.key: _value(leaf, observation) for leaf in self._leaves}
        values[self._action.key] = _value(self._action, action)
        columns = lerobot.STEP_COLUMNS | lerobot.INDEX_COLUMNS
        indices = {
            **self._indices,
            "task_index": task,
            "timestamp": self.length / self._fps,
            "frame_index": self.length,
            "index": self._indices["index"] + self.length,
        }
        # An extra has no dtype of its own: float32.
        for name, number in {**numbers, **indices}.items():
            leaf = Leaf((), name, (), columns.get(name, "float32"), False)
            values[name] = _value(leaf, np.squeeze(number))  # some envs return an array [1]
        values["next.done"] = values["next.terminated"] | values["next.truncated"]
        # One row stays in memory (see above): compare with the previous reward.
        rewards = [values["next.reward"], *self._pending.get("next.reward", ())[-1:]]
        require(
            len(set(np.isnan(rewards))) == 1,
            "The rewards of an episode are numbers, or all NaN if there are none; this episode has "
            f"both, at step {self.length}.",
        )
        # Pictures go to the video or the PNG encoder immediately; numbers wait for a row group.
        for leaf in self._leaves:
            if leaf.picture:
                self._add_picture(leaf.key, values.pop(leaf.key))
        for name, value in values.items():
            self._pending.setdefault(name, []).append(value)
            self._bytes += value.nbytes
        self.length += 1

    def _measure(self, name: str, frames: np.ndarray, picture: bool) -> None:
        if name not in self._statistics:
            self._statistics[name] = ColumnStatistics(frames.shape[1:] or (1,), picture)
        self._statistics[name].add(frames)

    def _add_picture(self, key: str, picture: np.ndarray) -> None:
        self._measure(key, picture[None], picture=True)
        if key in self._videos:
            with writing(self.folder):
                self._videos[key].add(picture)
            return
        content = self._encoders[key].encode(picture)
        self._pending.setdefault(key, []).append(content)
        self._bytes += len(content)

    def _last(self, name: str) -> bool:
        return bool(self._pending[name][-1])

    def finish(self, final_observation: Any, success: bool | None) -> dict[str, Any]:
        """Close the files; return the final observation's columns, null if it is unknown."""
        finals = {}
        for leaf in self._leaves:
            is_known = final_observation is not None
            value = _value(leaf, final_observation) if is_known else _nothing(leaf)
            if leaf.key in self._videos:
                # The column of a video holds the time of its final frame, not pixels.
                with writing(self.folder):
                    if is_known:
                        self._videos[leaf.key].add(value)
                    self._videos[leaf.key].close()
                column = lerobot.as_column(np.array([self.length / self._fps]))
            elif leaf.picture:
                column = lerobot.as_pictures([self._encoders[leaf.key].encode(value)])
            else:
                column = lerobot.as_column(value.reshape(1, -1))
            finals[f"final/{leaf.key}"] = column if is_known else _null_like(column)
        # The held-back last row gets the end of the episode.
        if not (self._last("next.terminated") or self._last("next.truncated")):
            self._pending["next.truncated"][-1] = np.array(True)
        self._pending["next.done"][-1] = np.array(True)
        self._pending["next.success"][-1] = np.array(bool(success))
        self._flush()
        with writing(self.folder):
            self._writer.close()
        return finals

    def statistics(self) -> dict[str, Any]:
        return {
            f"stats/{key}/{name}": value.tolist()
            for key, statistics in self._statistics.items()
            for name, value in statistics.result().items()
        }

    def _flush(self) -> None:
        arrow = lerobot.import_extra("pyarrow")
        # A row group becomes one table; statistics see its numbers before they leave the memory.
        columns = {}
        for name, values in self._pending.items():
            if name in self._encoders:
                columns[name] = lerobot.as_pictures(values)
                continue
            stacked = np.stack(values)
            self._measure(name, stacked, picture=False)
            columns[name] = lerobot.as_column(stacked)
        table = arrow.table(columns)
        with writing(self.folder):
            if self._writer is None:
                parquet = lerobot.import_extra("pyarrow.parquet")
                self._writer = parquet.ParquetWriter(self.folder / ROWS, table.schema)
            self._writer.write_table(table)
        self._pending, self._bytes = {}, 0


def _nothing(leaf: Leaf) -> np.ndarray:
    return np.zeros(leaf.kept_shape if leaf.picture else leaf.shape, leaf.dtype)


def _null_like(column: Any) -> Any:
    return lerobot.import_extra("pyarrow").nulls(len(column), column.type)


def _value(leaf: Leaf, tree: Any) -> np.ndarray:
    value = tree
    for key in leaf.path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigurationError(
                f"The observation has no '{'.'.join(leaf.path)}', which its space has: return all "
                "parts of the observation from reset and step."
            ) from error
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    array = _converted(leaf, value)
    require(
        array.shape == leaf.shape,
        f"'{leaf.key}' has shape {list(array.shape)}, but its space has shape {list(leaf.shape)}.",
    )
    # LeRobot stores pictures as [H, W, C].
    return array.transpose(1, 2, 0) if leaf.channels_first else array


def _converted(leaf: Leaf, value: Any) -> np.ndarray:
    """Return a value in the dtype of its leaf, if that changes no number but by rounding."""
    prefix = f"'{leaf.key}' has "
    try:
        values = np.asarray(value)
        # NumPy casts arrays silently, also out of range: the comparison below finds it.
        array = np.array(values, leaf.dtype)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{prefix}no numbers: {error}.") from error
    require(
        values.dtype.kind in "biuf",
        f"{prefix}values of {values.dtype}, but its space holds numbers of {leaf.dtype}.",
    )
    if array.dtype.kind == "f":
        is_reward = leaf.key == "next.reward"  # NaN: the dataset has no rewards
        refused = np.isinf(array) if is_reward else ~np.isfinite(array)
        require(
            leaf.key.startswith(lerobot.EXTRA) or not refused.any(),
            f"{prefix}{values}, but no reader accepts NaN or inf there.",
        )
    elif values.dtype != array.dtype and not (array == values).all():
        raise ConfigurationError(
            f"{prefix}numbers from {values.min()} to {values.max()} of {values.dtype}, which "
            f"{leaf.dtype} cannot hold.{' Pictures are uint8, from 0 to 255.' * leaf.picture}"
        )
    return array
