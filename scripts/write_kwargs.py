"""Write `kwargs.pyi`: the settings behind `**kwargs` of public classes, for mypy and editors.

python scripts/write_kwargs.py
"""

import ast
import builtins
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path
from textwrap import dedent

import lightning_rl
from lightning_rl import RLTrainer
from lightning_rl.system.construction import settings_of_class

STUB = Path(lightning_rl.__file__).with_name("kwargs.pyi")
HEAD = f'"""Settings behind `**kwargs`, written by scripts/{Path(__file__).name}."""\n\n'


@cache
def module_names(module):
    """The import of each name of a module, as text."""
    names = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            names.setdefault(alias.asname or alias.name, f"{origin}import {ast.unparse(alias)}")
    return names


@cache
def annotations_of(function):
    """The annotations of a function's arguments by name, as its source has them."""
    arguments = ast.parse(dedent(inspect.getsource(function))).body[0].args
    return {arg.arg: arg.annotation for arg in (*arguments.args, *arguments.kwonlyargs)}


def constructors():
    """The constructors of the public classes, each as the class that has it."""
    classes = [getattr(lightning_rl, name) for name in lightning_rl.__all__]
    for cls in classes:
        if isinstance(cls, type) and not issubclass(cls, Exception | tuple):
            yield next(parent for parent in cls.__mro__ if "__init__" in vars(parent))


def kwargs_of(cls):
    """The settings behind `**kwargs` of a class, by name."""
    arguments = inspect.signature(cls.__init__).parameters.values()
    # Lightning declares the settings of its `Trainer` by names that are private to it.
    if all(argument.kind is not argument.VAR_KEYWORD for argument in arguments) or cls is RLTrainer:
        return {}
    settings, named = settings_of_class(cls) or {}, {argument.name for argument in arguments}
    return {name: setting for name, setting in settings.items() if name not in named}


def stub():
    """The text of the stub."""
    imports, parts = {}, ["from typing import TypedDict", "from typing import Unpack as Unpack"]
    for cls in filter(kwargs_of, dict.fromkeys(constructors())):
        lines = [f"class {cls.__name__}Kwargs(TypedDict, total=False):"]
        for name, setting in kwargs_of(cls).items():
            function = setting.component
            annotation = annotations_of(function)[name]
            lines.append(f"    {name}: {ast.unparse(annotation)}")
            for node in ast.walk(annotation):
                if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
                    home = f"from {function.__module__} import {node.id}"
                    imports[node.id] = module_names(function.__module__).get(node.id, home)
        parts.append("\n".join(lines))
    return HEAD + "\n".join((*imports.values(), *parts))


if __name__ == "__main__":
    STUB.write_text(stub())
    subprocess.run(["ruff", "check", "--quiet", "--fix", STUB], check=True)
    subprocess.run(["ruff", "format", "--quiet", STUB], check=True)
