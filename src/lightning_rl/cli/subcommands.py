"""Run a subcommand that an extension or the user defines."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_rl.cli.imports import find_code_here
from lightning_rl.cli.parsing import UsageError
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.extensions import SUBCOMMANDS, function_at
from lightning_rl.system.texts import imported

Parse = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
"""Checks options of `fit`, without and with each list of further options; returns YAML."""


class CommandLine(NamedTuple):
    """What a subcommand may ask of the command line.

    Attributes:
        run: runs `rl-cli` with these arguments.
        parse: checks options of `fit`.
    """

    run: Callable[[Sequence[str]], None]
    parse: Parse


def run_subcommand(name: str, options: Sequence[str], command_line: CommandLine) -> None:
    """Run a subcommand of `SUBCOMMANDS`, or the user's function at an import path.

    Raises:
        UsageError: if the import path leads to no function.
        ConfigurationError: if a package of its extra is not installed.
    """
    if name not in SUBCOMMANDS:
        return _own_function(name)(options, command_line)
    path, _, extra = SUBCOMMANDS[name]
    try:
        subcommand = function_at(path)
    except ModuleNotFoundError as error:
        # Without an extra, the missing module is an error of this package.
        if not extra:
            raise
        raise ConfigurationError(
            f"rl-cli {name} needs a package that is not installed: pip install -e '.[{extra}]'"
        ) from error
    subcommand(options, command_line)


def _own_function(path: str) -> Callable[[Sequence[str], CommandLine], None]:
    find_code_here()
    try:
        function = imported(path)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"unknown subcommand '{path}': {error}.") from error
    if not callable(function):
        raise UsageError(f"unknown subcommand '{path}': it is no function (options, command_line).")
    return function  # type: ignore[no-any-return]  # any function
