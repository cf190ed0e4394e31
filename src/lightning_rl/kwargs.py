"""Settings behind `**kwargs`, for mypy and editors (see the stub); any when a program runs."""

from typing import Any
from typing import Union as Unpack  # `Union[Any]` is Any: the parser finds settings by itself

__all__ = ["Unpack"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # the import system asks for `__path__`
        raise AttributeError(name)
    return Any
