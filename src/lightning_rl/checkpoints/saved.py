"""Read the configuration in a checkpoint, and list the settings that it could not hold."""

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from lightning_rl.checkpoints.registry import present_settings
from lightning_rl.system.construction import NOT_WRITTEN, is_unwritten
from lightning_rl.system.errors import require
from lightning_rl.system.plain_yaml import read_yaml

SCRIPT = "__main__."
"""Prefix of the classes of a training script, which another script does not have."""


def settings_of(config: str, path: Path) -> dict[str, Any]:
    """Return the present settings of a checkpoint's configuration; refuse invalid YAML."""
    settings = read_yaml(config, f"The configuration in {path}", "Give one as --config.")
    require(isinstance(settings, dict), f"The configuration in {path} holds no settings.")
    return cast(dict[str, Any], present_settings(settings))


def missing_settings(settings: Any) -> dict[str, str]:
    """Return the settings that could not be written: `{"model.policy": "a lambda"}`."""
    lacks: dict[str, str] = {}
    for path, text in texts_in(settings):
        name = text.removeprefix(SCRIPT)
        if is_unwritten(text):
            reason = text.removeprefix(NOT_WRITTEN)
        # `__main__` is another script now, which may define the class, too.
        elif name != text and not hasattr(sys.modules["__main__"], name):
            reason = f"{name} of the script that was run"
        else:
            continue
        setting = _name(path)
        lacks[setting] = f"{lacks[setting]}, {reason}" if setting in lacks else reason
    return lacks


def written(settings: Any) -> Any:
    """Return settings without those that could not be written."""
    if isinstance(settings, dict):
        return {k: written(v) for k, v in settings.items() if not is_unwritten(v)}
    if isinstance(settings, list):
        return [written(entry) for entry in settings if not is_unwritten(entry)]
    return settings


def describe_missing(lacks: Mapping[str, str]) -> str:
    """Return the missing settings in one line: `model.policy (an object of Mine)`."""
    words = ", ".join(f"{name} ({textwrap.shorten(reason, 100)})" for name, reason in lacks.items())
    return re.sub("[^ -~]", "?", words)  # remove control characters of a terminal


def _name(path: str) -> str:
    left_out = ("init_args", "class_path")
    names = [name for name in path.split(".") if name not in left_out and not name.isdecimal()]
    return re.sub("[^ -~]", "?", ".".join(names))


def texts_in(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each text in a tree of settings."""
    if isinstance(tree, str):
        yield path, tree
    elif isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, child in pairs:
            yield from texts_in(child, f"{path}.{key}" if path else str(key))
