"""Recognise checkpoints of this user's own runs, which need no `--trust_code true`.

A checkpoint that names the user's code is signed: an HMAC, with a key of this user, of the text of
its configuration and of the path and content of each file of that code. If a checkpoint comes
from another user, or the code has changed, commands ask as before. The check imports nothing.
"""

import hashlib
import hmac
import json
import os
import secrets
import site
import stat
import sys
import sysconfig
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from lightning_rl.checkpoints.format import CONFIG_KEY, SIGNATURE_KEY, STATE_KEY
from lightning_rl.checkpoints.registry import OURS
from lightning_rl.checkpoints.saved import texts_in
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import TEMPORARY
from lightning_rl.system.plain_yaml import load_yaml

KEY_BYTES = 32
"""Length of a key."""

INSTALLED = (
    *(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")),
    *(*site.getsitepackages(), site.getusersitepackages()),
)
"""Directories of pip and of Python, whose files are known by their paths alone.

Not all of `sysconfig.get_paths()`: after `python -m venv .` one is the directory of the project."""


def signed(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with a signature if it names code of this user, who has a key."""
    config = checkpoint.get(CONFIG_KEY)
    if not isinstance(config, str) or not names_code(config) or (key := _key(make=True)) is None:
        return checkpoint
    if _trusts_a_file(load_yaml(config)):
        return checkpoint  # that code is in no module: a swapped file would not be noticed
    try:
        code = _code_of(config, os.getcwd())
    except OSError:  # a deleted directory, or code that cannot be read, ends no run
        return checkpoint
    for name, (file, _) in code.items():
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and file != os.path.abspath(loaded):
            return checkpoint  # the module was found by other means than `sys.path`
    signature = {"code": code, "hmac": _hmac(key, config, code)}
    return checkpoint | {STATE_KEY: checkpoint[STATE_KEY] | {SIGNATURE_KEY: signature}}


def is_own(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether this user's run wrote the configuration, and its code is still the same."""
    state, config = checkpoint.get(STATE_KEY), checkpoint.get(CONFIG_KEY)
    signature = state.get(SIGNATURE_KEY) if isinstance(state, dict) else None
    key = _key(make=False)
    if key is None or not isinstance(signature, dict) or not isinstance(config, str):
        return False
    code, digest = signature.get("code"), str(signature.get("hmac"))
    try:
        if not hmac.compare_digest(digest.encode(), _hmac(key, config, code).encode()):
            return False
    except (TypeError, ValueError, RecursionError):  # a sent signature may be of any type
        return False
    # The signature proves that `signed` wrote `code`.
    try:
        return all(_entry(name) == entry for name, entry in dict(code or {}).items())
    except OSError:
        return False


@cache
def names_code(config: str) -> bool:
    """Return whether the check of checkpoints refuses a configuration."""
    try:
        checked_config(config, Path())
    except ConfigurationError:
        return True
    return False


def _trusts_a_file(settings: Any) -> bool:
    """Return whether settings allow the code of a model's directory, or of another checkpoint."""
    if isinstance(settings, dict) and settings.get("trust_code"):
        return settings.get("kind") != "class"
    children = settings.values() if isinstance(settings, dict) else settings
    return isinstance(settings, dict | list) and any(map(_trusts_a_file, children))


def _hmac(key: bytes, config: str, code: Any) -> str:
    content = json.dumps([config, code], sort_keys=True).encode()
    return hmac.new(key, content, hashlib.sha256).hexdigest()


@cache  # a run does not import a file again that is edited meanwhile
def _code_of(config: str, directory: str) -> dict[str, list[str | None]]:
    """Return `[file, digest]` of the modules that a configuration names, and of all loaded ones.

    `directory` is the working directory, from which modules are imported.
    """
    modules = {_module_in(text) for _, text in texts_in(load_yaml(config))} - {""}
    code = {name: _entry(name) for name in sorted(modules) if name.partition(".")[0] != OURS}
    for name, module in sorted(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if not isinstance(source, str) or name.partition(".")[0] in (
            "__main__",
            "__mp_main__",
            OURS,
        ):
            continue
        # Modules that Python did not find on `sys.path` are made at run time, by compilers.
        if not _is_installed(source) and (entry := _entry(name))[0] == os.path.abspath(source):
            code[name] = entry
    # An `__init__.py` that is added to a namespace package later would be imported, too.
    above = {name.rpartition(".")[0] for name in code} - {*code, ""}
    return code | {name: _entry(name) for name in sorted(above)}


def _module_in(text: str) -> str:
    module = text.partition(":")[0] if ":" in text else text.rpartition(".")[0]
    return module if all(part.isidentifier() for part in module.split(".")) else ""


def _entry(module: str) -> list[str | None]:
    """Return the file from which a module would be imported, and its digest."""
    # `importlib.util.find_spec` would import the packages above the module.
    path: Any = [*sys.path, os.getcwd()]
    spec, name = None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = None if path is None else PathFinder.find_spec(name, path)
        path = None if spec is None else spec.submodule_search_locations
    if spec is None or not spec.origin or not os.path.isfile(spec.origin):
        return [None, None]
    file = os.path.abspath(spec.origin)
    if _is_installed(file):
        return [file, None]
    with open(file, "rb") as source:
        return [file, hashlib.file_digest(source, "sha256").hexdigest()]


def _is_installed(file: str) -> bool:
    return file.startswith(tuple(f"{place}{os.sep}" for place in INSTALLED))


def _key(make: bool) -> bytes | None:
    """Return the key of this user; None without a home, or if others may read or replace it."""
    try:
        path = Path(os.environ.get("LIGHTNING_RL_KEY") or Path.home() / ".lightning_rl" / "key")
        directory = path.parent
        if make and not path.exists():
            _make_key(path)
        owner, place = os.getuid(), os.lstat(directory)
        if not stat.S_ISDIR(place.st_mode) or place.st_uid != owner or place.st_mode & 0o022:
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            private = status.st_uid == owner and not status.st_mode & 0o077
            key = file.read(KEY_BYTES + 1) if private and stat.S_ISREG(status.st_mode) else b""
        return key if len(key) == KEY_BYTES else None
    except (OSError, RuntimeError, AttributeError):  # no home, no permission, or Windows
        return None


def _make_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was first: its key counts
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
