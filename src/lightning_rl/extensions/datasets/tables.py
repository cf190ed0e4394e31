"""Read parquet files within memory bounds: a small file may expand to any number of rows."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import reason_of, require
from lightning_rl.extensions.datasets.lerobot_format import check_file, import_extra

MOST_BYTES = 2**30
"""Maximum bytes of one row group in memory."""

MOST_ROWS = 10**6
"""Maximum rows of the tables of episodes and tasks, which are read whole."""

MOST_BYTES_TOGETHER = 8 * MOST_BYTES
"""Maximum bytes of the rows of an episode in memory."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of a missing or damaged file into a `ConfigurationError` with its name."""
    try:
        yield
    # Already with the file's name and a cure.
    except ConfigurationError:
        raise
    # Most are Arrow's, and of values of other types in its tables.
    except Exception as error:
        raise ConfigurationError(
            f"{path} cannot be read ({reason_of(error)}): restore it, or give another dataset."
        ) from error


def read_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    """Read columns of a small table. Default: all."""
    file = TableFile(path, columns)
    count = sum(file.counts)
    # Checked before reading: a few bytes may stand for any number of rows.
    require(
        count <= MOST_ROWS,
        f"{path} has {count:,} rows, but at most {MOST_ROWS:,} are read: give another dataset.",
    )
    return file.rows(0, count)


def with_column(table: Any, name: str, column: Any) -> Any:
    """Return a table with a column replaced or appended."""
    names = table.column_names
    if name in names:
        return table.set_column(names.index(name), name, column)
    return table.append_column(name, column)


def write_tables(path: Path, tables: Iterable[Any]) -> None:
    """Write tables to a new parquet file, one row group each, with the first table's columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer: Any = None
    for table in tables:
        if writer is None:
            writer = import_extra("pyarrow.parquet").ParquetWriter(path, table.schema)
        writer.write_table(table.select(writer.schema.names))
    if writer is not None:
        writer.close()


class TableFile:
    """Columns of a parquet file, read by row groups; the last row group stays in memory.

    Attributes:
        names: names of all columns of the file.
        counts: rows of each row group.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        parquet = import_extra("pyarrow.parquet")
        self.path = path
        with readable(path):
            check_file(path)
            self._file = parquet.ParquetFile(path)
            self.names: list[str] = self._file.schema_arrow.names
        self._columns = list(self.names if columns is None else columns)
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        require(
            not twice, f"{path} has two columns of the same name: {twice[:1]}. Rename one of them."
        )
        missing = set(self._columns) - set(self.names)
        require(
            not missing,
            f"{path} has no column {', '.join(sorted(missing))}, which info.json lists: "
            "restore it, or give another dataset.",
        )
        metadata = self._file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self.counts = [group.num_rows for group in groups]
        self._ends = list(accumulate(self.counts))
        # Parquet's name of a list column `a` is `a.list.element`.
        column_names, schema = set(self._columns), metadata.schema
        self._column_numbers = [
            i
            for i in range(metadata.num_columns)
            if any(name in column_names for name in _beginnings(schema.column(i).path))
        ]
        self._last_group: tuple[int, Any] | None = None

    def rows(self, first: int, count: int) -> Any:
        arrow = import_extra("pyarrow")
        parts, begin, size = [], 0, 0
        # Decode no group without a row of the range: a group may hold a whole dataset's episode.
        for group, end in enumerate(self._ends):
            if begin < first + count and end > first:
                table = self.group(group)
                start = max(first - begin, 0)
                parts.append(table.slice(start, min(first + count, end) - begin - start))
                size += parts[-1].nbytes
                self._check_size(size, MOST_BYTES_TOGETHER, f"{count:,} rows")
            begin = end
        return arrow.concat_tables(parts) if parts else self._nothing()

    def groups(self) -> Iterator[Any]:
        return map(self.group, range(len(self.counts)))

    def group(self, number: int) -> Any:
        # Episodes that follow each other share a row group.
        if self._last_group is None or self._last_group[0] != number:
            with readable(self.path):
                self._last_group = (number, self._read(number))
        return self._last_group[1]

    def _read(self, number: int) -> Any:
        arrow = import_extra("pyarrow")
        group, name = self._file.metadata.row_group(number), f"its row group {number}"
        columns = [group.column(i) for i in self._column_numbers]
        # Dictionary encoding makes the size in the file smaller than 8 bytes per number in memory.
        sizes = [max(8 * chunk.num_values, chunk.total_uncompressed_size) for chunk in columns]
        self._check_size(sum(sizes), MOST_BYTES, name)
        texts = [chunk for chunk in columns if chunk.physical_type == "BYTE_ARRAY"]
        if not texts:
            return self._file.read_row_group(number, columns=self._columns)
        # The file stores a repeated text once, but memory does not: read a few rows at a time.
        longest = max(chunk.total_uncompressed_size for chunk in texts)
        rows = max(1, MOST_BYTES // max(1, longest))
        batches, size = [], 0
        for batch in self._file.iter_batches(rows, row_groups=[number], columns=self._columns):
            batches.append(batch)
            size += batch.nbytes
            self._check_size(size, MOST_BYTES, name)
        return arrow.Table.from_batches(batches) if batches else self._nothing()

    def _nothing(self) -> Any:
        return self._file.schema_arrow.empty_table().select(self._columns)

    def _check_size(self, size: int, maximum: int, name: str) -> None:
        require(
            size <= maximum,
            f"{self.path}: {name} would take {size / 2**30:.1f} GiB of memory, but at most "
            f"{maximum / 2**30:g} are read. Write the file with smaller row groups (pyarrow: "
            "row_group_size), or give another dataset.",
        )


def _beginnings(path: str) -> Iterator[str]:
    words = path.split(".")
    return (".".join(words[: i + 1]) for i in range(len(words)))
