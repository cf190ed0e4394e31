"""Write files completely or not at all, and read files of other people safely."""

import errno
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lightning_rl.system.errors import ConfigurationError, WriteError, reason_of, require

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]  # checked below

TEMPORARY = ".tmp-"
"""Prefix of unfinished files; the id of the process that writes one follows."""

PLACE = "--output_dir (of validate and test --trainer.run_dir)"
"""Settings that choose where files are written."""

CURES = {
    errno.ENOSPC: f"Free some space, or set {PLACE} to another disk",
    errno.EDQUOT: f"Free some of your quota, or set {PLACE} to another disk",
    errno.EFBIG: f"Raise the limit on the size of a file, or set {PLACE} to another disk",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
}


PAGE = 4096
"""Bytes that a small file takes on most disks."""

MOST_BYTES = 4 * 2**20
"""Most bytes of a configuration, a manifest or a description."""

DEEPEST = 100
"""Most levels of such a file."""


def expanded(path: str | Path) -> Path:
    """Expand `~` in a user's path; every path passes here once.

    Raises:
        ConfigurationError: if the home directory is unknown, or if the path is a URL or has a
            variable: a library would read either as another place than this package.
    """
    require(
        "://" not in str(path),
        f"{path} is a URL, but files are read and written on this machine: mount the bucket and "
        "name its path here, or copy the files.",
    )
    variables = re.findall(r"\$\w+|\$\{.*?\}", str(path))
    require(
        not variables,
        f"{path} has {', '.join(variables)}, but only a shell expands variables: write the whole "
        "path, or ~ for the home directory.",
    )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"The home directory in {path} is unknown: write the whole path instead of ~, or set "
            "the environment variable HOME."
        ) from error


def shown(path: Path) -> Path:
    """Return an absolute path relative to the working directory, if it is inside."""
    with suppress(OSError, ValueError):  # deleted working directory, or a path outside of it
        return path.relative_to(Path.cwd())
    return path


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Fill a temporary file by `write`, flush it, and rename it; a kill leaves the old file."""
    target = Path(path)
    # Do not use mkstemp: its files are private to the owner.
    temporary = target.parent / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _flush_directory(target.parent)
    except BaseException as error:
        with suppress(OSError):  # the directory may be missing, too
            temporary.unlink(missing_ok=True)
        cause = _refusal(error)
        if cause is None:
            raise
        raise _explained(target, cause) from error


def open_file(path: Path, inside: Path | None, most_bytes: int) -> IO[bytes]:
    """Open a regular file of other people; refuse links out of `inside`, pipes and devices."""
    real = os.path.realpath(path)
    if inside is not None and not Path(real).is_relative_to(os.path.realpath(inside)):
        raise ConfigurationError(
            f"{path} is a link that leads out of {inside}, to {real}, and is not read. If the file "
            "is yours, copy it into the directory."
        )
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | _AT_ONCE)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from error
    status = os.fstat(descriptor)
    regular = stat.S_ISREG(status.st_mode)
    if regular and status.st_size <= most_bytes:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    reason = f"it has more than {most_bytes:,} bytes" if regular else "it is not a regular file"
    raise ConfigurationError(f"{path} cannot be read: {reason}.")


_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # Windows has none


def read_text(path: str | Path, inside: Path | None = None) -> str:
    """Return the text of a small file in UTF-8, for any locale; see `open_file`."""
    with open_file(Path(path), inside, MOST_BYTES) as file:
        try:
            return file.read().decode()
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {reason_of(error)}.") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{path} is not in UTF-8 (byte {error.object[error.start]:#04x} at {error.start}): "
                "save it in that encoding."
            ) from error


def read_json(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """Return the mapping in a small JSON file with at most `DEEPEST` levels; see `read_text`."""
    text = read_text(path, inside)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {reason_of(error)}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} cannot be read: it holds no mapping.")
    level: list[Any] = [content]
    # Level by level instead of by recursion, which deep nesting would exhaust.
    for _ in range(DEEPEST):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    if level:
        raise ConfigurationError(f"{path} cannot be read: it has more than {DEEPEST} levels.")
    return content


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise an `OSError` of a library as a readable `WriteError`."""
    try:
        yield
    except WriteError:
        raise
    except FileNotFoundError as error:  # the directory existed before
        raise WriteError(gone(Path(path))) from error
    except OSError as error:
        raise _explained(Path(path), error) from error


def check_writable(directory: Path) -> None:
    """Make a directory; raise a `WriteError` unless it accepts a file with content."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PAGE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _explained(directory, error) from error


def check_still_there(directory: Path) -> None:
    """Raise a `WriteError` if a directory was deleted, because a write would create it again."""
    if not directory.is_dir():
        raise WriteError(gone(directory))


def gone(directory: Path) -> str:
    """Return the message for a directory that was deleted or replaced during the run."""
    return f"Cannot write into {directory}: it, or a part of it, was deleted or replaced meanwhile."


def remove_leftovers(directory: str | Path) -> None:
    """Remove the unfinished files of killed processes; living processes keep their files."""
    for path in Path(directory).glob(f"{TEMPORARY}*"):
        number = path.name.removeprefix(TEMPORARY).partition("-")[0]
        if path.is_file() and not (number.isdigit() and _writes(int(number))):
            path.unlink(missing_ok=True)


def lock_file(path: Path, refusal: str) -> int | None:
    """Lock a file, and write the owner into it; return None if locks are not available."""
    if path.is_symlink():  # its target would be overwritten
        raise ConfigurationError(f"{path} is a link, but a lock must be a file: remove the link.")
    if fcntl is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None  # the first write there raises a readable error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        owner = os.read(descriptor, 200).decode(errors="replace") or "another process"
        os.close(descriptor)
        raise ConfigurationError(refusal.format(owner=owner)) from error
    except OSError:
        os.close(descriptor)
        return None
    if not is_file(descriptor, path):  # the previous owner removed the file
        os.close(descriptor)
        return lock_file(path, refusal)
    with suppress(OSError):  # the disk may be full; the lock still holds
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
    return descriptor


def move(source: Path, target: Path) -> None:
    """Rename a file or directory, safely for a power cut; raise a `WriteError` if that fails."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            with source.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(source, target)
    _flush_directory(target.parent)


def is_file(descriptor: int, path: Path) -> bool:
    """Return whether an open file lies at a path, by its device and inode."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _flush_directory(directory: Path) -> None:
    """Make a rename survive a power cut, if the file system can."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _refusal(error: BaseException) -> OSError | None:
    """Return the system's error, which `torch.save` hides."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, OSError):
        chain = chain.__cause__ or chain.__context__
    return chain


def _explained(target: Path, error: OSError) -> WriteError:
    note = " The previous file is unchanged." if target.is_file() else ""
    cure = CURES.get(error.errno or 0, f"Set {PLACE} to a directory that can be written")
    free = ""
    if error.errno == errno.ENOSPC:
        with suppress(OSError):
            free = f" ({shutil.disk_usage(target.parent).free / 2**20:.1f} MiB are free)"
    return WriteError(
        f"Cannot write {shown(target)}: {error.strerror or error}{free}. {cure}.{note}"
    )


def _writes(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True
