"""Allocate long columns: in memory, on a device, or in a nameless file."""

import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Literal

import gymnasium
import torch
from torch import Tensor

from lightning_rl.rollout.allocation import space_spec
from lightning_rl.rollout.contract import FieldSpec, leaves_by_path

Place = Literal["cpu", "device", "disk"]
"""Where columns are stored."""

Column = tuple[str, ...]
"""Name of a column: the field, and the keys below it if the field is a tree."""

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup/memory.max")


def leaves_of_space(name: str, space: gymnasium.Space[Any]) -> dict[Column, FieldSpec]:
    """Return the columns for elements of a space; a Dict has one or more per key."""
    return {path: space_spec(leaf) for path, leaf in leaves_by_path(space, name).items()}


def bytes_of(specs: Mapping[Column, FieldSpec]) -> int:
    """Return the bytes of a row over all columns."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in specs.values())


def reserve(
    specs: Mapping[Column, FieldSpec],
    rows: int,
    place: Place,
    device: torch.device,
    directory: Path,
) -> dict[Column, Tensor]:
    """Return zeroed columns [rows, ...]; in memory, pages are allocated at their first write.

    A file has no name, so that it disappears with the process; its space is reserved immediately,
    because a write to an unbacked page kills the process. Raise OSError if the disk is too full.
    """
    columns: dict[Column, Tensor] = {}
    for column, (shape, dtype) in specs.items():
        size = (rows, *shape)
        if place == "device" and device.type != "cpu":
            columns[column] = torch.zeros(size, dtype=dtype, device=device)
            continue
        length = max(1, prod(size) * dtype.itemsize)
        memory = _mapped_file(length, directory) if place == "disk" else _untouched(length)
        # The tensor keeps the mapping open.
        columns[column] = torch.frombuffer(memory, dtype=dtype, count=prod(size)).view(size)
    return columns


def _untouched(length: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, length)
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # faster for random access
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _mapped_file(length: int, directory: Path) -> mmap.mmap:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, length)
        else:
            os.truncate(file.fileno(), length)
        return mmap.mmap(file.fileno(), length)  # keeps the file open


def available_bytes(place: Place, device: torch.device, directory: Path) -> int | None:
    """Return the bytes available for columns; None if the system does not report it."""
    if place == "disk":
        folder = directory.absolute()
        while not folder.exists():  # the run directory is made later
            folder = folder.parent
        return shutil.disk_usage(folder).free
    if place == "device" and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _available_memory()


def _available_memory() -> int | None:
    """Return the free memory of this process, within a container's limit (Linux only)."""
    if sys.platform != "linux":
        return None
    limits = []
    with suppress(OSError, StopIteration, ValueError):
        lines = MEMINFO.read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(1024 * int(available.split()[1]))
    with suppress(OSError, ValueError):  # "max" means no limit
        limits.append(int(CONTAINER.read_text()))
    return min(limits, default=None)
