"""Read episodes of a LeRobotDataset v3.0 one at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, prod
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.algorithms import available_bytes
from lightning_rl.extend.errors import closest, reason_of, require
from lightning_rl.extend.rollout import tree_of_leaves
from lightning_rl.extend.spaces import as_policy_counts, first_choice, named, order_of, space_of
from lightning_rl.extensions.datasets import lerobot_format as lerobot
from lightning_rl.extensions.datasets.directory import has_no_episodes, part_of
from lightning_rl.extensions.datasets.ends import FLAGS, EndRule, Ends, as_flags, check_times
from lightning_rl.extensions.datasets.episode import Episode, Episodes
from lightning_rl.extensions.datasets.lerobot_format import Leaf, leaves_of
from lightning_rl.extensions.datasets.pictures import CURE, decode_picture, read_frames
from lightning_rl.extensions.datasets.tables import TableFile, read_table, readable

_ROW = ("episode_index", "length", "dataset_from_index", "dataset_to_index", "success")
_PLACES = ("data/", "videos/", "meta/episodes/")
"""Columns of the table of episodes that the reader needs: names, and prefixes."""

MOST_STEPS = 2**22
"""Maximum steps of an episode, which is read as a whole."""

NAMES = {
    "action": "action",
    "reward": "next.reward",
    "done": "next.done",
    "terminated": "next.terminated",
    "truncated": "next.truncated",
    "success": "next.success",
    "intervened": lerobot.INTERVENED,
}
"""LeRobot's column for each name of this package, except observations."""


class LeRobotEpisodes(Episodes):
    """Episodes of a LeRobotDataset v3.0; for arguments and errors see `read_episodes`."""

    def __init__(
        self,
        path: Path,
        keys: Mapping[str, str] | None = None,
        observation_space: gymnasium.Space[Any] | None = None,
        action_space: gymnasium.Space[Any] | None = None,
        ends: Ends | None = None,
    ) -> None:
        self.path = path
        info = part_of(path, lerobot.INFO)
        # A folder of `rl-cli record` without a finished episode gets its own message, not "no
        # info.json".
        if path.is_dir() and not info.is_file() and has_no_episodes(path):
            self._with_steps([])
        self._info = lerobot.read_info(info)
        self.fps: float = float(self._info["fps"])
        self._features: dict[str, Any] = self._info["features"]
        file = part_of(path, lerobot.OURS)
        described = lerobot.read_ours(file, self._features) if file.is_file() else {}
        names = _names(path, keys or {}, self._features)
        self._columns = {name: key for name, key in names.items() if name in NAMES}
        self._orders: dict[str, list[int] | None] = {}  # of the numbers of a column, by its key
        self.leaves = self._find_observation(names, described, observation_space)
        lerobot.check_paths(self.leaves, path)
        self._action = self._find_action(described, action_space)
        self._bounds: np.ndarray | None = described.get("action_bounds")
        self.columns = {".".join(("observation", *leaf.path)): leaf.key for leaf in self.leaves}
        self.columns |= {"action": self._action.key, **self._columns}
        self.first_action = _first_action(described, action_space)
        self.end_rules: list[str] = described.get("end_rules", [])
        self.rule = EndRule(self._columns, ends, path, self.end_rules)
        # An extra is a column that no observation, action or flag reads, so these come first.
        self._find_extras(described)
        self._read_table_of_episodes()
        self._open: dict[str, TableFile] = {}

    def _find_extras(self, described: Mapping[str, Any]) -> None:
        read_keys = {*self._columns.values(), *(leaf.key for leaf in self.leaves)}
        extras = [key for key in self._features if key.startswith(lerobot.EXTRA)]
        texts = [
            key
            for key, feature in self._features.items()
            if key.startswith((lerobot.EXTRA, "observation.")) and feature["dtype"] in lerobot.TEXTS
        ]
        if texts:
            rank_zero_warn(
                f"The dataset at {self.path} has columns of text, which are not read: "
                f"{', '.join(texts)}."
            )
        extra_names: Mapping[str, str] = described.get("extras", {})
        self.extras = {
            extra_names.get(key, key.removeprefix(lerobot.EXTRA)): key
            for key in extras
            if key not in read_keys and key not in texts
        }

    def _read_table_of_episodes(self) -> None:
        rows: list[dict[str, Any]] = []
        for file in lerobot.files_of(part_of(self.path, lerobot.EPISODES)):
            # Without columns only the names are read: final/ columns may hold a picture per
            # episode.
            names = TableFile(file, []).names
            columns = [name for name in names if name in _ROW or name.startswith(_PLACES)]
            file_rows = read_table(file, columns).to_pylist()
            finals = [name for name in names if name.startswith("final/")]
            place = {"file": file, "finals": finals}
            rows += [{**row, **place, "row": i} for i, row in enumerate(file_rows)]
        total = self._info.get("total_episodes")
        require(
            not rows or total is None or len(rows) >= total,
            f"The dataset at {self.path} has {total} episodes in info.json, but {len(rows)} in its "
            f"table: restore the files of {lerobot.EPISODES}.",
        )
        for number, row in enumerate(rows):
            self._check_row(number, row)
        # `dataset_from_index` counts through the dataset, but a file's rows from its begin:
        # remember the smallest index of each file. Empty episodes count, so this precedes
        # `_with_steps`.
        self._begins: dict[Path, int] = {}
        for row in rows:
            path, begin = self._data_file(row), row["dataset_from_index"]
            self._begins[path] = min(begin, self._begins.get(path, begin))
        self._rows = [rows[i] for i in self._with_steps([row["length"] for row in rows])]
        self.lengths = [row["length"] for row in self._rows]
        for leaf in self.leaves:
            if self._features[leaf.key]["dtype"] == "video":
                self._check_films(f"videos/{leaf.key}")
        tasks = part_of(self.path, lerobot.TASKS)
        with readable(tasks):
            self.tasks = lerobot.tasks_of(read_table(tasks))

    def _check_row(self, number: int, row: Mapping[str, Any]) -> None:
        place = ("chunk_index", "file_index")
        needed = ["episode_index", "length", "dataset_from_index", *(f"data/{x}" for x in place)]
        needed += [
            f"videos/{leaf.key}/{name}"
            for leaf in self.leaves
            # An episode without steps is ignored, so its place in a video is not needed.
            if self._features[leaf.key]["dtype"] == "video" and row.get("length")
            for name in (*place, "from_timestamp")
        ]
        missing = [name for name in needed if row.get(name) is None]
        require(
            not missing,
            f"{self.name_of(number)} has no {', '.join(missing)} in the table of episodes. {CURE}",
        )
        times = [name for name in row if name.endswith("_timestamp") and row[name] is not None]
        stop = row.get("dataset_to_index")
        counts = [*needed, *([] if stop is None else ["dataset_to_index"])]
        invalid = [name for name in counts if name not in times and not _is_count(row[name])]
        invalid += [name for name in times if not _is_time(row[name])]
        require(
            not invalid and row["length"] <= MOST_STEPS,
            f"{self.name_of(number)} has {invalid[0] if invalid else 'length'} "
            f"{row[invalid[0] if invalid else 'length']!r} in the table of episodes: an index must "
            "be a whole number from 0, a time must be in seconds, and a length must be at most "
            f"{MOST_STEPS:,}. {CURE}",
        )
        require(
            stop is None or stop - row["dataset_from_index"] == row["length"],
            f"{self.name_of(number)} contradicts itself: its length is {row['length']}, but its "
            f"rows are {row['dataset_from_index']} to {stop}. Restore the table.",
        )
        require(
            row.get("success") in (None, True, False),
            f"{self.name_of(number)} has success {row.get('success')!r} in the table of episodes, "
            "instead of true, false or null.",
        )

    def _check_films(self, prefix: str) -> None:
        assert self.fps is not None
        names = [f"{prefix}/{field}" for field in ("chunk_index", "file_index", "from_timestamp")]
        # In the order of the video, each episode must begin after the last row of the previous one;
        # otherwise both would show the same frames. Times are rounded: allow a quarter of a frame.
        order = sorted(range(len(self)), key=lambda i: [self._rows[i][name] for name in names])
        for i, following in pairwise(order):
            place, next_place = ([self._rows[n][name] for name in names] for n in (i, following))
            last = place[2] + (self.lengths[i] - 1) / self.fps
            require(
                place[:2] != next_place[:2] or last <= next_place[2] - 0.25 / self.fps,
                f"{self.name_of(i)} contradicts itself: its last row is at {last:g} s of {prefix}, "
                f"but episode {following} begins at {next_place[2]:g} s there. {CURE}",
            )

    def places(self) -> list[tuple[Path, int, Path, int]]:
        """Return per episode: data file, first row in it, file and row in the table of episodes."""
        places = []
        for row in self._rows:
            path = self._data_file(row)
            begin = row["dataset_from_index"] - self._begins[path]
            places.append((path, begin, row["file"], row["row"]))
        return places

    def _data_file(self, row: Mapping[str, Any]) -> Path:
        place = {name: row[f"data/{name}"] for name in ("chunk_index", "file_index")}
        return self._file_at("data_path", **place)

    def _file_at(self, template: str, **place: Any) -> Path:
        try:
            return part_of(self.path, lerobot.filled(self._info[template], place))
        except (ValueError, OSError) as error:  # OSError: the name is too long
            raise ConfigurationError(
                f"The {template} of the dataset at {self.path}, {self._info[template]!r}, does "
                f"not fit a LeRobotDataset v3.0 ({error}): it takes {', '.join(place)}. Restore "
                "info.json."
            ) from error

    def file_numbers(self) -> dict[str, int]:
        cameras = [key for key, feature in self._features.items() if feature["dtype"] == "video"]
        prefixes = {"data": "data", "meta": "meta/episodes"}

        def next_number(prefix: str) -> int:
            chunk, file = f"{prefix}/chunk_index", f"{prefix}/file_index"
            with readable(self.path / lerobot.EPISODES):
                numbers = [row[chunk] * lerobot.CHUNK_FILES + row[file] for row in self._rows]
                return int(max(numbers)) + 1

        numbers = {kind: next_number(prefix) for kind, prefix in prefixes.items()}
        return numbers | {"videos": max([0, *(next_number(f"videos/{key}") for key in cameras)])}

    def _find_observation(
        self,
        names: Mapping[str, str],
        described: Mapping[str, Any],
        space: gymnasium.Space[Any] | None,
    ) -> list[Leaf]:
        recorded_leaves: list[Leaf] = described.get("observation", [])
        columns = {name: key for name, key in names.items() if name.split(".")[0] == "observation"}
        if space is None and columns:
            by_key = {leaf.key: leaf for leaf in recorded_leaves}
            # The recording knows shapes that LeRobot's format cannot store.
            return [
                replace(
                    by_key.get(key) or lerobot.leaf_of(key, self._features[key], ()),
                    path=tuple(name.split(".")[1:]),
                )
                for name, key in columns.items()
            ]
        if space is None:
            return recorded_leaves or lerobot.guessed_leaves(self._features)
        by_path = {leaf.path: leaf.key for leaf in recorded_leaves}
        guessed, env_leaves = lerobot.guessed_leaves(self._features), leaves_of(space)
        parts = [".".join(("observation", *leaf.path)) for leaf in env_leaves]
        # `names` come from the user's keys: refuse those that no part of the env's observation has.
        for name, key in columns.items():
            require(
                name in parts,
                f"keys names '{key}' {name}, but the observation of this env has no such "
                f"part{closest(name, parts)}; it has {', '.join(parts)}.",
            )
        leaves = []
        for name, leaf in zip(parts, env_leaves, strict=True):
            key = columns.get(name) or by_path.get(leaf.path) or leaf.key
            # One array on both sides: LeRobot's name for it does not matter.
            if key not in self._features and len(env_leaves) == len(guessed) == 1:
                key = guessed[0].key
            leaves.append(self._checked(name, key, leaf))
        return leaves

    def _find_action(
        self, described: Mapping[str, Any], space: gymnasium.Space[Any] | None
    ) -> Leaf:
        key = self._columns.get("action", "action")
        recorded_leaf: Leaf | None = described.get("action")
        if space is None and recorded_leaf is not None:
            return replace(recorded_leaf, key=key)
        if space is None:
            return self._checked("action", key, None)
        leaf = lerobot.action_leaf(space)
        # `rl-cli record` writes a MultiBinary as rollouts store it: flat, in floats.
        is_flat = str(self._features.get(key, {}).get("dtype")).startswith("float")
        stored = lerobot.action_leaf(space if is_flat else lerobot.file_form(space))
        return replace(self._checked("action", key, stored), shape=leaf.shape, dtype=leaf.dtype)

    def _checked(self, name: str, key: str, leaf: Leaf | None) -> Leaf:
        columns = sorted(key for key in self._features if key not in lerobot.INDEX_COLUMNS)
        require(
            key in self._features,
            f"The dataset at {self.path} has no column '{key}' for {name}; it has "
            f"{', '.join(columns)}. Name the right column: keys: {{<column>: {name}}}, or record "
            "it with this env.",
        )
        column = lerobot.leaf_of(key, self._features[key], ())
        if leaf is None:
            return column
        # Integers of other widths fit here; `as_dtype` refuses values that the cast would change.
        leaf = replace(leaf, key=key, picture=column.picture)  # the shape in this dataset
        kinds = {lerobot.kind_of(dtype) for dtype in (column.dtype, leaf.dtype)}
        content = "pictures" if column.picture else column.dtype
        require(
            column.shape == leaf.kept_shape and len(kinds) == 1,
            f"The dataset at {self.path} belongs to another env: its {key} is {content} of shape "
            f"{list(column.shape)}, but {name} of this env is {leaf.dtype} of shape "
            f"{list(leaf.shape)}. Record it with this env, or name the right column: keys: "
            f"{{<column>: {name}}}.",
        )
        place = f"The dataset at {self.path}"
        # Columns with named numbers, such as joints, are matched by name, not by position.
        self._orders[key] = order_of(column.names, leaf.names, f"column '{key}'", place)
        return leaf

    def read(self, index: int) -> Episode:
        assert self.rule is not None
        row, length, name = self._rows[index], self.lengths[index], self.name_of(index)
        table = self._frames(row, length, name)
        seconds = self._seconds(table, name)
        success = self._success(row, table, name)
        flags = {flag: self._flags(table, flag, name) for flag in FLAGS if flag in self._columns}
        terminated, truncated = self.rule.apply(length, flags, success, name)
        observation, final_known = self._observations(row, table, seconds, name)
        tasks = self._tasks_of(table, name)
        action = self._numbers(table, self._action, name)
        return Episode(
            observation=observation,
            action=torch.from_numpy(as_policy_counts(action, self.first_action)),
            reward=self._reward(table, length, name),
            terminated=terminated,
            truncated=truncated,
            success=success,
            intervened=torch.from_numpy(self._flags(table, "intervened", name)),
            task=tasks[0],
            tasks=tasks if len(set(tasks)) > 1 else (),
            extra={extra: self._extra(table, extra, name) for extra in self.extras},
            final_known=final_known,
            end_rule=self.rule.decided,
        )

    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        leaf = self._action
        dtype: Any = np.dtype(leaf.dtype)
        require(
            dtype.kind == "f",
            f"The dataset at {self.path} does not describe the choices of its actions ({leaf.dtype}"
            "): set data.env, the env of the recording.",
        )
        # LeRobot's own datasets have no bounds, so the recorded actions must do.
        bounds = self._measured_bounds() if self._bounds is None else self._bounds
        low, high = bounds.astype(dtype).reshape(2, *leaf.shape)
        action = gymnasium.spaces.Box(low, high, leaf.shape, dtype.type)
        names = {leaf.path: leaf.names for leaf in self.leaves}
        return _named(space_of(self[0].observation), names), named(action, leaf.names)

    def _measured_bounds(self) -> np.ndarray:
        """Return the least and the greatest actions, [2, A], by `meta/stats.json`.

        A constant number lies in the middle between its bounds, so that it can be scaled.
        """
        file = part_of(self.path, lerobot.STATISTICS)
        try:
            statistics = lerobot.read_json(file)[self._action.key]
            bounds = np.asarray([statistics["min"], statistics["max"]], np.float64)
            constant = bounds[0] == bounds[1]
            bounds[0] -= 0.5 * constant
            bounds[1] += 0.5 * constant
            lerobot.check_bounds(bounds, self._action.shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"The dataset at {self.path} has no bounds of actions in {file.name} ({error!r}): "
                "set data.env, the env of the recording."
            ) from error
        indices = np.flatnonzero(constant).tolist()
        margin = f"; numbers {indices} of an action never change, and have 0.5 on each side"
        rank_zero_info(
            f"The dataset at {self.path} does not record the bounds of its actions: the least and "
            f"greatest actions bound the policy's, {bounds[0]} and {bounds[1]}"
            f"{margin if indices else ''}."
        )
        return bounds

    def _column(self, table: Any, key: str, shape: tuple[int, ...], name: str) -> np.ndarray:
        arrow = lerobot.import_extra("pyarrow")
        try:
            return lerobot.from_column(table.column(key), shape)
        except (KeyError, ValueError, arrow.ArrowException) as error:
            raise ConfigurationError(
                f"{name} cannot be read: its column '{key}' is invalid: {reason_of(error)}. "
                "Restore it, or leave the episode out."
            ) from error

    def _flags(self, table: Any, column: str, name: str) -> np.ndarray:
        if column not in self._columns:
            return np.zeros(len(table), bool)
        key = self._columns[column]
        return as_flags(self._column(table, key, (), name), f"{name}: its column '{key}'")

    def _seconds(self, table: Any, name: str) -> np.ndarray:
        assert self.fps is not None
        columns = {
            key: self._column(table, key, (), name)
            for key in ("frame_index", "timestamp")
            if key in self._features
        }
        frames = columns.get("frame_index", np.arange(len(table)))
        times = columns["timestamp"].astype(np.float64) if "timestamp" in columns else None
        check_times(frames, times, self.fps, name)
        return frames / self.fps if times is None else times

    def _tasks_of(self, table: Any, name: str) -> tuple[str, ...]:
        numbers = self._column(table, "task_index", (), name).tolist()
        unknown = sorted(set(numbers) - self.tasks.keys())
        require(
            not unknown,
            f"{name} has the task {unknown[:1]}, but {lerobot.TASKS} has {sorted(self.tasks)}: "
            "restore that table.",
        )
        return tuple(self.tasks[number] for number in numbers)

    def successes(self) -> list[bool | None]:
        successes = []
        # The table of episodes knows the success, unless LeRobot itself wrote the dataset.
        for index, row in enumerate(self._rows):
            if "success" in row or "success" not in self._columns:
                successes.append(row.get("success"))
            else:  # does not decode videos
                name = self.name_of(index)
                table = self._frames(row, self.lengths[index], name)
                successes.append(self._success(row, table, name))
        return successes

    def _success(self, row: Mapping[str, Any], table: Any, name: str) -> bool | None:
        recorded: bool | None = row.get("success")
        if "success" not in self._columns:
            return recorded
        succeeded = self._success_of(np.asarray(self._flags(table, "success", name)), name)
        require(
            "success" not in row or bool(recorded) == succeeded,
            f"{name} contradicts itself: its success is {recorded} in the table of episodes, but "
            f"its column '{self._columns['success']}' says {succeeded}. Label it: rl-cli label.",
        )
        return recorded if "success" in row else succeeded

    def _observations(
        self, row: Mapping[str, Any], table: Any, seconds: np.ndarray, name: str
    ) -> tuple[Any, bool]:
        finals = self._file("finals", row["file"], row["finals"]).rows(row["row"], 1)
        # The true final observation counts only if all its columns have it.
        final_known = all(
            f"final/{leaf.key}" in row["finals"]
            and finals.column(f"final/{leaf.key}").null_count == 0
            for leaf in self.leaves
        )
        leaves: dict[tuple[str, ...], Tensor] = {}
        for leaf in self.leaves:
            column = f"final/{leaf.key}"
            # A video holds the final observation after the last row; its column holds the time.
            if self._features[leaf.key]["dtype"] == "video":
                end = self._column(finals, column, (), name) if final_known else np.empty(0)
                values = self._filmed(row, leaf, np.concatenate([seconds, end]), name)
            elif leaf.picture:
                parts = [table.column(leaf.key), *([finals.column(column)] if final_known else [])]
                values = self._pictures(parts, leaf)
            else:
                values = self._numbers(table, leaf, name)
                if final_known:
                    last = replace(leaf, key=column)
                    values = np.concatenate([values, self._numbers(finals, last, name)])
            # The last slot must hold something: `final_known` says that it is a copy.
            if not final_known:
                values = np.concatenate([values, values[-1:]])
            if leaf.channels_first:
                values = np.ascontiguousarray(values.transpose(0, 3, 1, 2))
            leaves[leaf.path] = torch.from_numpy(values)
        return tree_of_leaves(leaves), final_known

    def _filmed(
        self, row: Mapping[str, Any], leaf: Leaf, seconds: np.ndarray, name: str
    ) -> np.ndarray:
        assert self.fps is not None
        prefix = f"videos/{leaf.key}"
        begin: float = row[f"{prefix}/from_timestamp"]
        # LeRobot may leave out the end: then only decoding shows whether the video is long enough.
        lasts = (row.get(f"{prefix}/to_timestamp") or inf) - begin
        last = seconds[row["length"] - 1]  # the final observation's frame follows
        require(
            last <= lasts - 0.25 / self.fps,
            f"{name} contradicts itself: its last row is {last:g} s after its first, but its video "
            f"'{leaf.key}' lasts {lasts:g} s. {CURE}",
        )
        place = {field: row[f"{prefix}/{field}"] for field in ("chunk_index", "file_index")}
        path = self._file_at("video_path", video_key=leaf.key, **place)
        # Before decoding: a small file may expand to more pictures than the memory holds.
        self._check_room(len(seconds), leaf)
        return read_frames(path, (begin + seconds).tolist(), self.fps, leaf.kept_shape)

    def _check_room(self, count: int, leaf: Leaf) -> None:
        size = count * prod(leaf.kept_shape)
        room = available_bytes("cpu", torch.device("cpu"), self.path)
        require(
            room is None or size <= room,
            f"The dataset at {self.path} has an episode with {count:,} pictures in '{leaf.key}', "
            f"which take {size / 2**30:.1f} GiB, but {(room or 0) / 2**30:.1f} GiB of memory are "
            "free: leave the camera out (keys), or record shorter episodes.",
        )

    def _pictures(self, columns: Sequence[Any], leaf: Leaf) -> np.ndarray:
        self._check_room(sum(map(len, columns)), leaf)
        pictures = np.empty((sum(map(len, columns)), *leaf.kept_shape), np.uint8)
        contents = (content for column in columns for content in column)
        try:
            for picture, content in zip(pictures, contents, strict=True):
                picture[...] = decode_picture(content["bytes"].as_py(), leaf.kept_shape)
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"The dataset at {self.path} has a broken picture in '{leaf.key}': "
                f"{reason_of(error)}. {CURE}"
            ) from error
        return pictures

    def _numbers(self, table: Any, leaf: Leaf, name: str) -> np.ndarray:
        values = self._column(table, leaf.key, leaf.shape, name)
        # final/ columns have the same names, and so the same order, as their step columns.
        if (order := self._orders.get(leaf.key.removeprefix("final/"))) is not None:
            values = values[..., order]
        return lerobot.as_dtype(values, leaf.dtype, f"{name}: its column '{leaf.key}'")

    def _extra(self, table: Any, extra: str, name: str) -> Tensor:
        key = self.extras[extra]
        shape = tuple(self._features[key]["shape"])
        values = self._column(table, key, () if shape == (1,) else shape, name)
        # A copy, because Arrow's memory is read-only and tensors cannot be.
        return torch.from_numpy(values.copy())

    def _reward(self, table: Any, length: int, name: str) -> Tensor:
        if "reward" not in self._columns:
            return torch.full((length,), torch.nan)
        values = self._column(table, self._columns["reward"], (), name)
        return torch.from_numpy(values.astype(np.float32))

    def _frames(self, row: Mapping[str, Any], length: int, name: str) -> Any:
        path = self._data_file(row)
        videos = {key for key, feature in self._features.items() if feature["dtype"] == "video"}
        columns = {leaf.key for leaf in self.leaves} | set(self._columns.values())
        columns |= {*self.extras.values(), self._action.key}
        columns |= {"frame_index", "timestamp"} & self._features.keys()
        columns |= {"episode_index", "task_index"}
        # Pictures of videos are no columns of the data files.
        file = self._file("data", path, sorted(columns - videos))
        table = file.rows(row["dataset_from_index"] - self._begins[path], length)
        # A wrong `dataset_from_index` would silently give another episode's steps.
        numbers = self._column(table, "episode_index", (), name)
        require(
            len(numbers) == length and bool((numbers == row["episode_index"]).all()),
            f"{path} is damaged: it does not hold the {length} frames of episode "
            f"{row['episode_index']}. Restore it, or give another dataset.",
        )
        return table

    def _file(self, kind: str, path: Path, columns: list[str]) -> "TableFile":
        """Return a file of a kind; the last file of each kind stays open."""
        if kind not in self._open or self._open[kind].path != path:
            self._open[kind] = TableFile(path, columns)
        return self._open[kind]


def _named(
    space: gymnasium.Space[Any], names: Mapping[tuple[str, ...], tuple[str, ...]], *path: str
) -> gymnasium.Space[Any]:
    if not isinstance(space, gymnasium.spaces.Dict):
        return named(space, names[path])
    parts = {key: _named(part, names, *path, key) for key, part in space.items()}
    return gymnasium.spaces.Dict(parts)


def _is_count(value: Any) -> bool:
    # `type`, because True is an int too.
    return type(value) is int and 0 <= value < 2**53


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**31


def _names(path: Path, keys: Mapping[str, str], features: Mapping[str, Any]) -> dict[str, str]:
    require(
        len(set(keys.values())) == len(keys),
        f"keys gives two columns the same name: {dict(keys)}. Name one column only.",
    )
    for key, name in keys.items():
        require(
            key in features,
            f"keys names '{key}', but the dataset at {path} has no such "
            f"column{closest(key, features)}. It has {', '.join(sorted(features))}.",
        )
        require(
            name in NAMES or name.split(".")[0] == "observation",
            f"keys: {{{key}: {name}}} is not a valid name: use observation, observation.<key>, "
            f"{', '.join(NAMES)}.",
        )
        kind = features[key]["dtype"]
        require(
            kind not in lerobot.TEXTS and (name not in NAMES or kind not in ("image", "video")),
            f"keys names '{key}' {name}, but it is a column of {kind}, which does not fit: name "
            "another column.",
        )
    # If a dataset has both, LeRobot's name beats ours, and the user's keys beat both.
    pairs = [(name, col) for name, key in NAMES.items() for col in (name, key) if col in features]
    return dict(pairs) | {name: key for key, name in keys.items()}


def _first_action(described: Mapping[str, Any], space: gymnasium.Space[Any] | None) -> np.ndarray:
    """Return the number of the first choice in the columns of actions, [*A] or []."""
    recorded = described.get("action_start")
    if space is None:
        return np.asarray(recorded or 0)
    first = first_choice(space)
    require(
        recorded is None or np.array_equal(recorded, first),
        f"The first action of the dataset has the number {recorded}, but in this env "
        f"{first.tolist()}: record the dataset with this env.",
    )
    return first
