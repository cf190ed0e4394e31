"""Settings behind `**kwargs` of constructors, for editors and mypy: see the stub next to this file.

When a program runs, they are `Any`: the parser of settings finds those of the base class itself.
"""

from typing import Any


class Unpack:
    """`typing.Unpack` for type checkers; `Any` when a program runs."""

    def __class_getitem__(cls, settings: Any) -> Any:
        return Any


def __getattr__(name: str) -> Any:
    if name.endswith("Kwargs"):
        return Any
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
