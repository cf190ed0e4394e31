"""Read episodes that somebody recorded, and record some, without holding a dataset in memory."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, overload

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.errors import ConfigurationError, check_range, closest, require
from lightning_rl.offline import lerobot_format as lerobot
from lightning_rl.offline.lerobot_format import Leaf
from lightning_rl.offline.statistics import ColumnStatistics

Pictures = Literal["video", "png"]
"""How pictures are kept: compressed with some loss in a video, or without in the table."""

UNDER_WAY = ".recording"
"""The folder of what is not yet an episode."""

ROW_GROUP_BYTES = 2**22
"""How many bytes of an episode are kept in memory before they are written."""


@dataclass
class Episode:
    """One finished episode of L steps.

    Attributes:
        observation: [L+1, ...], a tensor or a tree of them; the last is the episode's true final
            observation, unless `final_known` is false.
        action: [L, *A], what was executed.
        reward: [L] float32, or float64 where the dataset has that; NaN where it has none.
        terminated: [L] bool, only the last may be true.
        truncated: [L] bool, likewise.
        success: whether it succeeded; None where nobody has said.
        intervened: [L] bool, whether somebody else than the policy chose the action.
        task: what was to be done, in words.
        extra: [L, ...] each, what else is known of each step, by name: penalties, labels.
        final_known: whether the dataset holds the true final observation. Where not, the last one
            is that before it again: nothing may be bootstrapped from it.
    """

    observation: Any
    action: Any
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: bool | None
    intervened: Tensor
    task: str
    extra: dict[str, Tensor] = field(default_factory=dict)
    final_known: bool = True

    def __len__(self) -> int:
        return len(self.reward)


class Episodes(Sequence[Episode]):
    """Episodes of a dataset, each read when it is asked for and not kept.

    Attributes:
        path: of the dataset.
        fps: frames per second; None where the dataset does not say.
        lengths: steps of each episode.
    """

    path: Path
    fps: float | None
    lengths: list[int]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...

    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        if isinstance(index, slice):
            return [self.read(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} episodes, there is none {index}.")
        return self.read(index % len(self))

    def read(self, index: int) -> Episode:
        """Read an episode, by its number from 0."""
        raise NotImplementedError


def read_episodes(
    path: str | Path,
    keys: Mapping[str, str] | None = None,
    *,
    observation_space: gymnasium.Space[Any] | None = None,
    action_space: gymnasium.Space[Any] | None = None,
    fps: float | None = None,
    ends: Literal["success", "terminated", "truncated"] = "success",
) -> Episodes:
    """Open a dataset: a directory of LeRobotDataset v3.0.

    Args:
        path: of the directory.
        keys: what a column of the dataset is here, where that is not clear from its name:
            `observation`, `observation.<key>` (of a Dict, with a dot for each level), `action`,
            `reward`, `done`, `terminated`, `truncated`, `success`, `intervened`.
        observation_space: of the env that the episodes are for; checked where given, and only its
            columns are read.
        action_space: likewise.
        fps: frames per second of that env; checked where given.
        ends: how an episode has ended where the dataset only says that it has: in a terminal state
            if it succeeded, and else by time; always in one; or never.

    Returns:
        a sequence of them, in the order of recording.

    Raises:
        ConfigurationError: where there is no dataset, or it is of another env.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigurationError(
            f"No dataset at {directory}: give the directory of a LeRobotDataset v3.0 (the one that "
            "holds meta/info.json)."
        )
    episodes = _LeRobotEpisodes(directory, keys or {}, observation_space, action_space, ends)
    _check_fps(episodes, fps)
    return episodes


def _check_fps(episodes: Episodes, fps: float | None) -> None:
    if fps is not None and episodes.fps is not None and abs(fps - episodes.fps) > 1e-3 * fps:
        raise ConfigurationError(
            f"The dataset at {episodes.path} has {episodes.fps:g} frames per second, and the env "
            f"takes {fps:g} steps per second: what was done in one step there takes another time "
            "here. Record it with this env, or set the env to that rate."
        )


NAMES = {
    "action": "action",
    "reward": "next.reward",
    "done": "next.done",
    "terminated": "next.terminated",
    "truncated": "next.truncated",
    "success": "next.success",
    "intervened": lerobot.INTERVENED,
}
"""What the columns of LeRobot's names are here, beside observations."""


class _LeRobotEpisodes(Episodes):
    """Episodes of a LeRobotDataset v3.0; see `read_episodes` for the arguments."""

    def __init__(
        self,
        path: Path,
        keys: Mapping[str, str],
        observation_space: gymnasium.Space[Any] | None,
        action_space: gymnasium.Space[Any] | None,
        ends: str,
    ) -> None:
        self.path, self._ends = path, ends
        info = lerobot.read_json(self._part(lerobot.INFO))
        version = str(info.get("codebase_version"))
        require(
            version.startswith("v3."),
            f"The dataset at {path} is of format {version}, and {lerobot.VERSION} is read: convert "
            "it with lerobot (lerobot.datasets.v30.convert_dataset_v21_to_v30).",
        )
        self.fps = float(info["fps"])
        self._features: dict[str, Any] = info["features"]
        self._data, self._videos = info["data_path"], info.get("video_path")
        names = _names(path, keys, self._features)
        self._columns = {n: key for n, key in (NAMES | names).items() if key in self._features}
        self._observation = self._find_observation(names, observation_space)
        self._action = self._find_action(action_space)
        self._extras = [
            key
            for key in self._features
            if key.startswith(lerobot.EXTRA) and key not in self._columns.values()
        ]
        self._read_episodes_table()
        self._open: tuple[Path, _TableFile] | None = None

    def _part(self, name: str) -> Path:
        return self.path / name

    def _read_episodes_table(self) -> None:
        parquet = lerobot.import_extra("pyarrow.parquet")
        files = sorted(
            self._part("meta/episodes").glob("chunk-*/file-*.parquet"), key=lerobot.number_of
        )
        self._rows: list[dict[str, Any]] = []
        for file in sorted(files, key=lerobot.number_of):
            names = parquet.read_schema(file).names
            wanted = [name for name in names if not name.startswith("stats/")]
            self._rows += parquet.read_table(file, columns=wanted).to_pylist()
        require(
            bool(self._rows), f"The dataset at {self.path} holds no finished episode: record one."
        )
        self.lengths = [int(row["length"]) for row in self._rows]
        self._begins: dict[tuple[int, int], int] = {}
        for row in self._rows:
            place = (row["data/chunk_index"], row["data/file_index"])
            begin = row["dataset_from_index"]
            self._begins[place] = min(begin, self._begins.get(place, begin))
        self._tasks = lerobot.tasks_of(parquet.read_table(self._part(lerobot.TASKS)))

    def _find_observation(
        self, names: Mapping[str, str], space: gymnasium.Space[Any] | None
    ) -> list[Leaf]:
        """Return where each part of an observation lies, with its shape and dtype."""
        ours = self._part(lerobot.OURS)
        known = (
            [
                Leaf(**{**leaf, "path": tuple(leaf["path"]), "shape": tuple(leaf["shape"])})
                for leaf in lerobot.read_json(ours)["observation"]
            ]
            if ours.is_file()
            else []
        )
        given = {name: key for name, key in names.items() if name.split(".")[0] == "observation"}
        if space is None:
            if given:
                return [
                    lerobot.leaf_of(key, self._features[key], tuple(name.split(".")[1:]))
                    for name, key in given.items()
                ]
            return known or lerobot.guessed_leaves(self._features)
        by_path = {leaf.path: leaf.key for leaf in known}
        guessed = lerobot.guessed_leaves(self._features)
        wanted = lerobot.leaves_of(space)
        found = []
        for leaf in wanted:
            name = ".".join(("observation", *leaf.path))
            key = given.get(name) or by_path.get(leaf.path) or leaf.key
            if key not in self._features and len(wanted) == len(guessed) == 1:
                key = guessed[0].key
            found.append(self._checked(name, key, leaf))
        return found

    def _find_action(self, space: gymnasium.Space[Any] | None) -> Leaf:
        key = self._columns.get("action", "action")
        ours = self._part(lerobot.OURS)
        if space is not None:
            return self._checked("action", key, lerobot.action_leaf(space))
        if ours.is_file():
            action = lerobot.read_json(ours)["action"]
            return Leaf((), key, tuple(action["shape"]), action["dtype"], False)
        return self._checked("action", key, None)

    def _checked(self, name: str, key: str, leaf: Leaf | None) -> Leaf:
        """Return the leaf of a column, which must be what an env has."""
        there = sorted(key for key in self._features if key not in lerobot.INDEX_COLUMNS)
        require(
            key in self._features,
            f"The dataset at {self.path} has no column '{key}' for {name}; it has "
            f"{', '.join(there)}. Say which one it is: keys: {{<column>: {name}}}, or record it "
            "with this env.",
        )
        feature = self._features[key]
        if leaf is None:
            return lerobot.leaf_of(key, feature, ())
        found = lerobot.leaf_of(key, feature, leaf.path)
        same_kind = np.dtype(found.dtype).kind == np.dtype(leaf.dtype).kind or (
            {np.dtype(one.dtype).kind for one in (found, leaf)} <= {"i", "u"}
        )
        require(
            found.picture == leaf.picture and found.shape == leaf.kept_shape and same_kind,
            f"The dataset at {self.path} is of another env: its {key} is {found.dtype} of shape "
            f"{list(found.shape)}, and {name} of this env is {leaf.dtype} of shape "
            f"{list(leaf.shape)}. Record it with this env, or say which column it is: "
            f"keys: {{<column>: {name}}}.",
        )
        return Leaf(leaf.path, key, leaf.shape, leaf.dtype, leaf.picture)

    def read(self, index: int) -> Episode:
        row, length = self._rows[index], self.lengths[index]
        table = self._frames(row, length)
        columns = {
            name: table.column(key)
            for name, key in self._columns.items()
            if key in table.column_names
        }
        observation: dict[tuple[str, ...], Tensor] = {}
        final_known = True
        for leaf in self._observation:
            values = lerobot.from_column(table.column(leaf.key), leaf.shape)
            final = row.get(f"final/{leaf.key}")
            final_known &= final is not None
            last = values[-1:] if final is None else np.array(final).reshape(1, *leaf.shape)
            joined = np.concatenate([values, last.astype(values.dtype)]).astype(leaf.dtype)
            observation[leaf.path] = torch.from_numpy(joined)
        action = lerobot.from_column(table.column(self._action.key), self._action.shape)
        truncated, terminated = (torch.zeros(length, dtype=torch.bool) for _ in range(2))
        success = self._success(row, columns)
        ended = self._terminated(columns, success)
        terminated[-1], truncated[-1] = ended, not ended
        return Episode(
            observation=_tree(observation),
            action=torch.from_numpy(action.astype(self._action.dtype)),
            reward=self._reward(columns, length),
            terminated=terminated,
            truncated=truncated,
            success=success,
            intervened=self._flags(columns, "intervened", length),
            task=self._tasks.get(table.column("task_index")[0].as_py(), ""),
            extra={
                key.removeprefix(lerobot.EXTRA): torch.from_numpy(self._values(table, key).copy())
                for key in self._extras
            },
            final_known=final_known,
        )

    def _values(self, table: Any, key: str) -> np.ndarray:
        shape = tuple(self._features[key]["shape"])
        return lerobot.from_column(table.column(key), () if shape == (1,) else shape)

    def _reward(self, columns: Mapping[str, Any], length: int) -> Tensor:
        if "reward" not in columns:
            return torch.full((length,), torch.nan)
        return torch.from_numpy(lerobot.from_column(columns["reward"], ()).astype(np.float32))

    def _flags(self, columns: Mapping[str, Any], name: str, length: int) -> Tensor:
        if name not in columns:
            return torch.zeros(length, dtype=torch.bool)
        return torch.from_numpy(lerobot.from_column(columns[name], ()).astype(bool))

    def _success(self, row: Mapping[str, Any], columns: Mapping[str, Any]) -> bool | None:
        if "success" in row or "success" not in columns:
            return row.get("success")
        return bool(lerobot.from_column(columns["success"], ()).any())

    def _terminated(self, columns: Mapping[str, Any], success: bool | None) -> bool:
        """Tell whether an episode ended in a terminal state."""
        if "terminated" in columns:
            return bool(columns["terminated"][-1].as_py())
        if self._ends != "success":
            return self._ends == "terminated"
        if success is None and "reward" in columns:
            return bool(columns["reward"][-1].as_py() > 0)
        return bool(success)

    def _frames(self, row: Mapping[str, Any], length: int) -> Any:
        """Return the rows of an episode in the table of data."""
        place = (row["data/chunk_index"], row["data/file_index"])
        path = self._part(self._data.format(chunk_index=place[0], file_index=place[1]))
        if self._open is None or self._open[0] != path:
            videos = {k for k, f in self._features.items() if f["dtype"] == "video"}
            wanted = {leaf.key for leaf in self._observation} | set(self._columns.values())
            wanted |= {*self._extras, self._action.key, "episode_index", "task_index"}
            self._open = (path, _TableFile(path, sorted(wanted - videos)))
        table = self._open[1].rows(row["dataset_from_index"] - self._begins[place], length)
        numbers = lerobot.from_column(table.column("episode_index"), ())
        require(
            len(numbers) == length and bool((numbers == row["episode_index"]).all()),
            f"{path} is damaged: it does not hold the {length} frames of episode "
            f"{row['episode_index']}. Restore it, or give another dataset.",
        )
        return table


class _TableFile:
    """Some columns of a parquet file, read by groups of rows, of which the last one is kept."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        parquet = lerobot.import_extra("pyarrow.parquet")
        self._path, self._columns = path, columns
        try:
            self._file = parquet.ParquetFile(path)
        except Exception as error:  # arrow's errors are of many kinds
            raise ConfigurationError(
                f"{path} cannot be read ({error}): restore it, or give another dataset."
            ) from error
        groups = self._file.metadata
        counts = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
        self._ends = list(accumulate(counts))
        self._kept: tuple[int, Any] | None = None

    def rows(self, first: int, count: int) -> Any:
        arrow = lerobot.import_extra("pyarrow")
        parts, begin = [], 0
        for group, end in enumerate(self._ends):
            if begin < first + count and end > first:
                table = self._group(group)
                start = max(first - begin, 0)
                parts.append(table.slice(start, min(first + count, end) - begin - start))
            begin = end
        return arrow.concat_tables(parts)

    def _group(self, number: int) -> Any:
        if self._kept is None or self._kept[0] != number:
            self._kept = (number, self._file.read_row_group(number, columns=self._columns))
        return self._kept[1]


def _names(path: Path, keys: Mapping[str, str], features: Mapping[str, Any]) -> dict[str, str]:
    """Return the column of each thing that `keys` names."""
    for key, name in keys.items():
        require(
            key in features,
            f"keys names '{key}', and the dataset at {path} has no such column"
            f"{closest(key, features)}. It has {', '.join(sorted(features))}.",
        )
        require(
            name in NAMES or name.split(".")[0] == "observation",
            f"keys: {{{key}: {name}}} is not understood: a column is observation, "
            f"observation.<key>, {', '.join(NAMES)}.",
        )
    return {name: key for key, name in keys.items()}


def _tree(leaves: Mapping[tuple[str, ...], Tensor]) -> Any:
    """Return the tensors by their paths, as nested dicts."""
    if () in leaves:
        return leaves[()]
    tree: dict[str, Any] = {}
    for (*above, last), value in leaves.items():
        here = tree
        for key in above:
            here = here.setdefault(key, {})
        here[last] = value
    return tree


class EpisodeWriter:
    """Record episodes into a LeRobotDataset v3.0, step by step.

    Memory does not grow with what is recorded, and each finished episode survives a SIGKILL at any
    moment: it has files of its own until `finalise` joins them. A directory that holds a dataset of
    the same columns is gone on with.

    Args:
        path: of the directory.
        observation_space: of the env.
        action_space: likewise.
        fps: steps per second.
        task: what is to be done, in words.
        pictures: how pictures are kept.

    Raises:
        ConfigurationError: for a space that a dataset cannot hold, and where the directory holds
            something else.
    """

    def __init__(
        self,
        path: str | Path,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        fps: float,
        task: str = "",
        pictures: Pictures = "video",
    ) -> None:
        check_range("fps", fps, above=0)
        self.path, self._fps = Path(path), float(fps)
        self._task = task
        self._pictures = "image" if pictures == "png" else "video"
        self._leaves = lerobot.leaves_of(observation_space)
        self._action = lerobot.action_leaf(action_space)
        self._extras: tuple[str, ...] | None = None
        self._tasks: list[str] = []
        self._episodes = self._frames = 0
        self._episode: _UnderWay | None = None

    def add(
        self,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        intervened: bool = False,
        extra: Mapping[str, float] = {},
    ) -> None:
        """Take a step in: the observation acted on, what was executed, and what came of it.

        Raises:
            ConfigurationError: where it is of other spaces, or has other extras than the first.
            RuntimeError: where the episode has ended before.
        """
        if self._episode is None:
            if self._extras is None:
                self._extras = tuple(sorted(extra))
            self._episode = self._begin()
        if set(extra) != set(self._extras or ()):
            raise ConfigurationError(
                f"The steps of {self.path} have the extras {list(self._extras or ())}, and this "
                f"one has {sorted(extra)}: give each step all of them, 0 where nothing is said."
            )
        flags = {"next.terminated": bool(terminated), "next.truncated": bool(truncated)}
        numbers = {f"{lerobot.EXTRA}{name}": value for name, value in extra.items()}
        self._episode.add(
            observation,
            action,
            {"next.reward": reward, **flags, lerobot.INTERVENED: bool(intervened), **numbers},
        )

    def end_episode(self, final_observation: Any, success: bool | None = None) -> None:
        """Finish the episode; when this returns, nothing takes it away.

        Args:
            final_observation: what followed the last step.
            success: whether it succeeded; None where nobody says.

        Raises:
            RuntimeError: where no step was taken.
        """
        episode = self._under_way("end_episode")
        finals = episode.finish(final_observation, success)
        place = lerobot.place_of(self._episodes)
        data = self.path / lerobot.DATA.format(**place)
        _move(episode.folder / "data.parquet", data)
        row = {
            "episode_index": self._episodes,
            "tasks": [self._task],
            "length": episode.length,
            **{f"data/{name}": number for name, number in place.items()},
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + episode.length,
            "success": success,
            **finals,
            **episode.statistics(),
            **{f"meta/episodes/{name}": number for name, number in place.items()},
        }
        self._write_meta(row, place)
        self._episodes += 1
        self._frames += episode.length
        self._write_info()
        self._forget()

    def discard_episode(self) -> None:
        """Forget the steps of the episode under way, as where it is to be recorded again."""
        self._forget()

    def finalise(self) -> None:
        """Join the files of the episodes, and write the statistics of all."""
        self._forget()

    def _under_way(self, method: str) -> "_UnderWay":
        if self._episode is None:
            raise RuntimeError(f"{method} was called before the first step of an episode.")
        return self._episode

    def _begin(self) -> "_UnderWay":
        if self._task not in self._tasks:
            self._tasks.append(self._task)
            lerobot.write_table(self.path / lerobot.TASKS, lerobot.tasks_table(self._tasks))
        folder = self.path / UNDER_WAY
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        indices = {
            "episode_index": self._episodes,
            "index": self._frames,
            "task_index": self._tasks.index(self._task),
        }
        return _UnderWay(folder, self._leaves, self._action, self._fps, indices)

    def _forget(self) -> None:
        self._episode = None
        shutil.rmtree(self.path / UNDER_WAY, ignore_errors=True)

    def _write_meta(self, row: Mapping[str, Any], place: Mapping[str, int]) -> None:
        arrow = lerobot.import_extra("pyarrow")
        columns = {
            name: [value.tolist() if isinstance(value, np.ndarray) else value]
            for name, value in row.items()
        }
        columns["success"] = arrow.array([row["success"]], arrow.bool_())
        lerobot.write_table(self.path / lerobot.EPISODES.format(**place), arrow.table(columns))

    def _write_info(self) -> None:
        numbers = dict(lerobot.STEP_COLUMNS)
        numbers |= {f"{lerobot.EXTRA}{name}": "float32" for name in self._extras or ()}
        numbers |= lerobot.INDEX_COLUMNS
        leaves = [*self._leaves, self._action]
        described = {
            "observation": [vars(leaf) for leaf in self._leaves],
            "action": vars(self._action),
        }
        lerobot.write_json(self.path / lerobot.OURS, described)
        info = {
            "codebase_version": lerobot.VERSION,
            "robot_type": None,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": lerobot.CHUNK_FILES,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": int(self._fps) if self._fps.is_integer() else self._fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": lerobot.DATA,
            "video_path": lerobot.VIDEOS,
            "features": {
                **{leaf.key: lerobot.feature_of(leaf, self._pictures) for leaf in leaves},
                **{name: lerobot.number_feature(dtype) for name, dtype in numbers.items()},
            },
        }
        lerobot.write_json(self.path / lerobot.INFO, info)


class _UnderWay:
    """An episode that is being recorded: rows go to a file as they come.

    Args:
        folder: of its files.
        leaves: of the observation.
        action: its leaf.
        fps: steps per second.
        indices: `episode_index`, `task_index`, and the `index` of its first frame.
    """

    def __init__(
        self,
        folder: Path,
        leaves: Sequence[Leaf],
        action: Leaf,
        fps: float,
        indices: Mapping[str, int],
    ) -> None:
        self.folder, self.length = folder, 0
        self._leaves, self._action, self._fps, self._indices = leaves, action, fps, indices
        self._statistics: dict[str, ColumnStatistics] = {}
        self._pending: dict[str, list[np.ndarray]] = {}
        self._bytes = 0
        self._writer: Any = None

    def add(self, observation: Any, action: Any, numbers: Mapping[str, float | bool]) -> None:
        if self._bytes > ROW_GROUP_BYTES:
            self._flush()
        if self.length and (self._last("next.terminated") or self._last("next.truncated")):
            raise RuntimeError(
                "The episode has ended: call end_episode(final_observation) before the next step."
            )
        row = {leaf.key: _value(leaf, observation) for leaf in self._leaves}
        row[self._action.key] = _value(self._action, action)
        columns = lerobot.STEP_COLUMNS | lerobot.INDEX_COLUMNS
        given = {
            **numbers,
            "next.done": numbers["next.terminated"] or numbers["next.truncated"],
            "next.success": False,
            **self._indices,
            "timestamp": self.length / self._fps,
            "frame_index": self.length,
            "index": self._indices["index"] + self.length,
        }
        for name, number in given.items():
            row[name] = np.array(number, columns.get(name, "float32"))
        for name, value in row.items():
            if name not in self._statistics:
                self._statistics[name] = ColumnStatistics(value.shape or (1,), False)
            self._statistics[name].add(value)
            self._pending.setdefault(name, []).append(value)
            self._bytes += value.nbytes
        self.length += 1

    def _last(self, name: str) -> bool:
        return bool(self._pending[name][-1])

    def finish(self, final_observation: Any, success: bool | None) -> dict[str, Any]:
        """Write what is left; return the final observation's columns."""
        if not (self._last("next.terminated") or self._last("next.truncated")):
            self._pending["next.truncated"][-1] = np.array(True)
        self._pending["next.done"][-1] = np.array(True)
        self._pending["next.success"][-1] = np.array(bool(success))
        self._flush()
        self._writer.close()
        return {
            f"final/{leaf.key}": _value(leaf, final_observation).reshape(-1)
            for leaf in self._leaves
        }

    def statistics(self) -> dict[str, np.ndarray]:
        """Return the columns of the episode's statistics."""
        return {
            f"stats/{key}/{name}": value
            for key, statistics in self._statistics.items()
            for name, value in statistics.result().items()
        }

    def _flush(self) -> None:
        arrow = lerobot.import_extra("pyarrow")
        table = arrow.table(
            {name: lerobot.as_column(np.stack(values)) for name, values in self._pending.items()}
        )
        if self._writer is None:
            parquet = lerobot.import_extra("pyarrow.parquet")
            self._writer = parquet.ParquetWriter(self.folder / "data.parquet", table.schema)
        self._writer.write_table(table)
        self._pending, self._bytes = {}, 0


def _value(leaf: Leaf, tree: Any) -> np.ndarray:
    """Return a copy of what a leaf has in an observation, or of the action.

    Raises:
        ConfigurationError: where it is missing, or of another shape.
    """
    value = tree
    for key in leaf.path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigurationError(
                f"The observation has no '{'.'.join(leaf.path)}', which its space has: return all "
                "parts of it from reset and step."
            ) from error
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    array = np.array(value, leaf.dtype)
    require(
        array.shape == leaf.shape,
        f"'{leaf.key}' has shape {list(array.shape)}, and by its space it is {list(leaf.shape)}.",
    )
    return array


def _move(source: Path, target: Path) -> None:
    """Rename a file that is whole, so that it lasts through a power cut."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
