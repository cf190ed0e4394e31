"""Check the names on a command line before torch is imported, which takes seconds.

The check knows the shipped classes and their settings from a table (`names_table.py`), which is
made when the package has changed. It reports wrong names of shipped classes and settings, and texts
in the place of numbers; other values and the user's own classes are left to `checking.py`, and
nothing that it accepts is refused.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

from lightning_rl.cli.config_files import find_config, shipped_configs
from lightning_rl.cli.names import (
    counterpart,
    known_classes,
    of_another_kind,
    unknown_class,
    unknown_setting,
)
from lightning_rl.cli.names_table import Table, current_table
from lightning_rl.cli.parsing import (
    FILLED_IN,
    OF_THE_CLASS,
    TurnedOn,
    UsageError,
    asks_for_help,
    can_name_a_class,
    check_names,
    merge_options,
    normalize_options,
    read_settings,
    value_of,
)
from lightning_rl.system.errors import closest
from lightning_rl.system.extensions import SUBCOMMANDS
from lightning_rl.system.output import tell
from lightning_rl.system.plain_yaml import load_yaml
from lightning_rl.system.saved_runs import find_checkpoint
from lightning_rl.system.texts import is_import_path, is_settings_file

CORE = ("fit", "validate", "test", "check", "play")
"""Subcommands that make a run: their options are settings."""

TRAINS = ("fit", "check")
"""Subcommands that take the settings of a training run."""

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(?:[.:][A-Za-z_]\w*)+")


def first_check(arguments: Sequence[str]) -> None:
    """Refuse unknown subcommands, files, checkpoints, shipped classes and their settings.

    Raises:
        UsageError: for a name that does not exist.
        ConfigurationError: for a file that cannot be read, or a missing checkpoint.
    """
    subcommand, options = arguments[0], list(arguments[1:])
    is_own = is_import_path(subcommand) and not is_settings_file(subcommand)
    is_own = is_own and not counterpart(subcommand, "commands")  # `train.py` of another library
    if subcommand not in (*CORE, *SUBCOMMANDS) and not is_own:
        raise UsageError(unknown_subcommand(subcommand))
    if asks_for_help(options):
        return
    table = current_table()
    allowed = table.options.get(subcommand) if table else None
    if subcommand not in CORE:
        if allowed:
            check_names(subcommand, options, allowed)
        return
    options = resolved_options(subcommand, options, allowed or {})
    tree = merge_options(options)
    # Without a table, `checking.py` reports wrong names later.
    if table and allowed:
        _NameCheck(table, tree).options(tree, allowed)
    checkpoint = tree.get("ckpt_path")
    if isinstance(checkpoint, str) and can_name_a_class(checkpoint):
        # A config's name is the name of its run, see `complete`.
        config = value_of("--config", options)
        stem = Path(config).stem if config and "model" in tree else None
        folder, exp_name = tree.get("output_dir", "outputs"), tree.get("exp_name", stem)
        find_checkpoint(checkpoint, folder, exp_name)


def resolved_options(
    subcommand: str, options: Sequence[str], allowed: Mapping[str, Any]
) -> list[str]:
    """Return normalised options with the paths of configs; refuse a run without any settings.

    `allowed` are the options of the subcommand; empty if they are not known.
    """
    try:
        resolved = [_resolved(option) for option in normalize_options(options)]
    except UsageError:
        # `--headless` without a value is a wrong name above all.
        if allowed:
            check_names(subcommand, options, allowed)
        raise
    checkpoint, config = value_of("--ckpt_path", resolved), value_of("--config", resolved)
    requirement = ""
    if checkpoint is None and subcommand not in TRAINS:
        requirement = "a trained policy: give --ckpt_path FILE, a run directory, last or best"
    # The chain of `is` compares all three with None.
    elif checkpoint is config is value_of("--model", resolved) is None:
        requirement = "a config or a checkpoint: --config FILE, or --ckpt_path last. Shipped: "
        requirement += ", ".join(shipped_configs())
    if requirement:
        merge_options(resolved)  # settings of another library, or a file that cannot be read
        if allowed:
            check_names(subcommand, resolved, allowed)
        raise UsageError(f"{subcommand} needs {requirement}.")
    return resolved


def end_with(error: BaseException, advice: str = "") -> NoReturn:
    """Print the message of a user's error, and exit with status 2 for a name, or else 1."""
    tell(f"rl-cli: error: {error}{advice}", sys.stderr)
    sys.exit(2 if isinstance(error, UsageError) else 1)


def unknown_subcommand(name: str) -> str:
    """Return a message that lists the subcommands, with the likeliest one."""
    subcommands = (*CORE, *SUBCOMMANDS)
    cure = closest(name, subcommands) or counterpart(name, "commands")
    if name.startswith("-") or is_settings_file(name):
        cure = (
            f"; to train, write rl-cli fit {'' if name.startswith('-') else '--config '}{name} ..."
        )
    return f"unknown subcommand '{name}'{cure}; choose from {', '.join(subcommands)}."


def _resolved(option: str) -> str:
    flag, _, value = option.partition("=")
    if flag in ("-c", "--config"):
        return f"--config={find_config(value)}"
    if flag == "--video" or flag.startswith("--video."):
        return f"--trainer.{flag[2:]}={value or 'true'}"
    return option


def _is_text(value: str) -> bool:
    """Return whether YAML and Python read a text as no number, true, false or null."""
    try:
        float(value)
    except ValueError:
        # A parser may replace `$NAME`.
        return (
            re.fullmatch(r"[A-Za-z][\w .-]*", value) is not None and load_yaml(str(value)) == value
        )
    return False


class _NameCheck:
    """Compares a tree of settings with the table of names."""

    def __init__(self, table: Table, tree: Mapping[str, Any]) -> None:
        self.table = table
        # The user's module may define, or import, further classes with bare names.
        self.has_own_code = any(map(self._is_own, IMPORT_PATH.findall(json.dumps(tree))))

    def options(self, tree: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
        for name, value in tree.items():
            if name not in allowed:
                places = self.table.places()
                raise UsageError(unknown_setting(name, value, "", "", allowed, places))
            self.at(allowed[name], value, name)

    def at(self, slot: Any, value: Any, path: str) -> None:
        """Check a value; `slot` describes the classes that its setting takes."""
        # `--video true` names no class.
        if slot is None or isinstance(value, TurnedOn):
            return
        if "values" in slot:
            if isinstance(value, str) and value not in slot["choices"] and _is_text(value):
                shown = value if slot["values"].startswith("one of") else f"'{shorten(value, 200)}'"
                raise UsageError(f"{path} must be {slot['values']}, got {shown}.")
            return
        if isinstance(value, str) and is_settings_file(value) and os.path.isfile(value):
            value = read_settings(value, path)
        if isinstance(value, list):
            for entry in value:
                self.at(slot, entry, path)
        elif slot["mapping"] and isinstance(value, dict) and "class_path" not in value:
            for name, entry in value.items():
                self.at(slot, entry, f"{path}.{name}")
        elif "group" not in slot:
            self._class(slot, value, path)
        elif isinstance(value, dict):
            self._settings(slot["group"], list(self.table.classes[slot["group"]]), value, path)

    def _class(self, slot: Any, value: Any, path: str) -> None:
        name = value.get("class_path") if isinstance(value, dict) else value
        if not isinstance(name, str) or not can_name_a_class(name):
            return
        family = self.table.families[slot["family"]]
        package, _, bare_name = name.rpartition(".")
        if bare_name not in family["classes"]:
            # An import path, a plain text or the user's code may stand for another class.
            if not (package or slot["text"] or self.has_own_code):
                raise UsageError(self._unknown_class(name, slot["family"], path))
            return
        cls = family["classes"][bare_name]
        # The table has no settings of classes that are not shipped.
        if cls and not self._is_own(name) and isinstance(value, dict):
            settings, (leading, keywords) = list(self.table.classes[cls]), slot["filled_in"]
            filled_in = (*FILLED_IN, *settings[:leading], *keywords)
            self._settings(cls, [name for name in settings if name not in filled_in], value, path)

    def _settings(
        self, cls: str, settable: Sequence[str], value: Mapping[str, Any], path: str
    ) -> None:
        for name, setting in value.items():
            if name in settable:
                self.at(self.table.classes[cls][name], setting, f"{path}.{name}")
            elif name not in OF_THE_CLASS:
                owner, places = cls.rpartition(".")[2], self.table.places()
                raise UsageError(unknown_setting(name, setting, path, owner, settable, places))

    def _is_own(self, name: str) -> bool:
        """Return whether an import path leads to code that the table does not describe."""
        package = re.split("[.:]", name)[0]
        return package != name and package not in self.table.packages

    def _unknown_class(self, name: str, family: str, path: str) -> str:
        names = self.table.families[family]["offered"]
        if any(name in kind["classes"] for kind in self.table.families.values()):
            return f"{of_another_kind(name, family, path)}{known_classes(names)}."
        return unknown_class(name, path, names)
