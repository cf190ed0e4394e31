"""Reserve memory for long columns: on the CPU, on a device, or in a file without a name."""

import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Literal

import gymnasium
import torch
from torch import Tensor

from lightning_rl.rollout.contract import FieldSpec, space_spec

Place = Literal["cpu", "device", "disk"]
"""Where columns lie."""

Column = tuple[str, ...]
"""The name of a column: of a field, and of the keys below it where that is a tree."""

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup/memory.max")


def leaves_of_space(name: str, space: gymnasium.Space[Any]) -> Iterator[tuple[Column, FieldSpec]]:
    """Yield the columns that elements of a space take, a Dict's one by one.

    Raises:
        ConfigurationError: for a space that cannot be stored.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        for key, child in space.items():
            for (_, *below), spec in leaves_of_space(key, child):
                yield (name, key, *below), spec
    else:
        yield (name,), space_spec(space)


def bytes_of(specs: Mapping[Column, FieldSpec]) -> int:
    """Return how many bytes a row of some columns takes."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in specs.values())


def reserve(
    specs: Mapping[Column, FieldSpec],
    rows: int,
    place: Place,
    device: torch.device,
    directory: Path,
) -> dict[Column, Tensor]:
    """Return zeroed columns [rows, ...], which take memory where they are written alone.

    On disk the file has no name: it goes with the process, however that ends, and leaves nothing.

    Args:
        specs: shape and dtype of a row, by column.
        rows: how many.
        place: where they lie.
        device: where `place` is `device`.
        directory: of the file, where `place` is `disk`.

    Raises:
        OSError: where the disk has not enough room. It is taken at once: a process that writes to a
            page for which there is none would be killed.
    """
    columns: dict[Column, Tensor] = {}
    for column, (shape, dtype) in specs.items():
        size = (rows, *shape)
        if place == "device" and device.type != "cpu":
            columns[column] = torch.zeros(size, dtype=dtype, device=device)
            continue
        length = max(1, prod(size) * dtype.itemsize)
        memory = _mapped_file(length, directory) if place == "disk" else _untouched(length)
        columns[column] = torch.frombuffer(memory, dtype=dtype, count=prod(size)).view(size)
    return columns


def _untouched(length: int) -> mmap.mmap:
    """Return memory of the process that the system gives page by page, as it is written.

    Not from the C library, which may hand out used memory, and clear it.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, length)
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # which samples from all over are found faster in
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _mapped_file(length: int, directory: Path) -> mmap.mmap:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, length)
        else:
            os.truncate(file.fileno(), length)
        return mmap.mmap(file.fileno(), length)  # which keeps the file open


def available_bytes(place: Place, device: torch.device, directory: Path) -> int | None:
    """Return how many bytes columns may take somewhere; None where the system does not say."""
    if place == "disk":
        there = directory.absolute()
        while not there.exists():
            there = there.parent
        return shutil.disk_usage(there).free
    if place == "device" and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available_memory()


def _available_memory() -> int | None:
    """Return the memory that is free for this process, on Linux, within a container's limit."""
    if sys.platform != "linux":
        return None
    found = []
    with suppress(OSError, StopIteration, ValueError):
        lines = MEMINFO.read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(1024 * int(available.split()[1]))
    with suppress(OSError, ValueError):  # "max" where there is no limit
        found.append(int(CONTAINER.read_text()))
    return min(found, default=None)
