"""Make run directories, and lock them for one process."""

import atexit
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_rl.system import ranks
from lightning_rl.system.errors import WriteError, require
from lightning_rl.system.files import check_still_there, expanded, gone, is_file, lock_file, shown
from lightning_rl.system.process import before_forced_exit
from lightning_rl.system.saved_runs import CHECKPOINTS

LOCK = ".lock"
"""Lock file of the process that trains in a run directory."""

AT_ITS_BEGINNING = ("config.yaml", "run.json", "logs", LOCK)
"""Files that a run writes before its first iteration; they hold no results."""

_made: set[Path] = set()
"""Directories that this process made for runs, with new parents."""


def new_run_dir(output_dir: str | Path, exp_name: str) -> Path:
    """Make a new directory `output_dir/exp_name_YYYYmmdd_HHMMSS[_n]`.

    It is removed at exit if it is empty. If it cannot be made, the first write raises a readable
    error. Of several processes the first makes it, and `Peers` sends the path to the others.
    """
    require(
        Path(exp_name).name == exp_name,
        f"exp_name must be a plain name, got '{exp_name}'; set --output_dir to write elsewhere.",
    )
    base = expanded(output_dir) / f"{exp_name}_{time.strftime('%Y%m%d_%H%M%S')}"
    path, number = base, 1
    while not _claim(path):
        number += 1
        path = base.with_name(f"{base.name}_{number}")
    return path


@contextmanager
def removed_if_refused(directory: Path) -> Iterator[None]:
    """Remove the empty directory of a run that did not begin."""
    try:
        yield
    except BaseException:
        remove_if_empty(directory)
        raise


def remove_if_empty(directory: Path) -> None:
    """Remove an empty directory, and the parents that were made for it."""
    with suppress(OSError):  # not empty, or already removed
        directory.rmdir()
        _remove_parents(directory)


def remove_refused(directory: Path) -> None:
    """Remove the directory of a refused run, if this process made it and it has no results."""
    with suppress(OSError):
        names = {path.name for path in directory.iterdir()}
        if directory.absolute() in _made and names <= set(AT_ITS_BEGINNING):
            shutil.rmtree(directory)
            _remove_parents(directory)


def _remove_parents(directory: Path) -> None:
    for parent in directory.absolute().parents:
        if parent not in _made:
            break
        parent.rmdir()


@contextmanager
def locked_run(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Lock a run directory, so that no other process trains in it, if the file system has locks.

    Yields a function that raises a `WriteError` if the directory was deleted, in part too, or
    replaced. Its `.lock` tells: a copy of the directory has another one.
    """
    path = run_dir / LOCK
    # Use a record lock (`lockf`): forked env workers inherit `flock`, and a hanging worker would
    # keep it.
    descriptor = lock_file(
        path,
        f"Run {run_dir} is being trained by {{owner}}: two runs would overwrite each other's "
        "files. Wait until it ends, stop it (SIGTERM saves first), or start a new run from that "
        "checkpoint with another --exp_name.",
    )

    def check() -> None:
        check_still_there(run_dir)
        if descriptor is not None and not is_file(descriptor, path):
            raise WriteError(gone(run_dir))

    try:
        with before_forced_exit(lambda error: path.unlink(missing_ok=True)):
            yield check
    finally:
        if descriptor is not None:
            if is_file(descriptor, path):  # another run may have replaced it
                path.unlink()  # before the close, so that others see that it is gone
            os.close(descriptor)
        remove_if_empty(run_dir)  # a refused run has no files


def refuse_overwriting(run_dir: Path, resumed: str | Path | None) -> None:
    """Refuse a new run in a directory that has checkpoints of another run."""
    folder = run_dir / CHECKPOINTS
    names = sorted(path.name for path in folder.glob("*.ckpt"))
    is_same_run = resumed is not None and Path(resumed).resolve().parent == folder.resolve()
    require(
        is_same_run or not names,
        f"trainer.run_dir {shown(run_dir)} holds a run, with {', '.join(names[:3])}. Resume it "
        f"(ckpt_path: {shown(folder / 'last.ckpt')}), or name another directory: in Python each "
        "model needs an RLTrainer of its own.",
    )


def refuse_live_run(run_dir: Path | None) -> None:
    """Raise an error if another process trains in a run directory; see `locked_run`."""
    if run_dir is not None:
        with locked_run(run_dir):
            pass


def _claim(path: Path) -> bool:
    if not ranks.is_first_process():
        return not path.exists()
    new = [parent for parent in path.absolute().parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return True
    _made.update(new)
    try:
        path.mkdir()
    except FileExistsError:
        return False
    except FileNotFoundError:  # another refused run removed the parent
        return _claim(path)
    except OSError:
        return True
    _made.add(path.absolute())
    atexit.register(remove_if_empty, path.absolute())
    return True
