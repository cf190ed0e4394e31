"""Run a subcommand that an extension or the user defines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_rl.cli.arguments import is_trusted
from lightning_rl.cli.checking import check_run
from lightning_rl.cli.config_files import find_config
from lightning_rl.cli.first_check import unknown_subcommand
from lightning_rl.cli.imports import find_code_here, only_allowed_imports
from lightning_rl.cli.parsing import UsageError, normalize_options, read_config, value_of
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.extensions import SUBCOMMANDS, function_at
from lightning_rl.system.texts import imported, is_import_path

Parse = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
"""Checks options of `fit`, without and with each list of further options; returns YAML."""


@dataclass(frozen=True)
class CommandLine:
    """What a subcommand may ask of the command line.

    Attributes:
        run: runs `rl-cli` with these arguments.
        parse: checks options of `fit`.

    Its static methods read options, files and checkpoints as the command line does.
    """

    run: Callable[[Sequence[str]], None]
    parse: Parse

    check_run = staticmethod(check_run)
    find_config = staticmethod(find_config)
    is_trusted = staticmethod(is_trusted)
    normalize_options = staticmethod(normalize_options)
    only_allowed_imports = staticmethod(only_allowed_imports)
    read_config = staticmethod(read_config)
    value_of = staticmethod(value_of)


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
    if not is_import_path(path):
        raise UsageError(unknown_subcommand(path))
    find_code_here()
    try:
        function = imported(path)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"unknown subcommand '{path}': {error}.") from error
    if not callable(function):
        raise UsageError(f"unknown subcommand '{path}': it is no function (options, command_line).")
    return function  # type: ignore[no-any-return]  # any function
