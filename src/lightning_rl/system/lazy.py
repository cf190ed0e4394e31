"""Import public names on first use, from the modules that a stub (.pyi) next to a file names."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def modules_of_names(file: str) -> dict[str, str]:
    """Return the module of each name that the stub next to a Python file re-exports."""
    # The stub serves editors and mypy, too: the names stand in one place.
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.name: str(statement.module)
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def lazy_names(module: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a module with a stub."""
    modules = modules_of_names(file)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        return getattr(import_module(modules[name]), name)

    return sorted(modules), get


def add_lazy_modules(package: str, file: str) -> list[str]:
    """Add a module for each stub next to a package's `__init__.py`; return their names."""
    stubs = sorted(Path(file).parent.glob("[!_]*.pyi"))
    for stub in stubs:
        names, get = lazy_names(f"{package}.{stub.stem}", str(stub))
        module = add_module(f"{package}.{stub.stem}", get)
        vars(module).update(__all__=names, __file__=str(stub))
        setattr(sys.modules[package], stub.stem, module)
    return [stub.stem for stub in stubs]


def add_module(name: str, get: Callable[[str], Any]) -> ModuleType:
    """Add a module to `sys.modules` that gets its names from a function."""
    module = ModuleType(name)
    vars(module).update(__getattr__=get)
    return sys.modules.setdefault(name, module)


def names_of(module: str) -> Callable[[str], Any]:
    """Return a `__getattr__` that gets the names of another module."""

    def get(name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks all modules for their files
            raise AttributeError(name)
        return getattr(import_module(module), name)

    return get
