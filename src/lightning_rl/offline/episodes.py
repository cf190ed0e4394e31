"""Read episodes that somebody recorded, and record some, without holding a dataset in memory."""

import os
import shutil
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import nan
from pathlib import Path
from typing import Any, Literal, overload

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.errors import ConfigurationError, check_range, closest, require
from lightning_rl.files import expanded, lock_file, move, writing
from lightning_rl.offline import lerobot_format as lerobot
from lightning_rl.offline.joining import FINISHED, TOPS, complete_join, join_files, part_of
from lightning_rl.offline.lerobot_format import Leaf, leaves_of
from lightning_rl.offline.minari_format import (
    MinariFile,
    infos_of,
    minari_folder,
    steps_of,
    write_minari_files,
)
from lightning_rl.offline.pictures import CURE, decode_picture, read_frames
from lightning_rl.offline.recording import ROWS, Recording
from lightning_rl.rollout import map_tree

Pictures = Literal["video", "png"]
"""How pictures are kept: compressed with some loss in a video, or without in the table."""

UNDER_WAY = ".recording"
"""The folder of what is not yet an episode."""

LOCK = ".lock"
"""The file that the process which records into a directory holds."""

_NONE_FINISHED = "The dataset at {} holds no finished episode: record one."

Ends = Literal["success", "terminated", "truncated"]
"""How an episode has ended of which a dataset only says that it has."""


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

    @abstractmethod
    def read(self, index: int) -> Episode:
        """Read an episode, by its number from 0."""

    def successes(self) -> list[bool | None]:
        """Return whether each episode succeeded; None where nobody has said."""
        return [self.read(index).success for index in range(len(self))]


def read_episodes(
    path: str | Path,
    keys: Mapping[str, str] | None = None,
    *,
    observation_space: gymnasium.Space[Any] | None = None,
    action_space: gymnasium.Space[Any] | None = None,
    fps: float | None = None,
    ends: Ends = "success",
) -> Episodes:
    """Open a dataset: the directory of a LeRobotDataset v3.0, or of a Minari dataset.

    Args:
        path: of the directory.
        keys: what a column of the dataset is here, where that is not clear from its name:
            `observation`, `observation.<key>` (of a Dict, with a dot for each level), `action`,
            `reward`, `done`, `terminated`, `truncated`, `success`, `intervened`. Of Minari's, only
            an entry of its infos can be named.
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
    directory = expanded(path)
    if not directory.is_dir():
        raise ConfigurationError(
            f"No dataset at {directory}: give the directory of a LeRobotDataset v3.0 (the one that "
            "holds meta/info.json), or of a Minari dataset (that which holds data/metadata.json)."
        )
    if minari_folder(directory) is not None:
        return _MinariEpisodes(directory, keys or {}, observation_space, action_space)
    episodes = _LeRobotEpisodes(directory, keys or {}, observation_space, action_space, ends)
    _check_fps(episodes, fps)
    return episodes


def read_numbers(path: str | Path) -> Episodes:
    """Open a LeRobotDataset v3.0 of which no picture is read: observations lack them.

    Args:
        path: of the directory.

    Raises:
        ConfigurationError: where there is no dataset.
    """
    episodes = _LeRobotEpisodes(expanded(path), {}, None, None, "success")
    episodes.leaves = [leaf for leaf in episodes.leaves if not leaf.picture]
    return episodes


def lock_dataset(path: Path) -> Callable[[], None]:
    """Keep other processes from writing into a dataset; return what lets them again.

    Raises:
        ConfigurationError: where another process writes into it.
    """
    descriptor = lock_file(
        path / LOCK,
        f"{{owner}} records into {path}, or labels it: two would write over each other. Wait for "
        "it, or give another directory.",
    )
    return (lambda: None) if descriptor is None else partial(os.close, descriptor)


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
        ends: Ends,
    ) -> None:
        self.path, self._ends = path, ends
        described = part_of(path, lerobot.INFO)
        require(described.is_file() or not (path / LOCK).exists(), _NONE_FINISHED.format(path))
        info = lerobot.read_json(described)
        version = str(info.get("codebase_version"))
        require(
            version.startswith("v3."),
            f"The dataset at {path} is of format {version}, and {lerobot.VERSION} is read: convert "
            "it with lerobot (lerobot.datasets.v30.convert_dataset_v21_to_v30).",
        )
        self.fps = float(info["fps"])
        self._features: dict[str, Any] = info["features"]
        self._data, self._video = info["data_path"], info.get("video_path")
        ours = part_of(path, lerobot.OURS)
        described = lerobot.read_json(ours) if ours.is_file() else {}
        names = _names(path, keys, self._features)
        self._columns = {n: key for n, key in (NAMES | names).items() if key in self._features}
        self.leaves = self._find_observation(names, described, observation_space)
        self._action = self._find_action(described, action_space)
        extras = [key for key in self._features if key.startswith(lerobot.EXTRA)]
        taken = {*self._columns.values(), *(leaf.key for leaf in self.leaves)}
        self.extras = tuple(key.removeprefix(lerobot.EXTRA) for key in extras if key not in taken)
        self._read_table_of_episodes()
        self._open: dict[str, _TableFile] = {}

    def _read_table_of_episodes(self) -> None:
        parquet = lerobot.import_extra("pyarrow.parquet")
        self._rows: list[dict[str, Any]] = []
        for file in lerobot.files_of(part_of(self.path, lerobot.EPISODES)):
            with _readable(file):
                names = parquet.read_schema(file).names
                wanted = [name for name in names if not name.startswith(("stats/", "final/"))]
                rows = parquet.read_table(file, columns=wanted).to_pylist()
            finals = [name for name in names if name.startswith("final/")]
            place = {"file": file, "finals": finals}
            self._rows += [{**row, **place, "row": i} for i, row in enumerate(rows)]
        require(bool(self._rows), _NONE_FINISHED.format(self.path))
        self.lengths = [int(row["length"]) for row in self._rows]
        self._begins: dict[Path, int] = {}
        for row in self._rows:
            path, begin = self._data_file(row), row["dataset_from_index"]
            self._begins[path] = min(begin, self._begins.get(path, begin))
        tasks = part_of(self.path, lerobot.TASKS)
        with _readable(tasks):
            self.tasks = lerobot.tasks_of(parquet.read_table(tasks))

    def _data_file(self, row: Mapping[str, Any]) -> Path:
        name = self._data.format(
            chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
        )
        return part_of(self.path, name)

    def file_numbers(self) -> dict[str, int]:
        """Return the number behind the last file of each kind."""
        cameras = [key for key, feature in self._features.items() if feature["dtype"] == "video"]
        prefixes = {"data": "data", "meta": "meta/episodes"}
        prefixes |= {"videos": f"videos/{cameras[0]}"} if cameras else {}

        def behind(prefix: str) -> int:
            row = self._rows[-1]
            chunk, file = (row[f"{prefix}/{name}_index"] for name in ("chunk", "file"))
            return int(chunk) * lerobot.CHUNK_FILES + int(file) + 1

        return {"videos": 0, **{kind: behind(prefix) for kind, prefix in prefixes.items()}}

    def _find_observation(
        self,
        names: Mapping[str, str],
        described: Mapping[str, Any],
        space: gymnasium.Space[Any] | None,
    ) -> list[Leaf]:
        """Return where each part of an observation lies, with its shape and dtype."""
        known = [lerobot.leaf_from(leaf) for leaf in described.get("observation", ())]
        given = {name: key for name, key in names.items() if name.split(".")[0] == "observation"}
        if space is None and given:
            return [
                lerobot.leaf_of(key, self._features[key], tuple(name.split(".")[1:]))
                for name, key in given.items()
            ]
        if space is None:
            return known or lerobot.guessed_leaves(self._features)
        by_path = {leaf.path: leaf.key for leaf in known}
        guessed, wanted = lerobot.guessed_leaves(self._features), leaves_of(space)
        found = []
        for leaf in wanted:
            name = ".".join(("observation", *leaf.path))
            key = given.get(name) or by_path.get(leaf.path) or leaf.key
            if key not in self._features and len(wanted) == len(guessed) == 1:
                key = guessed[0].key
            found.append(self._checked(name, key, leaf))
        return found

    def _find_action(
        self, described: Mapping[str, Any], space: gymnasium.Space[Any] | None
    ) -> Leaf:
        key = self._columns.get("action", "action")
        if space is not None:
            return self._checked("action", key, lerobot.action_leaf(space))
        if "action" in described:
            return replace(lerobot.leaf_from(described["action"]), key=key)
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
        found = lerobot.leaf_of(key, self._features[key], ())
        if leaf is None:
            return found
        kinds = {np.dtype(one.dtype).kind.replace("u", "i") for one in (found, leaf)}
        require(
            found.picture == leaf.picture and found.shape == leaf.kept_shape and len(kinds) == 1,
            f"The dataset at {self.path} is of another env: its {key} is {found.dtype} of shape "
            f"{list(found.shape)}, and {name} of this env is {leaf.dtype} of shape "
            f"{list(leaf.shape)}. Record it with this env, or say which column it is: "
            f"keys: {{<column>: {name}}}.",
        )
        return replace(leaf, key=key)

    def read(self, index: int) -> Episode:
        row, length = self._rows[index], self.lengths[index]
        table = self._frames(row, length)
        columns = {name: table.column(key) for name, key in self._columns.items()}
        observation, final_known = self._observations(row, table)
        truncated, terminated = (torch.zeros(length, dtype=torch.bool) for _ in range(2))
        success = self._success(row, columns)
        terminated[-1] = self._terminated(columns, success)
        truncated[-1] = not terminated[-1]
        return Episode(
            observation=observation,
            action=self._numbers(table, self._action),
            reward=self._reward(columns, length),
            terminated=terminated,
            truncated=truncated,
            success=success,
            intervened=self._intervened(columns, length),
            task=self.tasks.get(table.column("task_index")[0].as_py(), ""),
            extra={name: self._extra(table, name) for name in self.extras},
            final_known=final_known,
        )

    def successes(self) -> list[bool | None]:
        found = []
        for row, length in zip(self._rows, self.lengths, strict=True):
            columns: dict[str, Any] = {}
            if "success" not in row and "success" in self._columns:
                table = self._frames(row, length)  # no film is decoded for it
                columns["success"] = table.column(self._columns["success"])
            found.append(self._success(row, columns))
        return found

    def _observations(self, row: Mapping[str, Any], table: Any) -> tuple[Any, bool]:
        """Return the observations [L+1, ...] of an episode, and whether the last is true."""
        known = all(f"final/{leaf.key}" in row["finals"] for leaf in self.leaves)
        finals = self._file("finals", row["file"], row["finals"]).rows(row["row"], 1)
        leaves: dict[tuple[str, ...], Tensor] = {}
        for leaf in self.leaves:
            final = finals.column(f"final/{leaf.key}") if known else None
            if self._features[leaf.key]["dtype"] == "video":
                values = self._filmed(row, leaf, len(table), final)
            elif leaf.picture:
                kept = [table.column(leaf.key), *([] if final is None else [final])]
                values = self._pictures(kept, leaf)
            else:
                values = lerobot.from_column(table.column(leaf.key), leaf.shape)
                if final is not None:
                    last = lerobot.from_column(final, leaf.shape).astype(values.dtype)
                    values = np.concatenate([values, last])
            if final is None:
                values = np.concatenate([values, values[-1:]])
            if leaf.channels_first:
                values = np.ascontiguousarray(values.transpose(0, 3, 1, 2))
            leaves[leaf.path] = torch.from_numpy(values.astype(leaf.dtype, copy=False))
        return _tree(leaves), known

    def _filmed(
        self, row: Mapping[str, Any], leaf: Leaf, length: int, final: Any | None
    ) -> np.ndarray:
        prefix = f"videos/{leaf.key}"
        name = str(self._video).format(
            video_key=leaf.key,
            chunk_index=row[f"{prefix}/chunk_index"],
            file_index=row[f"{prefix}/file_index"],
        )
        begin, fps = row[f"{prefix}/from_timestamp"], self.fps or 1.0
        times = [begin + i / fps for i in range(length)]
        if final is not None:
            times.append(begin + float(lerobot.from_column(final, (1,))[0, 0]))
        return read_frames(part_of(self.path, name), times, fps, leaf.kept_shape)

    def _pictures(self, columns: Sequence[Any], leaf: Leaf) -> np.ndarray:
        """Decode the pictures of some columns into one array."""
        pictures = np.empty((sum(map(len, columns)), *leaf.kept_shape), np.uint8)
        contents = (content for column in columns for content in column)
        try:
            for picture, content in zip(pictures, contents, strict=True):
                picture[...] = decode_picture(content["bytes"].as_py())
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"The dataset at {self.path} has a broken picture in '{leaf.key}': {error}. {CURE}"
            ) from error
        return pictures

    def _numbers(self, table: Any, leaf: Leaf) -> Tensor:
        values = lerobot.from_column(table.column(leaf.key), leaf.shape)
        return torch.from_numpy(values.astype(leaf.dtype))

    def _extra(self, table: Any, name: str) -> Tensor:
        key = f"{lerobot.EXTRA}{name}"
        shape = tuple(self._features[key]["shape"])
        values = lerobot.from_column(table.column(key), () if shape == (1,) else shape)
        return torch.from_numpy(values.copy())

    def _reward(self, columns: Mapping[str, Any], length: int) -> Tensor:
        if "reward" not in columns:
            return torch.full((length,), torch.nan)
        return torch.from_numpy(lerobot.from_column(columns["reward"], ()).astype(np.float32))

    def _intervened(self, columns: Mapping[str, Any], length: int) -> Tensor:
        if "intervened" not in columns:
            return torch.zeros(length, dtype=torch.bool)
        return torch.from_numpy(lerobot.from_column(columns["intervened"], ()).astype(bool))

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
        path = self._data_file(row)
        videos = {key for key, one in self._features.items() if one["dtype"] == "video"}
        wanted = {leaf.key for leaf in self.leaves} | set(self._columns.values())
        wanted |= {f"{lerobot.EXTRA}{name}" for name in self.extras}
        wanted |= {self._action.key, "episode_index", "task_index"}
        file = self._file("data", path, sorted(wanted - videos))
        table = file.rows(row["dataset_from_index"] - self._begins[path], length)
        numbers = table.column("episode_index").to_pylist()
        require(
            numbers == [row["episode_index"]] * length,
            f"{path} is damaged: it does not hold the {length} frames of episode "
            f"{row['episode_index']}. Restore it, or give another dataset.",
        )
        return table

    def _file(self, kind: str, path: Path, columns: list[str]) -> "_TableFile":
        """Return a file of a kind, of which the last one stays open."""
        if kind not in self._open or self._open[kind].path != path:
            self._open[kind] = _TableFile(path, columns)
        return self._open[kind]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say readably that a file is missing or damaged."""
    arrow = lerobot.import_extra("pyarrow")
    try:
        yield
    except (OSError, arrow.ArrowException) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}): restore it, or give another dataset."
        ) from error


class _TableFile:
    """Some columns of a parquet file, read by groups of rows, of which the last one is kept."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        parquet = lerobot.import_extra("pyarrow.parquet")
        self.path, self._columns = path, columns
        with _readable(path):
            self._file = parquet.ParquetFile(path)
        groups = self._file.metadata
        counts = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
        self._ends = list(accumulate(counts))
        self._kept: tuple[int, Any] | None = None

    def rows(self, first: int, count: int) -> Any:
        """Return so many rows; fewer where there are no more."""
        arrow = lerobot.import_extra("pyarrow")
        parts, begin = [], 0
        for group, end in enumerate(self._ends):
            if begin < first + count and end > first:
                table = self._group(group)
                start = max(first - begin, 0)
                parts.append(table.slice(start, min(first + count, end) - begin - start))
            begin = end
        return arrow.concat_tables(parts) if parts else self._group(0).slice(0, 0)

    def _group(self, number: int) -> Any:
        if self._kept is None or self._kept[0] != number:
            with _readable(self.path):
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


class _MinariEpisodes(Episodes):
    """Episodes of a Minari dataset; see `read_episodes` for the arguments."""

    fps = None

    def __init__(
        self,
        path: Path,
        keys: Mapping[str, str],
        observation_space: gymnasium.Space[Any] | None,
        action_space: gymnasium.Space[Any] | None,
    ) -> None:
        self.path, self._file = path, MinariFile(path)
        self._infos = {"success": "success", "is_success": "success", "intervened": "intervened"}
        self._infos |= {"is_intervention": "intervened", **keys}
        for name in keys.values():
            require(
                name in ("success", "intervened"),
                f"keys cannot say which entry of a Minari dataset's infos is {name}: success or "
                "intervened.",
            )
        for name, given, there in zip(
            ("observation", "action"),
            (observation_space, action_space),
            self._file.spaces,
            strict=True,
        ):
            mine, theirs = (
                None if one is None else [(x.path, x.shape, x.dtype) for x in leaves_of(one, name)]
                for one in (given, there)
            )
            require(
                mine is None or sorted(mine) == sorted(theirs or []),
                f"The dataset at {path} is of another env: its {name} space is {there}, and that "
                f"of this env is {given}. Record it with this env.",
            )
        self.lengths = self._file.lengths
        require(bool(self.lengths), _NONE_FINISHED.format(path))

    def read(self, index: int) -> Episode:
        raw, length = self._file.read(index), self.lengths[index]
        terminated, truncated = (
            torch.from_numpy(np.array(raw[name], bool)) for name in ("terminations", "truncations")
        )
        truncated[-1] |= ~terminated[-1]  # of what was cut when the collection ended
        said = steps_of(raw["infos"], length)
        known = {self._infos[name]: said.pop(name) for name in list(said) if name in self._infos}
        success = known.get("success")
        intervened = known.get("intervened", np.zeros(length))
        return Episode(
            observation=map_tree(torch.from_numpy, raw["observations"]),
            action=torch.from_numpy(raw["actions"]),
            reward=torch.from_numpy(raw["rewards"]),
            terminated=terminated,
            truncated=truncated,
            success=None if success is None else bool(success.any()),
            intervened=torch.from_numpy(intervened.astype(bool)),
            task=raw["task"],
            extra={name: torch.from_numpy(values) for name, values in said.items()},
        )


def write_minari(
    path: str | Path,
    episodes: Iterable[Episode],
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> None:
    """Write episodes as a Minari dataset, bit for bit; all of them or none.

    Args:
        path: of a directory that is not there yet. Minari finds it by its name where it lies in the
            folder of its datasets (`MINARI_DATASETS_PATH`).
        episodes: are read one after the other.
        observation_space: of the env.
        action_space: likewise.

    Raises:
        ConfigurationError: where something is there already, and for a space that cannot
            be written.
    """
    leaves_of(observation_space)
    lerobot.action_leaf(action_space)

    def raw(episode: Episode) -> dict[str, Any]:
        steps = {name: values.numpy() for name, values in episode.extra.items()}
        steps["is_intervention"] = episode.intervened.numpy()
        if episode.success is not None:
            success = np.zeros(len(episode), bool)
            success[-1] = episode.success
            steps["success"] = success
        return {
            "observations": map_tree(lambda leaf: leaf.numpy(), episode.observation),
            "actions": episode.action.numpy(),
            "rewards": episode.reward.numpy(),
            "terminations": episode.terminated.numpy(),
            "truncations": episode.truncated.numpy(),
            "infos": infos_of(steps),
            "task": episode.task,
        }

    write_minari_files(expanded(path), map(raw, episodes), observation_space, action_space)


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
        ConfigurationError: for a space that a dataset cannot hold, where the directory holds
            something else, and where another process records into it.
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
        for name in ("pyarrow", "av"):
            lerobot.import_extra(name)
        self.path, self._fps = expanded(path), float(fps)
        self._task, self._video = task, pictures == "video"
        self._leaves = leaves_of(observation_space)
        self._action = lerobot.action_leaf(action_space)
        self._extras: tuple[str, ...] | None = None
        self._tasks: list[str] = []
        self._episodes = self._frames = 0
        self._next = {"data": 0, "meta": 0, "videos": 0}  # the numbers of the next files
        self._recording: Recording | None = None
        self._task_under_way = task
        self._unlock: Callable[[], object] | None = None
        self._go_on()

    def _take_lock(self) -> None:
        if self._unlock is None:
            self._unlock = weakref.finalize(self, lock_dataset(self.path))

    def _go_on(self) -> None:
        """Take up what the directory holds."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in self.path.iterdir()}
        known = bool(there & {LOCK, FINISHED}) or (self.path / lerobot.INFO).is_file()
        require(
            known or not there,
            f"{self.path} holds {', '.join(sorted(there))}, and no dataset: give a directory that "
            "is empty, or not there yet.",
        )
        self._take_lock()
        complete_join(self.path)
        self._forget()
        if (self.path / lerobot.INFO).is_file():
            self._take_up()
        else:  # of a first episode that was not finished
            for top in TOPS:
                shutil.rmtree(self.path / top, ignore_errors=True)

    def _take_up(self) -> None:
        """Go on behind the episodes that are there."""
        there = _LeRobotEpisodes(self.path, {}, None, None, "success")
        info = lerobot.read_json(self.path / lerobot.INFO)
        self._extras = there.extras
        mine, theirs = self._features(), info["features"]
        differing = [key for key in mine | theirs if mine.get(key) != theirs.get(key)]
        require(
            not differing and info["fps"] == self._fps and there.leaves == self._leaves,
            f"{self.path} holds a dataset of another kind ({info['fps']:g} frames per second, "
            f"columns {', '.join(theirs)}); this one would differ in "
            f"{', '.join(differing) or 'fps, or in the shape of an observation'}. Give another "
            "directory.",
        )
        self._tasks = list(there.tasks.values())
        self._episodes, self._frames = len(there), sum(there.lengths)
        self._next = there.file_numbers()
        for kind, number in self._next.items():
            for file in sorted((self.path / kind).rglob("chunk-*/file-*.*")):
                if lerobot.number_of(file) >= number:
                    file.unlink()  # of an episode that was not finished

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
        self._add(self._task, observation, action, reward, terminated, truncated, intervened, extra)

    def _add(
        self,
        task: str,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        intervened: bool,
        extra: Mapping[str, float],
    ) -> None:
        if self._extras is None:
            self._extras = tuple(sorted(extra))
        unlabelled = set(self._extras) & set(lerobot.LABELS) - set(extra)
        extra = {**extra, **dict.fromkeys(unlabelled, nan)}
        if set(extra) != set(self._extras):
            raise ConfigurationError(
                f"The steps of {self.path} have the extras {list(self._extras)}, and this one has "
                f"{sorted(extra)}: give each step all of them, 0 where nothing is said."
            )
        if self._recording is None:
            self._recording = self._begin(task)
        numbers = {
            "next.reward": reward,
            "next.done": bool(terminated or truncated),
            "next.terminated": bool(terminated),
            "next.truncated": bool(truncated),
            "next.success": False,
            lerobot.INTERVENED: bool(intervened),
        }
        numbers |= {f"{lerobot.EXTRA}{name}": extra[name] for name in self._extras}
        self._recording.add(observation, action, numbers)

    def end_episode(self, final_observation: Any, success: bool | None = None) -> None:
        """Finish the episode; when this returns, nothing takes it away.

        Args:
            final_observation: what followed the last step.
            success: whether it succeeded; None where nobody says.

        Raises:
            RuntimeError: where no step was taken.
        """
        recording = self._recording
        if recording is None:
            raise RuntimeError("end_episode was called before the first step of an episode.")
        finals = recording.finish(final_observation, success)
        videos = {leaf.key: leaf for leaf in self._leaves if self._video and leaf.picture}
        for key in videos:
            name = lerobot.VIDEOS.format(video_key=key, **lerobot.place_of(self._next["videos"]))
            move(recording.folder / f"{key}.mp4", self.path / name)
        name = lerobot.DATA.format(**lerobot.place_of(self._next["data"]))
        move(recording.folder / ROWS, self.path / name)
        self._write_row(recording, finals, success, list(videos))
        self._episodes += 1
        self._frames += recording.length
        self._next = {kind: number + 1 for kind, number in self._next.items()}
        self._write_info()
        self._forget()

    def discard_episode(self) -> None:
        """Forget the steps of the episode under way, as where it is to be recorded again."""
        self._forget()

    def finalise(self) -> None:
        """Join the files of the episodes, and write the statistics of all; then it may go on.

        An episode under way is forgotten.

        Raises:
            WriteError: where the disk is full: there has to be room for a copy of the dataset.
        """
        self._forget()
        if self._episodes:
            self._take_lock()
            join_files(self.path)
            self._next = _LeRobotEpisodes(self.path, {}, None, None, "success").file_numbers()
        if self._unlock is not None:
            (self.path / LOCK).unlink(missing_ok=True)
            self._unlock()
            self._unlock = None

    def write(self, episode: Episode) -> None:
        """Write a whole episode, of this or another dataset."""
        extras = {name: values.numpy() for name, values in episode.extra.items()}
        for t in range(len(episode)):
            self._add(
                episode.task or self._task,
                map_tree(lambda leaf, t=t: leaf[t], episode.observation),
                episode.action[t],
                float(episode.reward[t]),
                bool(episode.terminated[t]),
                bool(episode.truncated[t]),
                bool(episode.intervened[t]),
                {name: values[t] for name, values in extras.items()},
            )
        self.end_episode(map_tree(lambda leaf: leaf[-1], episode.observation), episode.success)

    def _begin(self, task: str) -> Recording:
        self._take_lock()
        if task not in self._tasks:
            self._tasks.append(task)
            lerobot.write_table(self.path / lerobot.TASKS, lerobot.tasks_table(self._tasks))
        folder = self.path / UNDER_WAY
        with writing(folder):
            folder.mkdir(parents=True)
        indices = {
            "episode_index": self._episodes,
            "index": self._frames,
            "task_index": self._tasks.index(task),
        }
        self._task_under_way = task
        return Recording(folder, self._leaves, self._action, self._fps, self._video, indices)

    def _forget(self) -> None:
        self._recording = None
        shutil.rmtree(self.path / UNDER_WAY, ignore_errors=True)

    def _write_row(
        self,
        recording: Recording,
        finals: Mapping[str, Any],
        success: bool | None,
        videos: Sequence[str],
    ) -> None:
        """Write the episode's row in the table of episodes, with which it is there."""
        arrow = lerobot.import_extra("pyarrow")
        length = recording.length
        columns: dict[str, Any] = {
            "episode_index": [self._episodes],
            "tasks": [[self._task_under_way]],
            "length": [length],
            **_placed("data", self._next["data"]),
            "dataset_from_index": [self._frames],
            "dataset_to_index": [self._frames + length],
        }
        for key in videos:
            columns |= _placed(f"videos/{key}", self._next["videos"])
            columns[f"videos/{key}/from_timestamp"] = [0.0]
            columns[f"videos/{key}/to_timestamp"] = [length / self._fps]
        columns["success"] = arrow.array([success], arrow.bool_())
        columns |= {**finals, **recording.statistics()}
        columns |= _placed("meta/episodes", self._next["meta"])
        name = lerobot.file_name(self._next["meta"], ".parquet")
        lerobot.write_table(self.path / lerobot.EPISODES / name, arrow.table(columns))

    def _features(self) -> dict[str, Any]:
        numbers = dict(lerobot.STEP_COLUMNS)
        numbers |= {f"{lerobot.EXTRA}{name}": "float32" for name in self._extras or ()}
        numbers |= lerobot.INDEX_COLUMNS
        leaves = [*self._leaves, self._action]
        return {
            **{leaf.key: lerobot.feature_of(leaf, self._video, self._fps) for leaf in leaves},
            **{name: lerobot.number_feature(dtype) for name, dtype in numbers.items()},
        }

    def _write_info(self) -> None:
        if not (self.path / lerobot.OURS).is_file():
            leaves = [vars(leaf) for leaf in self._leaves]
            described = {"observation": leaves, "action": vars(self._action)}
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
            "features": self._features(),
        }
        lerobot.write_json(self.path / lerobot.INFO, info)


def _placed(prefix: str, number: int) -> dict[str, list[int]]:
    return {f"{prefix}/{name}": [value] for name, value in lerobot.place_of(number).items()}
