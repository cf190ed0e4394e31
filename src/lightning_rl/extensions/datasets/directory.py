"""Own a dataset's directory: its lock, and replacement of its folders that survives a SIGKILL."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lightning_rl.extend.errors import require
from lightning_rl.extend.files import TEMPORARY, lock_file, move, writing

TOPS = ("data", "videos", "meta")

UNDER_WAY = ".recording"
"""Folder of the unfinished episode."""

UNFINISHED, FINISHED = ".joining", ".finalised"
"""Folders of a rewrite: in progress, and complete but not yet moved to its place."""

LOCK = ".lock"

BEGUN = ".lightning_rl_recording"
"""File that marks a new dataset without a finished episode; see `has_no_episodes`."""

BEGUN_TEXT = b"rl-cli record began a dataset here. No episode is finished yet.\n"


def lock_dataset(path: Path) -> Callable[[], None]:
    """Lock a dataset without links against other processes; return the function that unlocks it."""
    for name in (LOCK, BEGUN, UNDER_WAY, UNFINISHED, FINISHED, *TOPS):
        _refuse_link(path / name)
        # A link within a folder would be followed by a rewrite, which then changes files elsewhere.
        for file in (path / name).rglob("*"):
            _refuse_link(file)
    descriptor = lock_file(
        path / LOCK,
        f"{{owner}} records into {path}, or labels it: two processes would overwrite each other's "
        "files. Wait until it ends, or give another directory.",
    )
    return (lambda: None) if descriptor is None else partial(os.close, descriptor)


def _refuse_link(file: Path) -> None:
    require(
        not file.is_symlink(),
        f"{file} is a link, and writing into the dataset would change files elsewhere: copy the "
        "dataset without links (cp -rL) and write into the copy.",
    )


def has_no_episodes(path: Path) -> bool:
    """Return whether a directory is empty, or holds a marked dataset without a finished episode."""
    # Temporary files of an interrupted write do not count.
    names = {file.name for file in path.iterdir() if not file.name.startswith(TEMPORARY)}
    mark = path / BEGUN
    return not names or (
        names <= {LOCK, BEGUN, UNDER_WAY, *TOPS}
        and mark.is_file()
        and mark.stat().st_size == len(BEGUN_TEXT)
        and mark.read_bytes() == BEGUN_TEXT
    )


def part_of(path: Path, name: str) -> Path:
    """Return the valid place of a file or folder, also after an interrupted rewrite."""
    # After the move to FINISHED its folders are the dataset, even before they stand in their place.
    joined = path / FINISHED / Path(name).parts[0]
    return path / (FINISHED if joined.exists() else "") / name


def complete_join(path: Path) -> None:
    """Finish an interrupted rewrite: move complete folders to their place, remove the others."""
    # In this order a kill at any line loses nothing: a complete folder is moved before the rest
    # goes.
    shutil.rmtree(path / UNFINISHED, ignore_errors=True)
    for top in TOPS:
        if (path / FINISHED / top).exists():
            shutil.rmtree(path / top, ignore_errors=True)
            move(path / FINISHED / top, path / top)
    shutil.rmtree(path / FINISHED, ignore_errors=True)


@contextmanager
def replacing_folders(path: Path) -> Iterator[Path]:
    """Yield a folder; at exit, its folders replace the dataset's."""
    target = path / UNFINISHED
    with writing(path):
        yield target
        # The data must be on the disk before the rename that makes it valid.
        _flush(target)
    move(target, path / FINISHED)
    complete_join(path)


def keep_other_files(path: Path, target: Path) -> None:
    """Keep other files, such as notes, of the folders that a rewrite replaces."""
    tops = [top for top in TOPS if (target / top).is_dir()]
    for file in [file for top in tops for file in (path / top).rglob("*")]:
        copy = target / file.relative_to(path)
        temporary = file.name.startswith(TEMPORARY)
        if file.is_file() and not (file.match("chunk-*/file-*.*") or temporary or copy.exists()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            link(file, copy)


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _flush(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
