"""Subcommands of `rl-cli`."""

from lightning_rl.cli.arguments import is_trusted as is_trusted
from lightning_rl.cli.checking import check_run as check_run
from lightning_rl.cli.checking import parse_classes as parse_classes
from lightning_rl.cli.config_files import find_config as find_config
from lightning_rl.cli.config_files import shipped_configs as shipped_configs
from lightning_rl.cli.imports import only_allowed_imports as only_allowed_imports
from lightning_rl.cli.options import NEEDED as NEEDED
from lightning_rl.cli.options import Option as Option
from lightning_rl.cli.options import checkpoint_options as checkpoint_options
from lightning_rl.cli.options import explained_refusals as explained_refusals
from lightning_rl.cli.options import option_parser as option_parser
from lightning_rl.cli.options import parse_options as parse_options
from lightning_rl.cli.parsing import UsageError as UsageError
from lightning_rl.cli.parsing import normalize_options as normalize_options
from lightning_rl.cli.parsing import read_config as read_config
from lightning_rl.cli.parsing import value_of as value_of
from lightning_rl.cli.subcommands import CommandLine as CommandLine
from lightning_rl.system.signals import handle_signals as handle_signals

__all__: list[str]
