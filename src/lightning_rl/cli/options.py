"""Parse the options of a subcommand that makes no run."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rl.cli.help_pages import HelpFormatter
from lightning_rl.cli.parsing import UsageError, check_names, no_option
from lightning_rl.system.declared import shorten_message
from lightning_rl.system.jsonargparse_private import PARSER_MODE
from lightning_rl.system.output import tell

NEEDED: Any = object()
"""Default of a required option."""


class Option(NamedTuple):
    """An option of a subcommand.

    Attributes:
        kind: type of the value.
        default: `NEEDED` if the option is required; None if it may be left out.
        help: help text.
        several: whether it takes several values, `--success 0 3 7`.
        unused: of the parsed options, returns why this one has no effect with them; "" if it has.
    """

    kind: Any
    default: Any
    help: str
    several: bool = False
    unused: Callable[[Namespace], str] = lambda settings: ""

    @staticmethod
    def only_with(other: str, *values: Any) -> Callable[[Namespace], str]:
        """Return an `unused`: the option needs another one, given or with one of `values`."""

        def reason(settings: Namespace) -> str:
            value = settings[other]
            if value in values if values else value is not None:
                return ""
            return f"it is for --{other} {' or '.join(v for v in values if v)}".rstrip()

        return reason

    @staticmethod
    def of_checkpoint(name: str, *plain_values: str) -> "dict[str, Option]":
        """Return the options for reading the checkpoint of the option `name`.

        Args:
            name: an option whose value is a path, `last`, `best`, None, or one of `plain_values`.
            plain_values: values that name no checkpoint.
        """
        folder = "folder of runs in which last and best are searched"
        code = "run the code that the configuration in a checkpoint names"
        unused = Option.only_with(name, "last", "best")

        def reads_none(settings: Namespace) -> str:
            return Option.only_with(name)(settings) or (
                f"--{name} {settings[name]} names no checkpoint"
                if settings[name] in plain_values
                else ""
            )

        return {
            "output_dir": Option(str, "outputs", folder, unused=unused),
            "trust_code": Option(bool, False, code, unused=reads_none),
        }


class OptionParser(LightningArgumentParser):
    """Parser of a subcommand; an error raises a `UsageError` with a short message."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if isinstance(ex, UsageError):  # of an inner parser
            raise ex
        # argparse's message about texts that belong to no option.
        stray = message.partition("unrecognized arguments: ")[2]
        raise (no_option(stray) if stray else UsageError(shorten_message(message))) from ex


def option_parser(subcommand: str, description: str, options: Mapping[str, Option]) -> OptionParser:
    """Build the parser of a subcommand; a name in `<>` is a positional argument."""
    parser = OptionParser(
        prog=f"rl-cli {subcommand}",
        parser_mode=PARSER_MODE,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        description=description,
    )
    for name, (kind, default, text, several, _) in options.items():
        is_positional = name.startswith("<")
        settings: dict[str, Any] = {"nargs": "+"} if several else {}
        if default is not NEEDED:
            settings["default"] = default
        elif not is_positional:
            settings["required"] = True
        flag = name.strip("<>") if is_positional else f"--{name}"
        # An option that may be left out has the value None.
        kind = kind | None if default is None else kind
        parser.add_argument(flag, type=kind, help=text, **settings)
    return parser


def parse_options(
    subcommand: str, description: str, options: Mapping[str, Option], typed: Sequence[str]
) -> Namespace:
    """Parse the options of a subcommand; refuse unknown names and values of another type."""
    check_names(subcommand, typed, options)
    settings = option_parser(subcommand, description, options).parse_args(list(typed))
    name_unused(options, settings, typed)
    return settings


def name_unused(options: Mapping[str, Option], settings: Namespace, typed: Sequence[str]) -> None:
    """Print a line for each typed option that has no effect with the others."""
    flags = {argument.partition("=")[0] for argument in typed}
    for name, option in options.items():
        if f"--{name}" in flags and (reason := option.unused(settings)):
            tell(f"--{name} {settings[name]} has no effect: {reason}.", sys.stderr)
