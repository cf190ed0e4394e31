"""Run a subcommand that an extension defines."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.extensions import SUBCOMMANDS, function_at

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
    """Run a subcommand of `SUBCOMMANDS`.

    Raises:
        ConfigurationError: if a package of its extra is not installed.
    """
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
