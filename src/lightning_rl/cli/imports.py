"""Restrict the parser's imports to names allowed in checkpoints and names that the user typed."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jsonargparse import set_parsing_settings

from lightning_rl.checkpoints.registry import PACKAGES
from lightning_rl.system.jsonargparse_private import parsing_settings_kept

FOR_THE_TYPIST = tuple(
    f"lightning.pytorch.{part}" for part in ("callbacks", "loggers", "profilers")
)
"""Packages whose classes only the user may name, also in short: `--trainer.logger CSVLogger`."""


def find_code_here() -> None:
    """Add the working directory to `sys.path`, for `class_path: my_module.MyAlgorithm`."""
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)


@contextmanager
def only_allowed_imports(typed: Sequence[str]) -> Iterator[None]:
    """Restrict the parser to packages of checkpoints and modules that the user typed."""
    packages = {*PACKAGES, *FOR_THE_TYPIST}
    libraries = {package.split(".")[0] for package in packages}
    foreign = set()
    for name in _import_paths(typed):
        root = name.split(".")[0]
        if root in libraries:
            # Its other modules have classes that write files.
            packages.add(name.rpartition(".")[0])
        elif root not in {*sys.stdlib_module_names, "jsonargparse"}:
            foreign.add(root)
    if foreign:
        find_code_here()
    # The settings hold for the process: a second command must not inherit them.
    with parsing_settings_kept():
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=sorted(packages | foreign),
            instantiate_subclass_spec_in_any=False,
        )
        yield


IMPORTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+(:\w+)?|[^\W\d][\w.]*:[^\W\d][\w./-]*")
"""`package.name`, or `module:Name-v0`."""


def _import_paths(typed: Sequence[str]) -> Iterator[str]:
    """Yield the import paths in typed options: `--model=a.B`, `c:Env-v0`, `[d.E, e.F]`."""
    for option in typed:
        value = option.partition("=")[2] if option.startswith("--") else option
        for word in re.split(r"[\s,\[\]{}'\"]+", value):
            if IMPORTED.fullmatch(word) and not word.endswith((".ckpt", ".yaml")):
                yield word.split(":")[0]
