"""The only file with internals of jsonargparse (tried with 4.53)."""

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
"""Mode of a parser that reads and writes YAML by `plain_yaml`."""


set_loader(PARSER_MODE, load_yaml, exceptions=(yaml.YAMLError,))
set_dumper(PARSER_MODE, dump_yaml)
register_type(QuotedText, lambda text: text, lambda text: text)


@cache
def parameters_of(made: Any) -> dict[str, ParamData]:
    """Return the parameters of a constructor or function, and those behind `**kwargs`."""
    return {one.name: one for one in get_signature_parameters(made)}


def converted(kind: Any, value: Any, given: str | None = None) -> Any:
    """Convert a plain value to a type without classes, or raise ValueError or TypeError."""
    with parser_context(load_value_mode=PARSER_MODE):
        return adapt_typehints(value, kind, orig_val=given)


@contextmanager
def parsing_settings_kept() -> Iterator[None]:
    """Restore the process-wide settings of `set_parsing_settings`."""
    before = dict(parsing_settings)
    try:
        yield
    finally:
        parsing_settings.update(before)
