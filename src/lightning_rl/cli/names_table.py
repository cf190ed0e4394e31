"""The table of shipped classes and their settings, in a file of the user's cache directory."""

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.system.files import write_atomically

PACKAGE = Path(__file__).resolve().parents[1]


class Table(NamedTuple):
    """The names that the command line accepts.

    A slot describes the classes that a setting takes, also in a list or as the values of a
    `mapping`: the classes of a `family` without the arguments that are `filled_in`, where another
    `text` may be possible, or the dataclass `group`; or the numbers and `choices` that it takes, as
    described by `values`. It is None for other settings.

    Attributes:
        key: state of the package that the table describes.
        packages: top packages of the classes.
        options: slots of the options, by subcommand and name.
        classes: slots of the settings, by class and name.
        families: of each base class, `classes` by bare name, and the names `offered` in messages.
        paths: settings that name a class, each with its class.
        pages: help pages, by arguments and width of the terminal.
    """

    key: str
    packages: list[str]
    options: dict[str, dict[str, Any]]
    classes: dict[str, dict[str, Any]]
    families: dict[str, dict[str, Any]]
    paths: list[tuple[str, str]]
    pages: dict[str, str]

    def places(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield path, class and settings of each class that a config may name."""
        for path, cls in self.paths:
            yield path, cls.rpartition(".")[2], list(self.classes[cls])


def current_table() -> Table | None:
    """Return the table, or None if it does not exist or describes another state of the package."""
    # A damaged table counts as none; a TypeError means other fields, a RuntimeError no home.
    with suppress(OSError, ValueError, TypeError, RuntimeError):
        table = Table(**json.loads(_file().read_text(encoding="utf-8")))
        if table.key == _state():
            return table
    return None


def page_key(arguments: Sequence[str]) -> str:
    """Return the key of a help page in a terminal as wide as this one; "" for own classes."""
    is_shipped = all(re.fullmatch(r"[\w-]+|--[\w.]+(=\w+)?", argument) for argument in arguments)
    return f"{shutil.get_terminal_size().columns} {' '.join(arguments)}" if is_shipped else ""


def write_table(content: dict[str, Any]) -> None:
    """Write the table, unless the cache directory cannot be written, or there is no home."""
    text = json.dumps({**content, "key": _state()})
    with suppress(OSError, RuntimeError):
        write_atomically(_file(), lambda file: file.write(text.encode()))


def _file() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Virtual environments and checkouts have tables of their own.
    place = sha256(f"{PACKAGE} {sys.prefix}".encode()).hexdigest()[:12]
    return cache / "lightning_rl" / f"names-{place}.json"


def _state() -> str:
    """Return a digest of the versions and times of all files that decide the names."""
    dependencies = Path(sysconfig.get_path("purelib"))
    files = [dependencies, *sorted(PACKAGE.rglob("*.py"))]
    times = [(str(path), path.stat().st_mtime_ns) for path in files]
    described = (version("lightning-rl"), sys.version, times, *shipped_configs())
    return sha256(repr(described).encode()).hexdigest()
