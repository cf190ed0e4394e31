"""Print the usage of `rl-cli` without slow imports, or import and run a subcommand."""

import gc
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from typing import Any

from lightning_rl.system.extensions import SUBCOMMANDS
from lightning_rl.system.output import tell
from lightning_rl.system.signals import interrupted_by_signals

USAGE = """usage: rl-cli SUBCOMMAND [options]

  fit       train:               rl-cli fit --config ppo.yaml
            change any setting:  rl-cli fit --config ppo.yaml --model.clip_coef 0.1
            resume:              rl-cli fit --ckpt_path last
  validate  evaluate:            rl-cli validate --ckpt_path last
  test      evaluate on seeds that no evaluation has used
  check     try an env out:      rl-cli check --config ppo.yaml --data.env.id Acrobot-v1
  play      watch it:            rl-cli play --ckpt_path best   (--video true films it)
{extensions}

  --config FILE       YAML file, or the bare name of a shipped one
  --ckpt_path PATH    a checkpoint, a run directory, or `last` or `best` of the newest run
  --exp_name NAME     first part of the run directory's name
  --output_dir DIR    where run directories are made (default: outputs)
  --trust_code true   run code of others that the configuration in a checkpoint names
  --print_config      print the whole configuration, and exit
  --video true        film evaluations

  rl-cli fit --help                  these, and all settings of the trainer and of the data
  rl-cli fit --model.help PPO        the settings of an algorithm
  rl-cli fit --model.policy.help ActorCritic, --data.env.help PushCube, and so on
  rl-cli --completion bash           a script for completion in bash, or in zsh
  rl-cli --version                   the version"""


def main() -> None:
    """Run `rl-cli`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = (f"  {name:10}{command.usage}" for name, command in SUBCOMMANDS.items())
        return tell(USAGE.format(extensions="\n".join(lines)))
    if arguments[0] == "--version":
        return tell(f"lightning-rl {version('lightning-rl')}")
    from lightning_rl.cli.first_check import end_with, first_check
    from lightning_rl.system.errors import ConfigurationError

    if arguments[0] == "--completion":
        return _print_completion(arguments[1:])
    try:
        first_check(arguments)
    except ConfigurationError as error:
        end_with(error)
    from lightning_rl.cli.parsing import asks_for_help

    with interrupted_by_signals() as came:
        try:
            (_help if asks_for_help(arguments[1:]) else _import_and_run)(arguments)
        except (KeyboardInterrupt, SystemExit):
            if not came:
                raise
            sys.exit(128 + came[0])


def _import_and_run(arguments: list[str]) -> None:
    gc.disable()  # garbage collection during imports takes 0.5 s and frees little
    from lightning_rl.cli.app import run

    _table()
    gc.enable()
    run(arguments)


def _table() -> Any:
    """Return the table of names; make it, which takes seconds, if the package has changed."""
    from lightning_rl.cli.names_table import current_table, write_table

    if current_table() is None:
        from lightning_rl.cli.listing import list_names

        write_table(list_names())
    return current_table()


def _help(arguments: list[str]) -> None:
    """Print a page of help that the table holds, or make it, which takes seconds."""
    from lightning_rl.cli.names_table import current_table, page_key, write_table

    key, table = page_key(arguments), current_table()
    if table and key in table.pages:
        return tell(table.pages[key], end="")
    page = StringIO()
    try:
        with redirect_stdout(page):
            _import_and_run(arguments)
    except SystemExit as stop:
        if key and not stop.code and (table := current_table()):
            write_table({**table._asdict(), "pages": {**table.pages, key: page.getvalue()}})
        raise
    finally:
        tell(page.getvalue(), end="")


def _print_completion(shells: list[str]) -> None:
    from lightning_rl.cli.completion import BEFORE, completion

    if len(shells) != 1 or shells[0] not in BEFORE:
        sys.exit(f"rl-cli: --completion takes {' or '.join(BEFORE)}.")
    if (table := _table()) is None:
        sys.exit("rl-cli: no completion, because the cache directory cannot be written.")
    tell(completion(shells[0], table))


if __name__ == "__main__":
    main()
