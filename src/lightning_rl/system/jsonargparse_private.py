"""All that is used of jsonargparse beyond its documented interface; no other file imports it.

Tried with jsonargparse 4.53.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import yaml
from jsonargparse import set_dumper, set_loader
from jsonargparse._common import ImportDenied as ImportDenied
from jsonargparse._common import parser_context, parsing_settings
from jsonargparse._parameter_resolvers import ParamData as ParamData
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse._typehints import adapt_typehints
from jsonargparse._util import import_object as import_object
from jsonargparse.typing import register_type

from lightning_rl.system.plain_yaml import QuotedText, dump_yaml, load_yaml

PARSER_MODE = "lightning_rl"
"""The mode of a parser that reads and writes YAML as `plain_yaml` does."""


set_loader(PARSER_MODE, load_yaml, exceptions=(yaml.YAMLError,))
set_dumper(PARSER_MODE, dump_yaml)
register_type(QuotedText, lambda text: text, lambda text: text)


@cache
def parameters_of(made: Any) -> dict[str, ParamData]:
    """Return the parameters of a constructor or a function, and of those behind its `**kwargs`."""
    return {one.name: one for one in get_signature_parameters(made)}


def converted(kind: Any, value: Any, given: str | None = None) -> Any:
    """Return a value as the parser has it for a type, of which no part is a class.

    Args:
        kind: the type.
        value: plain.
        given: the text that the value was read from, if it was one.

    Raises:
        ValueError: where it is of another type; TypeError, too.
    """
    with parser_context(load_value_mode=PARSER_MODE):
        return adapt_typehints(value, kind, orig_val=given)


@contextmanager
def parsing_settings_kept() -> Iterator[None]:
    """Take back what `set_parsing_settings` sets meanwhile, which holds for the whole process."""
    before = dict(parsing_settings)
    try:
        yield
    finally:
        parsing_settings.update(before)
