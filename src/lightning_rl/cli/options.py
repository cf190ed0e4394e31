"""Parse the options of a subcommand that trains nothing."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lightning_rl.cli.messages import explain
from lightning_rl.cli.parsing import Refusal
from lightning_rl.system.errors import closest


class OptionParser(LightningArgumentParser):
    """The options of a subcommand; an error is a `Refusal`."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the parsing: whoever knows what was typed says what is wrong."""
        raise Refusal(message) from ex


@contextmanager
def explained_refusals(typed: Sequence[str]) -> Iterator[None]:
    """Say what is wrong with options as they were typed, and leave with status 2."""
    try:
        yield
    except Refusal as refusal:
        sys.stderr.write(f"rl-cli: error: {explain(str(refusal), typed)}\n")
        sys.exit(2)


def check_names(subcommand: str, options: Sequence[str], known: Iterable[str]) -> None:
    """Refuse an option that there is not, as the parser's own message tells of those of `fit`."""
    known = list(known)
    for option in options:
        name = option.partition("=")[0][2:].rstrip("+") if option.startswith("--") else "help"
        owner = next((one for one in known if f"{name}.".startswith(f"{one}.")), None)
        if owner is None and name != "help":
            message = f"{subcommand} has no option --{name}{closest(name, known)}."
            sys.stderr.write(f"rl-cli: error: {message} rl-cli {subcommand} --help lists them.\n")
            sys.exit(2)
