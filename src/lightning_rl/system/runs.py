"""Make the directory of a run, keep it to one process, and find checkpoints of earlier runs."""

import atexit
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, closest, require
from lightning_rl.system.files import expanded, lock_file
from lightning_rl.system.process import last_act

CHECKPOINTS = "checkpoints"
ALIASES = ("last", "best")
"""What `--ckpt_path` may say instead of a path."""

LOCK = ".lock"
"""The file in a run directory that the process which trains there holds."""

AT_ITS_BEGINNING = ("config.yaml", "run.json", "logs", LOCK)
"""What a run writes before its first iteration: it says how it was meant, and nothing else."""

_made: set[Path] = set()
"""The directories that this process has made for runs, and those above them."""


def new_run_dir(output_dir: str | Path, exp_name: str) -> Path:
    """Make a directory `output_dir/exp_name_YYYYmmdd_HHMMSS[_n]` that nobody else has.

    It is made where its name is chosen, or another run that starts in the same second would choose
    the same; it goes at exit if nothing was written into it. One that cannot be made is left to
    whoever writes there first, which says why. Of several processes the first makes it, and the
    others get it from `Peers`.

    Raises:
        ConfigurationError: for a name that would lead elsewhere.
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
    """Leave no empty directory of a run that did not begin."""
    try:
        yield
    except BaseException:
        remove_if_empty(directory)
        raise


def remove_if_empty(directory: Path) -> None:
    """Remove a directory in which nothing was written, and those that were made for it."""
    with suppress(OSError):  # something was, or it has gone
        directory.rmdir()
        _remove_parents(directory)


def remove_refused(directory: Path) -> None:
    """Remove the directory of a run that was refused before its first iteration.

    Only one that this process has made, and in which nothing lies but what a run writes at its
    beginning.
    """
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
def alone_in(run_dir: Path) -> Iterator[None]:
    """Train in a run directory while no other process does.

    The lock is the system's and goes with the process, however that ends. It is a record lock
    (`lockf`), which forked env workers do not inherit: with `flock`, one that hangs would hold it.
    A file system without locks has none, and nothing is said.

    Raises:
        ConfigurationError: where another process trains there; it says which, and what to do.
    """
    path = run_dir / LOCK
    descriptor = lock_file(
        path,
        f"Run {run_dir} is being trained by {{owner}}: two would write over each other. Wait for "
        "it or end it (a SIGTERM has it save first), or add --exp_name with another name, which "
        "begins a run of its own from that checkpoint.",
    )
    try:
        with last_act(lambda error: path.unlink(missing_ok=True)):
            yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)  # first: who opens it now finds that it has gone
            os.close(descriptor)
        remove_if_empty(run_dir)  # refused before anything was written


def run_dir_of(checkpoint: str | Path) -> Path | None:
    """Return the run directory that a checkpoint lies in, or None if it lies elsewhere."""
    parent = Path(checkpoint).absolute().parent
    return (
        parent.parent
        if parent.name == CHECKPOINTS and (parent.parent / "config.yaml").is_file()
        else None
    )


def find_checkpoint(spec: str, output_dir: str | Path, exp_name: str | None = None) -> Path:
    """Turn what `--ckpt_path` says into the path of a file.

    Args:
        spec: a checkpoint, a run directory (then its last checkpoint), or `last` or `best` of the
            newest run.
        output_dir: where runs are looked for.
        exp_name: consider only the runs of this name; None for all.

    Raises:
        ConfigurationError: where there is no such file, saying what there is.
    """
    if spec not in ALIASES:
        path = expanded(spec)
        path = path / CHECKPOINTS / "last.ckpt" if path.is_dir() else path
        if not path.is_file():
            near = [p.name for p in path.parent.glob("*.ckpt")] if path.parent.is_dir() else []
            there = f"; there is {', '.join(sorted(near))}" if near else ""
            raise ConfigurationError(
                f"No checkpoint at {path}{there}{closest(spec, ALIASES)}. Give a .ckpt file, a run "
                "directory, last or best."
            )
        return path
    found = [
        p
        for p in expanded(output_dir).glob(f"*/{CHECKPOINTS}/{spec}.ckpt")
        if _is_run(p.parent.parent.name, exp_name)
    ]
    if not found:
        whose = f"of '{exp_name}' " if exp_name else ""
        raise ConfigurationError(
            f"No run {whose}with a checkpoint {spec}.ckpt in '{output_dir}'. Train one first, or "
            "set --output_dir, "
            "--exp_name or the path of a checkpoint."
        )
    return max(found, key=lambda p: p.stat().st_mtime)


def refuse_live_run(run_dir: Path | None) -> None:
    """Refuse to go on with a run that another process trains.

    Raises:
        ConfigurationError: see `alone_in`, which keeps others out from then on.
    """
    if run_dir is not None:
        with alone_in(run_dir):
            pass


def _claim(path: Path) -> bool:
    """Make a directory; tell whether the name was free, or none can be made there."""
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
    except FileNotFoundError:  # another run that was refused has taken its parent away
        return _claim(path)
    except OSError:
        return True
    _made.add(path.absolute())
    atexit.register(remove_if_empty, path.absolute())
    return True


def _is_run(directory: str, exp_name: str | None) -> bool:
    name = re.escape(exp_name) if exp_name else ".+"
    return re.fullmatch(rf"{name}_\d{{8}}_\d{{6}}(_\d+)?", directory) is not None
