"""Merge the user's settings, from files and the command line, into one tree of plain values."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.checkpoints.registry import present_settings
from lightning_rl.cli.names import counterpart, foreign_config, section_here, setting_here
from lightning_rl.system.errors import ConfigurationError, closest
from lightning_rl.system.files import read_text
from lightning_rl.system.plain_yaml import read_yaml
from lightning_rl.system.texts import is_settings_file

FREE = ("env_kwargs", "model_config", "config", "lora")
"""Mappings that are passed on unchanged: classes in them are not looked up."""

BEFORE = "settings before"
"""Key of a class that another class has replaced, with its settings."""

FILLED_IN = ("observation_space", "action_space")
"""Parameters that the env sets."""

OF_THE_CLASS = ("class_path", "dict_kwargs", BEFORE)
"""Keys next to the settings of a class."""

ALONE = ("--help", "-h", "--print_config", "--video")
"""Options without a value. Options that end with `.help` may have no value, too."""


class UsageError(ConfigurationError):
    """The command has an unknown name, or something is missing: exit code 2."""


class Typed(str):
    """A value from the command line, parsed by the setting's type."""


class TurnedOn(dict[str, Any]):
    """Settings that were turned on by `true`, as in `--video true`; checked by the type."""


class NamedLater(dict[str, Any]):
    """Settings, and the text after them as `class_path`; the type tells if it names their class."""


def asks_for_help(options: Sequence[str]) -> bool:
    """Return whether options ask for help: `--help`, `--model.help [NAME]`."""
    flags = [option.partition("=")[0] for option in options]
    return any(
        flag in ("-h", "--help") or (flag.startswith("--") and flag.endswith(".help"))
        for flag in flags
    )


def merge_options(options: Sequence[str]) -> dict[str, Any]:
    """Merge options, and the files of `--config`, into one tree; later settings win.

    The settings of a class stand next to its `class_path`, also those that come before it. If
    another class replaces it, the old class and its settings move to `BEFORE`, from which the new
    class takes the settings that it also has.
    """
    tree: dict[str, Any] = {}
    for option in normalize_options(options):
        flag, _, value = option.partition("=")
        path = flag.lstrip("-").removesuffix(".help")
        if path in ("config", "c"):
            _put(tree, [], _of_config(value))
        # `--model.help PPO` names a class, whose settings the help page describes.
        elif path == "print_config" or (flag.endswith("help") and not value):
            continue
        else:
            path = path.removesuffix(".class_path")
            # Mappings and lists are YAML; the type of a setting parses other texts.
            if value.startswith(("{", "[")):
                content = present_settings(read_yaml(value, f"The value of {flag}"))
                _put(tree, path.split("."), settings_in(content, path))
            else:
                name = present_settings(value, path.rpartition(".")[2])  # of a class
                _put(tree, path.split("."), Typed(name))
    if message := foreign_config(tree):
        raise UsageError(message)
    return tree


def settings_in(content: Any, path: str, name: str = "", folder: Path | None = None) -> Any:
    """Normalise YAML: class settings next to their `class_path`, absolute paths of files."""
    place = f" in {name}" if name else ""
    if isinstance(content, list):
        return [settings_in(entry, f"{path}.{i}", name, folder) for i, entry in enumerate(content)]
    if isinstance(content, str) and folder and is_settings_file(content):
        return str(folder / content) if os.path.isfile(folder / content) else content
    if not isinstance(content, dict):
        return content
    name_of_class, init_args = content.get("class_path", ""), content.get("init_args", {})
    if not isinstance(name_of_class, str):
        raise UsageError(
            f"{path}.class_path{place} must be the name of a class, got {name_of_class!r}."
        )
    if not isinstance(init_args, dict):
        raise UsageError(
            f"{path}.init_args{place} must be a mapping of settings, got {init_args!r}."
        )
    if {"class_path", "init_args"} & init_args.keys():
        raise UsageError(
            f"{path}.init_args{place} has class_path or init_args, which name a class one level "
            f"higher: {{class_path: ..., init_args: {{...}}}}."
        )
    stray = [key for key in content if key not in ("class_path", "init_args", "dict_kwargs")]
    if "class_path" in content and stray:
        raise UsageError(
            f"{path}{place} has {', '.join(map(str, stray))} next to class_path: settings of a "
            f"class belong below init_args: {{class_path: ..., init_args: {{{stray[0]}: ...}}}}."
        )
    if "init_args" in content and not stray:
        content = {key: value for key, value in content.items() if key != "init_args"} | init_args
    for key in content:
        if key == "" or not isinstance(key, str):
            raise UsageError(
                f"{path}{place} has the key {key!r}: keys must be texts, the names of settings."
            )
    # The mappings of `FREE` belong to other libraries.
    return {
        key: value if key in FREE else settings_in(value, f"{path}.{key}".lstrip("."), name, folder)
        for key, value in content.items()
    }


def read_settings(file: str, path: str = "") -> Any:
    """Read settings from a YAML file; see `settings_in`."""
    return settings_in(read_config(file), path, file, Path(file).parent)


def read_config(file: str | Path) -> Any:
    """Read a YAML file of any version; its classes get their present names."""
    return present_settings(read_yaml(read_text(file), str(file)))


def _of_config(value: str) -> dict[str, Any]:
    is_file = os.path.isfile(value)
    name = value if is_file else "The value of --config"
    settings = read_settings(value) if is_file else settings_in(read_yaml(value, name), "")
    if not isinstance(settings, dict):
        raise ConfigurationError(
            f"{name} holds no settings; expected sections such as model: and data:."
        )
    return settings


def normalize_options(options: Sequence[str]) -> list[str]:
    """Return each option as `--flag=value`; options without a value stay unchanged."""
    arguments: list[str] = []
    flag = ""
    # The added `--` closes the last option.
    for option in [*options, "--"]:
        # `-5` is a value.
        is_flag = re.match("--|-[a-z]", option) is not None
        if is_flag and flag:
            if flag not in ALONE and not flag.endswith(".help"):
                raise UsageError(f"{flag} needs a value.")
            arguments.append(flag)
        if is_flag and "=" in option:
            arguments.append(option)
            flag = ""
        elif is_flag:
            flag = option
        elif flag:
            arguments.append(f"{flag}={option}")
            flag = ""
        else:
            raise no_option(option)
    return arguments


def value_of(flag: str, options: Sequence[str]) -> str | None:
    """Return the last value of `--flag value` or `--flag=value`."""
    value = None
    for option, next_option in zip(options, [*options, None][1:], strict=True):
        if option == flag:
            value = next_option
        elif option.startswith(f"{flag}="):
            value = option.split("=", 1)[1]
    return value


def no_option(text: str) -> UsageError:
    """Return the error about a text that belongs to no option."""
    cure = f"an option is --name value{counterpart(text.partition('=')[0])}"
    if is_settings_file(text):
        cure = f"write --config {text}"
    # A directory may be a run directory.
    elif text.endswith(".ckpt") or os.path.isdir(text):
        cure = f"write --ckpt_path {text}"
    return UsageError(f"'{text}' belongs to no option: {cure}.")


def check_names(subcommand: str, options: Sequence[str], names: Mapping[str, Any]) -> None:
    """Refuse unknown options, with close matches."""
    for option in options:
        flag, _, value = option.partition("=")
        name = flag[2:].rstrip("+")
        if not option.startswith("--") or name == "help":
            continue
        if not any(f"{name}.".startswith(f"{option_name}.") for option_name in names):
            cure = setting_here(f"{subcommand}.{name}", value) or section_here(name)
            raise UsageError(
                f"{subcommand} has no option --{name}{cure or closest(name, names)}. "
                f"rl-cli {subcommand} --help lists them."
            )


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value at a path; a path through a list leads to its last entry."""
    parts = [part for part in path if part != "init_args"]
    if not parts:
        for name, setting in value.items():
            tree[name] = override(tree.get(name), setting)
        return
    name, *inner = parts
    # `--trainer.callbacks+ NAME` adds an entry.
    if not inner and name.endswith("+"):
        name = name.removesuffix("+")
        entries = tree.get(name)
        entries = entries if isinstance(entries, list) else [] if entries is None else [entries]
        tree[name] = entries + (value if isinstance(value, list) else [value])
    elif not inner:
        tree[name] = override(tree.get(name), value)
    else:
        holder = tree.get(name)
        if isinstance(holder, list) and holder:
            tree, name, holder = holder, -1, holder[-1]  # type: ignore[assignment]  # an index of a list
        # A class of which only the name is set so far.
        if can_name_a_class(holder):
            holder = {"class_path": str(holder)}
        tree[name] = holder if isinstance(holder, dict) else {}
        _put(tree[name], inner, value)


def override(previous: Any, value: Any) -> Any:
    """Return the result of setting `value` after `previous`."""
    if can_name_a_class(previous) and isinstance(value, dict):
        previous = {"class_path": str(previous)}
    if not isinstance(previous, dict):
        return value
    if str(value).lower() == "true" and "class_path" not in previous:
        return TurnedOn(previous)
    if isinstance(value, str) and is_settings_file(value) and os.path.isfile(value):
        value = read_settings(str(value))
    if can_name_a_class(value):
        if "class_path" not in previous:
            return NamedLater(previous | {"class_path": value})
        value = {"class_path": str(value)}
    if not isinstance(value, dict):
        return value
    old = str(previous.get("class_path", ""))
    new = str(value.get("class_path", old))
    # A class takes the settings before its name, and keeps its settings if its name is only written
    # in another form.
    if old and old.rpartition(".")[2] != new.rpartition(".")[2]:
        return value | {BEFORE: previous}
    merged = {name: override(previous.get(name), entry) for name, entry in value.items()}
    return previous | merged


def can_name_a_class(value: Any) -> bool:
    """Return whether a text can be the name of a class."""
    return isinstance(value, str) and value.lower() not in ("", "null", "true", "false")
