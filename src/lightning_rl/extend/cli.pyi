"""Subcommands of `rl-cli`."""

from lightning_rl.cli.checking import parse_classes as parse_classes
from lightning_rl.cli.options import NEEDED as NEEDED
from lightning_rl.cli.options import Option as Option
from lightning_rl.cli.options import option_parser as option_parser
from lightning_rl.cli.options import parse_options as parse_options
from lightning_rl.cli.parsing import UsageError as UsageError
from lightning_rl.cli.subcommands import CommandLine as CommandLine
from lightning_rl.system.signals import handle_signals as handle_signals

__all__: list[str]
