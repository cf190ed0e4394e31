"""Editors and mypy know all settings: `kwargs.pyi` says what `**kwargs` of a constructor takes."""

import ast
import inspect
from textwrap import dedent

from scripts.write_kwargs import STUB, constructors, kwargs_of, stub


def settings_in(text):
    """Settings and their types by class, without the form of the text."""
    return {
        cls.name: {ast.unparse(line.target): ast.unparse(line.annotation) for line in cls.body}
        for cls in ast.parse(text).body
        if isinstance(cls, ast.ClassDef)
    }


def test_the_stub_has_the_settings_of_the_constructors():
    """Otherwise: `python scripts/write_kwargs.py`."""
    assert settings_in(STUB.read_text()) == settings_in(stub())


def test_each_public_constructor_names_its_settings():
    for cls in filter(kwargs_of, constructors()):
        (function,) = ast.parse(dedent(inspect.getsource(cls.__init__))).body
        assert ast.unparse(function.args.kwarg.annotation) == f"Unpack[{cls.__name__}Kwargs]"
