"""Keep the replay in unchanging files, named by digests, until no checkpoint lists them."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rl.buffers.columns import Column
from lightning_rl.checkpoints.format import check_tensors, read_checkpoint
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import remove_leftovers, write_atomically
from lightning_rl.system.tensors import load_tensors

REPLAY_FOLDER = "replay"
"""Folder of the files, next to the checkpoints."""

NAME = re.compile(r"rank(\d{1,6})-(\d{1,18})-(\d{1,18})-([0-9a-f]{16})\.pt")
"""File names: the rank, the first slot, the slot after the last one, the digest."""

CURE = (
    "Resume from another checkpoint of the run, such as best.ckpt or an iteration_*.ckpt, or "
    "start with an empty replay by --restore_replay false, which is not an exact resumption."
)
"""Cure in all errors about an unreadable replay."""


class Part(NamedTuple):
    """A file that a checkpoint lists: its slots `first` to `last` - 1, and its size in bytes."""

    name: str
    first: int
    last: int
    size: int


def write_part(folder: Path, first: int, last: int, tensors: Mapping[Column, Tensor]) -> Part:
    """Write the CPU tensors of slots `first` to `last` - 1; each must own its storage."""
    content = dict(tensors)
    # The digest makes damage visible, and another content gets another name.
    name = f"rank{ranks.rank()}-{first}-{last}-{_digest(content)}.pt"
    write_atomically(folder / name, lambda file: torch.save(content, file))
    return Part(name, first, last, sum(tensor.nbytes for tensor in content.values()))


def parts_of(state: Mapping[str, Any]) -> list[Part]:
    """Return the files that a state lists, after a check of their names and order."""
    parts = []
    for entry in _names(state):
        match = NAME.fullmatch(entry)
        if match is None:
            raise ConfigurationError(
                f"The checkpoint names '{entry}' as a file of its replay, but replay files have "
                f"other names. {CURE}"
            )
        parts.append(Part(entry, int(match[2]), int(match[3]), 0))
    ends = [part.last for part in parts]
    if any(part.first >= part.last for part in parts) or ends[:-1] != [
        part.first for part in parts[1:]
    ]:
        raise ConfigurationError(
            f"The files that the checkpoint names are not consecutive: {ends}. {CURE}"
        )
    return parts


def read_part(folder: Path, part: Part) -> dict[Column, Tensor]:
    """Return the tensors of a file, after a check of their digest."""
    path = folder / part.name
    if not path.is_file():
        raise ConfigurationError(
            f"The checkpoint's replay cannot be read: its file {path} is missing. {CURE}"
        )
    try:
        content = load_tensors(path)
        check_tensors(content, str(path))  # the file may come from another person
        valid = _digest(content) == NAME.fullmatch(part.name)[4]  # type: ignore[index]  # it matches
    except Exception as error:  # a damaged file raises many kinds of errors
        raise ConfigurationError(_damaged(path)) from error
    if not valid:
        raise ConfigurationError(_damaged(path))
    return content  # type: ignore[no-any-return]  # the digest guarantees it


def _damaged(path: Path) -> str:
    return f"The checkpoint's replay cannot be read: {path} is damaged. {CURE}"


def _digest(content: Mapping[Column, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for column in sorted(content):  # not in the order of the dict
        tensor = content[column].contiguous()
        # The same bytes in another shape are another content.
        digest.update(repr((column, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)  # the bytes, without a copy
    return digest.hexdigest()


@dataclass
class ReplayLog:
    """Content of the files of a replay in a folder.

    Attributes:
        parts: the files, of consecutive slots.
        finals_begin: first aside number in the last file.
        finals_end: number after the last one.
    """

    parts: list[Part] = field(default_factory=list)
    finals_begin: int = 0
    finals_end: int = 0

    @property
    def end(self) -> int:
        return self.parts[-1].last if self.parts else 0

    def forget_before(self, oldest: int, folder: Path) -> None:
        """Forget files of steps no longer stored; forget all files if one is missing."""
        self.parts = [part for part in self.parts if part.last > oldest]
        # A file may have been deleted by hand; then all steps are written again.
        filenames = set(os.listdir(folder)) if folder.is_dir() else set()
        if not filenames.issuperset(part.name for part in self.parts):
            self.parts = []
        if not self.parts:
            self.finals_begin = self.finals_end = 0

    def reopen(self) -> None:
        """Forget the last file, to write its steps again together with newer ones."""
        self.parts.pop()
        self.finals_end = self.finals_begin


class ReplayFolder:
    """Removes replay files that no checkpoint in the folder `checkpoints` lists."""

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        self.path = checkpoints / REPLAY_FOLDER
        self._cache: dict[Path, tuple[tuple[int, int, int], frozenset[str]]] = {}

    def remove_unfinished(self) -> None:
        """Remove incomplete files that a killed run left, of all ranks."""
        if self.path.is_dir():
            remove_leftovers(self.path)
            self._remove(lambda rank: True)

    def remove_unnamed(self) -> None:
        """Remove files that no checkpoint lists; rank 0 also removes files of missing ranks."""
        own_rank, size = ranks.rank(), ranks.world_size()
        if self.path.is_dir():
            self._remove(lambda rank: rank == own_rank or (own_rank == 0 and rank >= size))

    def _remove(self, is_ours: Any) -> None:
        files = {}
        # List the files before the checkpoints: a file written meanwhile is not in `files`.
        for path in self.path.iterdir():
            match = NAME.fullmatch(path.name)
            if match is not None and is_ours(int(match[1])):
                files[path.name] = path
        listed_names = self._listed_names()
        # None: a checkpoint cannot be read, so all files stay.
        for name in files.keys() - (files if listed_names is None else listed_names):
            files[name].unlink(missing_ok=True)

    def _listed_names(self) -> set[str] | None:
        listed_names: set[str] = set()
        present = sorted(self.checkpoints.glob("*.ckpt"))
        self._cache = {path: cached for path, cached in self._cache.items() if path in present}
        for path in present:
            try:
                status = path.stat()
                # Reading a large checkpoint takes seconds, hence once per version of the file.
                signature = (status.st_mtime_ns, status.st_size, status.st_ino)
                cached = self._cache.get(path)
                if cached is None or cached[0] != signature:
                    cached = (signature, _names_in(read_checkpoint(path, verify=False)))
                    self._cache[path] = cached
            except FileNotFoundError:  # removed meanwhile
                continue
            except ConfigurationError as error:
                rank_zero_warn(
                    f"Keeping all files of {self.path}, because {path.name} may need them: {error}"
                )
                return None
            listed_names |= cached[1]
        return listed_names


def _names_in(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    listed_names: set[str] = set()
    for state in checkpoint.values():
        replays = state.get("replays") if isinstance(state, dict) else None
        for replay in replays if isinstance(replays, list) else ():
            listed_names.update(_names(replay) if isinstance(replay, dict) else ())
    return frozenset(listed_names)


def _names(state: Mapping[str, Any]) -> list[str]:
    names = state.get("files", [])
    return [str(name) for name in names] if isinstance(names, list) else []
