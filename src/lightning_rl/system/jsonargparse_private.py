"""All that is used of jsonargparse beyond its documented interface; no other file imports it.

Tried with jsonargparse 4.53.
"""

import locale
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import yaml
from jsonargparse import set_dumper, set_loader
from jsonargparse._common import parsing_settings
from jsonargparse._loaders_dumpers import get_yaml_default_loader, yaml_load
from jsonargparse._parameter_resolvers import ParamData as ParamData
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse.typing import register_type

from lightning_rl.system.plain_yaml import QuotedText, dump_yaml

PARSER_MODE = "lightning_rl"
"""The mode of a parser that reads YAML by `load_config`."""

FREE = ("env_kwargs", "model_config", "config", "lora", "dict_kwargs")
"""Keys of mappings that are handed on as they are: nothing in them is read as another type."""

WHOLE = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]+)?[eE][-+]?[0-9]+")
"""How a number is written that may be whole: 1e6."""


def parameters_of(made: Any) -> dict[str, ParamData]:
    """Return the parameters of a constructor or a function, and of those behind its `**kwargs`."""
    return {one.name: one for one in get_signature_parameters(made)}


def take_yaml() -> None:
    """Let parsers with `PARSER_MODE` read and write YAML as its writer meant it."""
    set_loader(PARSER_MODE, load_config, exceptions=(yaml.YAMLError,))
    set_dumper(PARSER_MODE, dump_yaml)
    register_type(QuotedText, _same, _same)


def _same(text: str) -> str:
    return text


def load_config(text: str) -> Any:
    """Return what YAML holds: texts in quotes stay texts, and 1e6 is a whole number.

    The parser reads files in the encoding of the locale; YAML is UTF-8.
    """
    encoding = locale.getpreferredencoding(False)
    if not text.isascii() and encoding.lower().replace("-", "") != "utf8":
        with suppress(UnicodeError):
            text = text.encode(encoding).decode("utf-8")
    value = yaml_load(text)
    if isinstance(value, str):
        return value if value.strip() == text.strip() else QuotedText(value)
    if not isinstance(value, dict | list):
        return value
    loader = _loader()(text)
    try:
        node = loader.get_single_node()
        _keep_texts(node)
        if isinstance(value, dict) and "data" in value:  # a configuration, not a part of one
            _make_whole(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def whole_number(text: str) -> int | None:
    """Return the whole number that a text such as 1e6 stands for; None for others."""
    if WHOLE.fullmatch(text) and (number := float(text.replace("_", ""))).is_integer():
        return int(number)
    return None


_TEXT = "!quoted"


def _loader() -> Any:
    class Loader(get_yaml_default_loader()):  # type: ignore[misc]  # a class made by a function
        """Makes a `QuotedText` of the nodes that `_keep_texts` has marked."""

    Loader.add_constructor(_TEXT, lambda loader, node: QuotedText(node.value))
    return Loader


def _nodes(
    node: yaml.Node, seen: set[int], free: tuple[str, ...] = ()
) -> Iterator[yaml.ScalarNode]:
    """Yield the scalar values below a node, but those below keys that are free."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            if key.value not in free:
                yield from _nodes(child, seen, free)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _nodes(child, seen, free)


def _keep_texts(root: yaml.Node) -> None:
    for node in _nodes(root, set()):
        if node.style is None or node.tag != "tag:yaml.org,2002:str":
            continue
        with suppress(yaml.YAMLError):
            if node.value.strip() and yaml_load(node.value) == node.value:
                continue
        node.tag = _TEXT


def _make_whole(root: yaml.Node) -> None:
    for node in _nodes(root, set(), FREE):
        whole = whole_number(node.value) if node.tag == "tag:yaml.org,2002:float" else None
        if whole is not None:
            node.tag, node.value = "tag:yaml.org,2002:int", str(whole)


@contextmanager
def parsing_settings_kept() -> Iterator[None]:
    """Take back what `set_parsing_settings` sets meanwhile, which holds for the whole process."""
    before = dict(parsing_settings)
    try:
        yield
    finally:
        parsing_settings.update(before)
