"""Withhold what only the caller can allow: code from elsewhere, and downloads.

A class asks `granted` about each argument that would allow one of them. While what a checkpoint
names is built, the answer is an error, whatever the argument is called and whoever has set it. So
nothing that is read can grant anything, and a class that forgets to ask meets the second lock:
Python itself runs no source file then but those that it can import anyway.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning_rl
from lightning_rl.errors import ConfigurationError

CURE = "Add --trust_code true if you know where it comes from, or give your own --config."

_withheld = False
_has_granted = False


def granted(setting: str, asked: bool) -> bool:
    """Return whether something is allowed: where it is asked for, and no checkpoint asks for it.

    Args:
        setting: the name of the argument, for the message.
        asked: its value.

    Raises:
        ConfigurationError: where the configuration of a checkpoint asks for it.
    """
    if asked and _withheld:
        raise ConfigurationError(
            f"The configuration in the checkpoint sets {setting}: true. A checkpoint is data: it "
            f"cannot allow code or downloads, and nothing was run or downloaded. {CURE}"
        )
    global _has_granted
    _has_granted |= asked
    return asked


def has_granted() -> bool:
    """Tell whether this process was asked for something that a checkpoint could not allow."""
    return _has_granted


@contextmanager
def withheld() -> Iterator[None]:
    """Grant nothing to what is built inside, in all threads, and run no code from elsewhere.

    This patches Python's loader of source files, tried with 3.11 and 3.12: an audit hook could not
    be taken away again.
    """
    global _withheld
    before, run = _withheld, SourceFileLoader.exec_module
    # sys.path as it is now: transformers adds the folder that it copies a model's code to.
    folders = [Path(folder).resolve() for folder in sys.path]
    folders.append(Path(lightning_rl.__file__).resolve().parent)
    _withheld, SourceFileLoader.exec_module = True, _guarded(run, folders)  # type: ignore[assignment,method-assign]  # the lock
    try:
        yield
    finally:
        _withheld, SourceFileLoader.exec_module = before, run  # type: ignore[method-assign]  # as above


def _guarded(
    run: Callable[[Any, ModuleType], None], folders: Sequence[Path]
) -> Callable[[Any, ModuleType], None]:
    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        path = Path(loader.path).resolve()
        if not any(map(path.is_relative_to, folders)) and not _is_editable(module.__name__, path):
            raise ConfigurationError(
                f"The configuration in the checkpoint leads to code in {path}, which Python does "
                f"not import by itself; it was not run. {CURE}"
            )
        run(loader, module)

    return exec_module


def _is_editable(name: str, path: Path) -> bool:
    """Tell whether an editable install brings a file, by a finder of its own beside sys.path."""
    package = name.partition(".")[0]
    for finder in sys.meta_path:
        # Python's own finder would look along sys.path as it is by now.
        if finder is PathFinder or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(package, None)
        places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
        if any(place and path.is_relative_to(Path(place).resolve()) for place in places):
            return True
    return False
