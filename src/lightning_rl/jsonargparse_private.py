"""All that is used of jsonargparse beyond its documented interface; no other file imports it.

Tried with jsonargparse 4.53.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from jsonargparse._common import parsing_settings


@contextmanager
def parsing_settings_kept() -> Iterator[None]:
    """Take back what `set_parsing_settings` sets meanwhile, which holds for the whole process."""
    before = dict(parsing_settings)
    try:
        yield
    finally:
        parsing_settings.update(before)
