"""Read and write YAML of plain values, three times as fast if PyYAML has libyaml."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import yaml

from lightning_rl.system.errors import ConfigurationError, reason_of

_FLOAT = "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")

_FLOAT_OF_JSON = "tag:yaml.org,2002:float", re.compile(r"(-?Infinity|NaN)$")
"""Values that `json.dumps` writes, which passes settings on as options of a command line."""

# 1e6 is a number, and a date is a text. A separate class, because the process shares PyYAML's.
_Loader: Any = type("_Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
_Loader.add_implicit_resolver(*_FLOAT, list("-+0123456789"))
_Loader.add_implicit_resolver(*_FLOAT_OF_JSON, list("-IN"))
for _first, _tags in _Loader.yaml_implicit_resolvers.items():
    _kept = [pair for pair in _tags if not pair[0].endswith(":timestamp")]
    _Loader.yaml_implicit_resolvers[_first] = _kept

MOST_VALUES = 10_000
"""Most values of a configuration; the values of an alias count each time."""

MOST_DEPTH = 100
"""Most levels of a configuration. PyYAML recurses for each level, and libyaml would crash."""

LONGEST_TEXT = 10_000
"""Most characters of a value, because `1:59:59...` is parsed in quadratic time."""


class QuotedText(str):
    """A text that jsonargparse leaves unchanged instead of parsing it as YAML."""


# A separate class, because the process shares PyYAML's. It quotes texts that some YAML parsers read
# as numbers, such as `1e3`.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})
_Dumper.add_representer(QuotedText, lambda dumper, text: dumper.represent_str(str(text)))
_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))
_Dumper.add_implicit_resolver(*_FLOAT, None)
_Dumper.add_implicit_resolver(*_FLOAT_OF_JSON, None)


def dump_yaml(content: object) -> str:
    """Dump like `yaml.safe_dump`, with unsorted keys."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False)
    return text


def load_yaml(text: str) -> Any:
    """Load a text like `yaml.safe_load`; each error is a `yaml.YAMLError`."""
    if "&" in text and (reason := _too_large(text)) is not None:
        raise yaml.YAMLError(f"it holds {reason}")
    try:
        return yaml.load(text, Loader=_Loader)
    # PyYAML raises many types: for `2024-99-99` a ValueError, for `!!bool x` a KeyError.
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise yaml.YAMLError(reason_of(error)) from error


def read_yaml(text: str, name: str, cure: str = "Correct it.") -> Any:
    """Load a text of any origin, like `yaml.safe_load`; refuse duplicate keys and huge texts.

    `name` begins the messages, such as `The configuration in FILE`; `cure` ends them.
    """
    try:
        check_size(text, name, cure)
        check_keys(text, name)
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{name} is not valid YAML: {reason_of(error)}. {cure}") from error


def check_size(text: str, name: str, cure: str = "Correct it.") -> None:
    """Raise an error for YAML that is invalid, or larger than any configuration."""
    if (reason := _too_large(text)) is not None:
        raise ConfigurationError(
            f"{name} holds {reason}, which is too large for a configuration. {cure}"
        )


def check_keys(text: str, name: str) -> None:
    """Raise an error for YAML that is invalid, or has a key twice."""
    for path, first, second in _duplicate_keys(yaml.compose(text, Loader=_Loader), "", set()):
        lines = (f"{first} and again in line {second}", f"{first}, twice")[first == second]
        raise ConfigurationError(
            f"{name} has the key '{path}' in line {lines}. Remove one of them, or merge both."
        )


def _duplicate_keys(
    node: yaml.Node | None, path: str, visited: set[int]
) -> Iterator[tuple[str, int, int]]:
    if id(node) in visited:
        return  # an alias, which may multiply without bounds
    visited.add(id(node))
    lines: dict[str, int] = {}
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    for key, value in pairs:
        if isinstance(key, yaml.ScalarNode):
            name, line = f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1
            # `<<` may repeat: it merges, and overrides no key.
            if name in lines and key.tag != "tag:yaml.org,2002:merge":
                yield name, lines[name], line
            lines[name] = line
            yield from _duplicate_keys(value, name, visited)
    children = node.value if isinstance(node, yaml.SequenceNode) else ()
    for i, child in enumerate(children):
        yield from _duplicate_keys(child, f"{path}.{i}".lstrip("."), visited)


def _too_large(text: str) -> str | None:
    """Return the bound that a YAML text exceeds, or None, before building any object."""
    sizes: dict[str, int] = {}  # values below each anchor that is closed
    opened: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, start = opened.pop()
            if anchor is not None:
                sizes[anchor] = count - start
        elif isinstance(event, yaml.AliasEvent):
            holds_itself = any(anchor == event.anchor for anchor, _ in opened)
            count += MOST_VALUES + 1 if holds_itself else sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if len(event.value) > LONGEST_TEXT:
                return f"a value of more than {LONGEST_TEXT:,} characters"
        if count > MOST_VALUES:
            return f"more than {MOST_VALUES:,} values, or itself"
        if len(opened) > MOST_DEPTH:
            return f"more than {MOST_DEPTH} levels"
    return None
