"""Read YAML as its writer meant it: each key once, and plain numbers where NumPy's are wanted."""

import builtins
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type

from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import read_text
from lightning_rl.system.jsonargparse_private import whole_number
from lightning_rl.system.plain_yaml import check_size, read_yaml

SUFFIXES = (".yaml", ".yml")
"""Of the files that a config may name: `model: ppo_model.yaml`."""


class Refusal(SystemExit):
    """The parser cannot take an option. It is an exit, which no outer parser takes for a try."""


class UsageError(ConfigurationError):
    """What was typed has a name that there is not, or lacks something: exit code 2."""


class DuplicateKey(NamedTuple):
    """A key that stands twice in one mapping: its path, and the lines, from 1."""

    path: str
    first: int
    second: int


class Given:
    """What a user has set: the options typed, and the YAML files that `--config` names.

    Args:
        options: of the command line, `--flag value` and `--flag=value`.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self._values: dict[str, str] = {}
        flag = ""
        for option in options:
            name, separator, value = option.partition("=")
            if name.startswith("-"):
                flag = name.lstrip("-")
                self._values.setdefault(flag, "")
            if separator or not name.startswith("-"):
                self._set(flag, value if name.startswith("-") else option)

    def path_of(self, name: str) -> str | None:
        """Return the path of the setting that has a name, or ends with it, the last one given."""
        found = [path for path in self._values if f".{path}".endswith(f".{name}")]
        return found[-1] if found else None

    def class_at(self, path: str) -> str | None:
        """Return the class that is given at a path, in short or as its import path."""
        keys = (f"{path}.help", f"{path}.class_path", path)
        return next((value for key in keys if (value := self._values.get(key))), None)

    @property
    def words(self) -> set[str]:
        """All words of the values given."""
        return {word for value in self._values.values() for word in re.findall(r"\w+", value)}

    def _set(self, flag: str, value: str) -> None:
        if flag in ("config", "c"):
            text = read_text(value) if os.path.isfile(value) else value
            with suppress(ConfigurationError):
                self._take("", read_yaml(text, value))
        else:
            path = ".".join(part for part in flag.split(".") if part != "init_args")
            self._values.pop(f"{path}.class_path", None)  # what is typed last counts
            self._values[path] = value

    def _take(self, path: str, value: Any) -> None:
        """Take what YAML holds below a path; `init_args` are the class's own."""
        if isinstance(value, dict):
            for name, child in value.items():
                self._take(path if name == "init_args" else f"{path}.{name}".lstrip("."), child)
        else:
            self._values[path] = str(value)


def with_whole_number(message: str, options: Sequence[str]) -> list[str] | None:
    """Return options with a whole number in place of a 1e6 that the parser has refused.

    Args:
        message: of the parser.
        options: of the command line.

    Returns:
        None where the message is about something else.
    """
    value = re.search(r"(?:Got|Given) value: '?([-+.\w]+)'?", message)
    key = re.search(r'Parser key "([^"]+)"', message)
    if value is None or key is None or "<class 'int'>" not in message:
        return None
    name, taken = key[1].rpartition(".")[2], list(options)
    for at, option in enumerate(options):
        flag, separator, inline = option.partition("=")
        place = at if separator else at + 1
        if not flag.startswith("--") or flag.rpartition(".")[2].lstrip("-") != name:
            continue
        given = inline if separator else options[place] if place < len(options) else ""
        whole = whole_number(given)
        if whole is not None and float(given) == float(value[1]):
            taken[place] = f"{flag}={whole}" if separator else str(whole)
    return taken if taken != list(options) else None


def check_options(options: Sequence[str]) -> None:
    """Refuse a key that stands twice in what the user typed, or in the files it names.

    Args:
        options: of the command line: `--flag value`, `--flag=value`; a value may be YAML, or the
            path of a file of it.

    Raises:
        ConfigurationError: naming the key, both lines, and the option or the file.
    """
    flag = ""
    for option in options:
        name, separator, value = option.partition("=")
        if name.startswith("--") or name == "-c":
            flag, value = name, value if separator else ""
        else:
            value = option
        suffixes = (*SUFFIXES, Path(value).suffix) if flag in ("--config", "-c") else SUFFIXES
        _check(value, f"The value of {flag}" if flag else f"'{value}'", Path(), set(), suffixes)


def check_duplicate_keys(text: str, name: str) -> None:
    """Refuse YAML in which a key stands twice: the last one would win, unsaid.

    Args:
        text: of the YAML; what cannot be read as such is left to its reader to refuse.
        name: begins the message, such as `The configuration in FILE`.

    Raises:
        ConfigurationError: naming the key's path and both lines.
    """
    _check_node(_parsed(text, name), name)


def _check(value: str, name: str, folder: Path, seen: set[Path], suffixes: Sequence[str]) -> None:
    """Check a text, or the file that it is the path of, and the files named in it."""
    # os.path, which takes a long text for no file, where pathlib fails.
    paths = [path for path in (folder / value, Path(value)) if os.path.isfile(path)]
    path = next((path for path in paths if path.suffix in suffixes), None)
    if path is None:
        root = _parsed(value, name)
    elif path.resolve() in seen:
        return
    else:
        seen.add(path.resolve())
        name, folder = str(path), path.parent
        root = _parsed(read_text(path), name)
    _check_node(root, name)
    for text in _texts(root):
        if text != value and text.endswith(SUFFIXES):
            _check(text, name, folder, seen, SUFFIXES)


def _parsed(text: str, name: str) -> yaml.Node | None:
    try:
        check_size(text, name)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None  # its reader says so


def _check_node(root: yaml.Node | None, name: str) -> None:
    duplicate = next(_duplicate_keys(root, "", set()), None)
    if duplicate is not None:
        path, first, second = duplicate
        lines = (f"{first} and again in line {second}", f"{first}, twice")[first == second]
        raise ConfigurationError(
            f"{name} has the key '{path}' in line {lines}: only the last one would count. Remove "
            "one of them, or write what stands under both under one."
        )


def _duplicate_keys(node: yaml.Node | None, path: str, seen: set[int]) -> Iterator[DuplicateKey]:
    """Yield the keys that stand twice, in the order of the text."""
    if id(node) in seen:
        return  # an alias; written to that end, they multiply beyond all bounds
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = f"{path}.{key.value}" if path else key.value
            line = key.start_mark.line + 1
            # `<<` may come again: it merges, and overrides nothing.
            if name in lines and key.tag != "tag:yaml.org,2002:merge":
                yield DuplicateKey(name, lines[name], line)
            lines[name] = line
            yield from _duplicate_keys(value, name, seen)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _duplicate_keys(value, f"{path}.{i}" if path else str(i), seen)


def _texts(root: yaml.Node | None) -> Iterator[str]:
    """Yield the values that are plain texts."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.ScalarNode):
            yield node.value
        elif isinstance(node, yaml.CollectionNode) and id(node) not in seen:
            seen.add(id(node))
            is_mapping = isinstance(node, yaml.MappingNode)
            nodes += [value for _, value in node.value] if is_mapping else node.value


def check_classes(settings: Any, path: str = "") -> None:
    """Refuse what jsonargparse lets pass: functions in the place of classes, and nulls.

    It calls a function, `os.system` too, before it refuses the result, and takes null for an
    argument of any type.

    Args:
        settings: that were parsed: a tree of namespaces, lists and plain values.
        path: of them, for the message.

    Raises:
        ConfigurationError: naming the setting, before anything is called.
    """
    if isinstance(settings, list):
        pairs: Any = enumerate(settings)
    elif isinstance(settings, Namespace | dict):
        named = vars(settings) if isinstance(settings, Namespace) else settings
        pairs, name = named.items(), named.get("class_path")
        if isinstance(name, str) and "." in name:
            _check_class(name, path, named.get("init_args"))
    else:
        return
    for key, value in pairs:
        check_classes(value, f"{path}.{key}".lstrip("."))


def _check_class(name: str, path: str, settings: Any) -> None:
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return  # which its reader says
    returns = getattr(found, "__annotations__", {}).get("return")
    returned = returns if isinstance(returns, str) else getattr(returns, "__name__", "None")
    if callable(found) and not isinstance(found, type) and hasattr(builtins, returned):
        raise ConfigurationError(
            f"{path}.class_path is {name}, which is no class, and as a function does not say which "
            "class it returns. It was not called. Name a class, or annotate the function: "
            "def make(...) -> MyEnv."
        )


def take_numpy_numbers() -> None:
    """Let the parser take plain numbers, and lists of them, where a constructor wants NumPy's.

    As Gymnasium's `RescaleAction` does: its arguments are annotated as `np.floating`, `np.integer`
    or `np.ndarray`, which the parser takes for classes that the config has to name. It changes
    jsonargparse for the whole process, which knows nothing of these types otherwise.
    """

    def is_of(value: Any, kind: type) -> bool:
        return isinstance(value, kind)

    register_type(np.floating, _plain, _floating, type_check=is_of)
    register_type(np.integer, int, _integer, type_check=is_of)
    register_type(np.ndarray, _plain, _array, type_check=is_of)


def _floating(value: Any) -> np.floating[Any]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"Expected a number, got {value!r}.")
    return np.float32(value)  # as spaces are, which warn of float64


def _integer(value: Any) -> np.integer[Any]:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Expected a whole number, got {value!r}.")
    return np.int64(value)


def _array(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    array = np.asarray(value)
    if not isinstance(value, list) or array.dtype.kind not in "iuf":
        raise TypeError(f"Expected a list of numbers, got {value!r}.")
    return array.astype(np.float32)


def _plain(value: Any) -> Any:
    """Return a number of NumPy's, or an array, as its shortest digits: 0.1, not 0.10000000149."""
    return [_plain(one) for one in value] if np.ndim(value) else float(str(value))
