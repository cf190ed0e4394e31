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
from typing import Any, TypeVar

import lightning_rl
from lightning_rl.system.errors import ConfigurationError

CURE = "Add --trust_code true if you know where it comes from, or give your own --config."
CURE_IN_PYTHON = (
    "Pass trust_code=True if you know where it comes from, or what it names yourself: policy=..."
)
"""What to do where something is withheld: on the command line, and from `load_from_checkpoint`."""

Asked = TypeVar("Asked", bool, str)

_withheld: str | None = None
"""That cure, while something is."""

_has_granted = False


def granted(setting: str, asked: Asked) -> Asked:
    """Return what is asked for, where no checkpoint asks for it.

    Args:
        setting: the name of the argument, for the message.
        asked: its value: whether something is to be allowed, or the name of a class to be imported.

    Raises:
        ConfigurationError: where the configuration of a checkpoint asks for it.
    """
    if asked and _withheld is not None:
        value = "true" if asked is True else asked
        raise ConfigurationError(
            f"The configuration in the checkpoint sets {setting}: {value}. A checkpoint is data: "
            f"it cannot allow code or downloads, and nothing was run or downloaded. {_withheld}"
        )
    global _has_granted
    _has_granted |= bool(asked)
    return asked


def has_granted() -> bool:
    """Tell whether this process was asked for something that a checkpoint could not allow."""
    return _has_granted


@contextmanager
def withheld(cure: str = CURE) -> Iterator[None]:
    """Grant nothing to what is built inside, in all threads, and run no code from elsewhere.

    This patches Python's loader of source files, tried with 3.11 and 3.12: an audit hook could not
    be taken away again.

    Args:
        cure: how the messages end.
    """
    global _withheld
    before, run = _withheld, SourceFileLoader.exec_module
    # sys.path as it is now: transformers adds the folder that it copies a model's code to.
    folders = [Path(folder).resolve() for folder in sys.path]
    folders.append(Path(lightning_rl.__file__).resolve().parent)
    _withheld, SourceFileLoader.exec_module = cure, _guarded(run, folders, cure)  # type: ignore[assignment,method-assign]  # the lock
    try:
        yield
    finally:
        _withheld, SourceFileLoader.exec_module = before, run  # type: ignore[method-assign]  # as above


def _guarded(
    run: Callable[[Any, ModuleType], None], folders: Sequence[Path], cure: str
) -> Callable[[Any, ModuleType], None]:
    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        path = Path(loader.path).resolve()
        if not any(map(path.is_relative_to, folders)) and not _is_editable(module.__name__, path):
            raise ConfigurationError(
                f"The configuration in the checkpoint leads to code in {path}, which Python does "
                f"not import by itself; it was not run. {cure}"
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
