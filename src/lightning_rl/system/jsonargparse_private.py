"""The only file with internals of jsonargparse (tried with 4.53)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from inspect import Parameter
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
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
register_type(PurePath, str, PurePath)
register_type(torch.device, str, torch.device)


@cache
def parameters_of(constructor: Any) -> dict[str, ParamData]:
    """Return the parameters of a constructor or function, and those behind `**kwargs`."""
    return {param.name: param for param in get_signature_parameters(constructor)}


def kind_of(target: Any, name: str) -> Any:
    """Return the annotation of a parameter, or that of the same parameter of a base class."""
    for constructor in getattr(target, "__mro__", (target,)):
        parameter = parameters_of(constructor).get(name)
        if parameter is not None and parameter.annotation is not Parameter.empty:
            return parameter.annotation
    return Any


def converted(kind: Any, value: Any, text: str | None = None) -> Any:
    """Convert a plain value to a type without classes, or raise ValueError or TypeError."""
    # The parser's own YAML, in which `1e6` is a number and a date a text.
    with parser_context(load_value_mode=PARSER_MODE):
        return adapt_typehints(value, kind, orig_val=text)


@contextmanager
def parsing_settings_kept() -> Iterator[None]:
    """Restore the process-wide settings of `set_parsing_settings`."""
    saved = dict(parsing_settings)
    try:
        yield
    finally:
        parsing_settings.update(saved)


def accept_plain_numpy_numbers() -> None:
    """Let NumPy types accept plain numbers and lists, in the whole process (`RescaleAction`)."""
    # float32 like the spaces, which warn about float64
    for kind, dtype, inputs in (
        (np.floating, np.float32, (int, float)),
        (np.integer, np.int64, (int,)),
        (np.ndarray, np.float32, (list,)),
    ):
        read = partial(_numpy, dtype=dtype, inputs=inputs)
        register_type(kind, _plain, read, type_check=lambda value, of: isinstance(value, of))


def _numpy(value: Any, dtype: Any, inputs: tuple[type, ...]) -> Any:
    is_number = np.asarray(value).dtype.kind in "iuf"
    if type(value) not in inputs or not is_number:
        raise TypeError(f"Expected a {inputs[-1]}. Got value: {value!r}")
    array = np.asarray(value, dtype)
    # A scalar, not an array of no dimensions.
    return array if isinstance(value, list) else array[()]


def _plain(value: Any) -> Any:
    """Convert NumPy numbers to plain numbers with few digits: 0.1, not 0.10000000149."""
    if isinstance(value, np.integer):
        return int(value)
    return [_plain(entry) for entry in value] if np.ndim(value) else float(str(value))
