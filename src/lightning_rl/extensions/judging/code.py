"""Digest the code and the files that settings name, which have no version."""

import hashlib
import os
import re
import site
import sysconfig
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

INSTALLED = tuple(
    f"{place}{os.sep}"
    for place in (
        *(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")),
        *(*site.getsitepackages(), site.getusersitepackages()),
    )
)
"""Directories of Python and of distributions, which have versions."""

MODULE = re.compile(r"(?<![\w./-])([^\W\d]\w*)[.:]\w")
"""The first name of an import path: `package.module.Class`, `module:Name-v0`."""

PATH = re.compile(r"[^\s\"'=,{}\[\]]+")
"""A word of an option, which may be a path."""


def digests_of(options: str, model: str = "") -> dict[str, str]:
    """Return digests of the user's modules that settings name, and of the files in `options`.

    A package counts with all of its modules. What modules import from elsewhere does not count,
    nor what a file includes. Nothing is imported.
    """
    files_by_name = {name: _sources(name) for name in MODULE.findall(f"{options}\n{model}")}
    # A path with blanks is quoted in JSON, or the whole value of an option.
    values = [*re.findall(r'"([^"]+)"', options), *re.findall(r"=(.+)", options)]
    for word in (*PATH.findall(options), *values):
        if os.path.isfile(path := os.path.expanduser(word)):
            files_by_name[word] = [Path(path)]
    return {name: _digest(files) for name, files in sorted(files_by_name.items()) if files}


def _sources(name: str) -> list[Path]:
    spec = None
    with suppress(ValueError):  # `__main__` has none
        spec = find_spec(name)
    if spec is None or name == "lightning_rl":
        return []
    places = [os.path.abspath(p) for p in spec.submodule_search_locations or [str(spec.origin)]]
    user_paths = [Path(place) for place in places if not place.startswith(INSTALLED)]
    files = [[place] if place.is_file() else place.rglob("*.py") for place in user_paths]
    return sorted(file for part in files for file in part)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with suppress(OSError), file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
