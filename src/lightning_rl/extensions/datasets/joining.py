"""Join the files of single episodes of a LeRobotDataset v3.0 into a few large files."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl.extensions.datasets import lerobot_format as lerobot
from lightning_rl.extensions.datasets.directory import keep_other_files, link, replacing_folders
from lightning_rl.extensions.datasets.pictures import join_videos
from lightning_rl.extensions.datasets.statistics import joined_statistics, quantiles_of
from lightning_rl.extensions.datasets.tables import (
    TableFile,
    read_table,
    readable,
    with_column,
    write_tables,
)

MEBIBYTE = 2**20

MOST_NUMBERS = 2**26
"""Numbers of a column whose quantiles are exact; of more, every k-th frame counts."""

EPISODES_AT_ONCE = 100
"""Rows of the table of episodes in a row group; each row has hundreds of columns."""

Places = dict[int, tuple[int, int]]
"""Number of an old file: number of the new file, and first frame in it."""


def join_files(path: Path) -> None:
    """Join the files of a dataset, and write the statistics of all episodes."""
    info = lerobot.read_json(path / lerobot.INFO)
    with readable(path / lerobot.INFO):
        data_bytes = float(info.get("data_files_size_in_mb", 100)) * MEBIBYTE
        video_bytes = float(info.get("video_files_size_in_mb", 200)) * MEBIBYTE
    videos = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    with replacing_folders(path) as target:
        data = _join(lerobot.files_of(path / "data"), target / "data", data_bytes, _join_tables)
        places = {}
        for key in videos:

            def join(sources: Sequence[Path], file: Path) -> list[int]:
                return join_videos(sources, file, info["fps"])

            sources, folder = lerobot.files_of(path / "videos" / key), target / "videos" / key
            places[key] = _join(sources, folder, video_bytes, join)
        meta = target / "meta"
        statistics = _join_episodes(path, meta, data, places, info["fps"])
        for key, feature in info["features"].items():
            if key in statistics and feature["dtype"] not in ("video", "image"):
                statistics[key] |= _quantiles(target / "data", key, tuple(feature["shape"]))
        for name in (lerobot.INFO, lerobot.OURS, lerobot.TASKS):
            shutil.copyfile(path / name, target / name)
        lerobot.write_json(target / lerobot.STATISTICS, statistics)
        keep_other_files(path, target)


def _quantiles(data: Path, key: str, shape: tuple[int, ...]) -> dict[str, list[float]]:
    tables = [TableFile(file, [key]) for file in lerobot.files_of(data)]
    size = sum(sum(table.counts) for table in tables) * prod(shape)
    # Every k-th frame, so that the quantiles of a long dataset fit into memory.
    stride = -(-size // MOST_NUMBERS)
    frames = []
    for table in tables:
        with readable(table.path):
            frames += [lerobot.from_column(g.column(key), shape)[::stride] for g in table.groups()]
    return quantiles_of(np.concatenate(frames))


def _join(
    sources: Sequence[Path],
    folder: Path,
    size_limit: float,
    join: Callable[[Sequence[Path], Path], list[int]],
) -> Places:
    """Join files into files of at most `most` bytes; return their new places."""
    places: Places = {}
    for number, group in enumerate(_groups(sources, size_limit)):
        file = folder / lerobot.file_name(number, group[0].suffix)
        file.parent.mkdir(parents=True, exist_ok=True)
        # A file that stays alone, such as one joined earlier, is linked instead of copied.
        if len(group) == 1:
            link(group[0], file)
            begins = [0]
        else:
            begins = join(group, file)
        for source, begin in zip(group, begins, strict=True):
            places[lerobot.number_of(source)] = (number, begin)
    return places


def _groups(sources: Sequence[Path], size_limit: float) -> Iterator[list[Path]]:
    group: list[Path] = []
    size = 0
    for source in sources:
        file_size = source.stat().st_size
        if group and size + file_size > size_limit:
            yield group
            group, size = [], 0
        group.append(source)
        size += file_size
    if group:
        yield group


def _join_tables(sources: Sequence[Path], target: Path) -> list[int]:
    write_tables(target, (table for source in sources for table in TableFile(source).groups()))
    return [0, *accumulate(sum(TableFile(source, []).counts) for source in sources[:-1])]


def _join_episodes(
    path: Path, meta: Path, data: Places, videos: dict[str, Places], fps: float
) -> dict[str, Any]:
    arrow = lerobot.import_extra("pyarrow")
    sources = lerobot.files_of(path / lerobot.EPISODES)
    names = TableFile(sources[0], []).names  # later files may have label columns too
    statistics: dict[str, list[dict[str, Any]]] = {}

    def moved_tables() -> Iterator[Any]:
        for first in range(0, len(sources), EPISODES_AT_ONCE):
            part = sources[first : first + EPISODES_AT_ONCE]
            with readable(part[0]):
                tables = [read_table(source, names).select(names) for source in part]
                table = _moved(arrow.concat_tables(tables).combine_chunks(), data, videos, fps)
                # All rows of the table now stand in file 0.
                for name, value in lerobot.place_of(0).items():
                    table = _with(table, f"meta/episodes/{name}", [value] * len(table))
                _collect(table, statistics)
            yield table

    write_tables(meta / "episodes" / lerobot.file_name(0, ".parquet"), moved_tables())
    with readable(sources[0]):
        return {key: joined_statistics(parts) for key, parts in statistics.items()}


def _moved(table: Any, data: Places, videos: dict[str, Places], fps: float) -> Any:
    table, _ = _relocated(table, "data", data)
    for key, places in videos.items():
        table, begins = _relocated(table, f"videos/{key}", places)
        for name in ("from_timestamp", "to_timestamp"):
            # Times count from the begin of the video: add the begin of the old file.
            old = table.column(f"videos/{key}/{name}").to_pylist()
            new = [time + begin / fps for time, begin in zip(old, begins, strict=True)]
            table = _with(table, f"videos/{key}/{name}", new)
    return table


def _relocated(table: Any, prefix: str, places: Places) -> tuple[Any, list[int]]:
    chunks, files = (
        table.column(f"{prefix}/{name}").to_pylist() for name in ("chunk_index", "file_index")
    )
    old = [chunk * lerobot.CHUNK_FILES + file for chunk, file in zip(chunks, files, strict=True)]
    for name in ("chunk_index", "file_index"):
        new = [lerobot.place_of(places[number][0])[name] for number in old]
        table = _with(table, f"{prefix}/{name}", new)
    return table, [places[number][1] for number in old]


def _with(table: Any, name: str, values: list[Any]) -> Any:
    # The column keeps its type, which Arrow would otherwise infer from the values.
    kind = table.schema.field(name).type
    return with_column(table, name, lerobot.import_extra("pyarrow").array(values, kind))


def _collect(table: Any, statistics: dict[str, list[dict[str, Any]]]) -> None:
    names = [name for name in table.column_names if name.startswith("stats/")]
    for row in table.select(names).to_pylist():
        parts: dict[str, dict[str, Any]] = {}
        for name, value in row.items():
            key, _, kind = name.removeprefix("stats/").rpartition("/")
            if value is not None:  # None: an episode without steps
                parts.setdefault(key, {})[kind] = value
        for key, part in parts.items():
            statistics.setdefault(key, []).append(part)
