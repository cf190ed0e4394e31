"""Complete the arguments of `rl-cli` before they are parsed: find configs and checkpoints."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_only

from lightning_rl.checkpoints.format import CONFIG_KEY, read_checkpoint
from lightning_rl.checkpoints.saved import in_words, lacks_of, settings_of, written
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.cli.checking import kinds_of
from lightning_rl.cli.config_files import find_config, shipped_configs
from lightning_rl.cli.options import check_names
from lightning_rl.cli.parsing import UsageError, asks_for_help, normal
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.plain_yaml import dump_yaml
from lightning_rl.system.runs import find_checkpoint

OUTER = {
    "--model": "lightning_rl.Algorithm",
    "--model.policy": "lightning_rl.ActorCritic",
    "--data.env": "lightning_rl.VectorEnv",
    "--data.eval_env": "lightning_rl.VectorEnv",
    "--data.collector": "lightning_rl.Collector",
    "--data.replay": "lightning_rl.Replay",
}
"""Options that take a class, and the class whose help leads to what is below where none is given.

The parser has help on an inner class once it has given that on the outer one.
"""

TRAINS = ("fit", "check")
"""Subcommands that take the settings of a run, the second to look at it alone."""


class Completed(NamedTuple):
    """Arguments that the parser can take.

    Attributes:
        arguments: with names resolved, and the configuration as text where a checkpoint gave it.
        trusted: whether all of them came from the user, or the user trusts the checkpoint.
        typed: what the user gave.
    """

    arguments: list[str]
    trusted: bool
    typed: list[str]


def complete(arguments: list[str]) -> Completed:
    """Resolve bare config names.

    Where there is a checkpoint and no config, take the one inside the checkpoint: unless the user
    trusts it, only after a look at what it names.
    """
    subcommand, options = arguments[0], arguments[1:]
    if asks_for_help(options):
        return Completed([subcommand, *_help_options(normal(options))], True, options)
    options = [_resolved(option) for option in normal(options)]
    checkpoint, config = value_of("--ckpt_path", options), value_of("--config", options)
    lacks = ""
    if checkpoint is None and subcommand not in TRAINS:
        lacks = "a trained policy: give --ckpt_path FILE, a run directory, last or best"
    elif checkpoint is config is value_of("--model", options) is None:
        lacks = "a config or a checkpoint: --config FILE, or --ckpt_path last. Shipped: "
        lacks += ", ".join(shipped_configs())
    if lacks:
        check_names(subcommand, options, kinds_of(subcommand))
        raise UsageError(f"{subcommand} needs {lacks}.")
    if checkpoint is not None and config is None:
        return _with_config_of(checkpoint, subcommand, options)
    if config is not None and value_of("--exp_name", options) is None:
        first = next(option for option in options if option.startswith("--config="))
        options.insert(0, f"--exp_name={Path(first.partition('=')[2]).stem}")
    return Completed([subcommand, *options], True, options)


def _resolved(option: str) -> str:
    """Return an option with its whole name, and the path of a config for its name."""
    flag, _, value = option.partition("=")
    if flag in ("-c", "--config"):
        return f"--config={find_config(value)}"
    if flag == "--video" or flag.startswith("--video."):
        return f"--trainer.{flag[2:]}={value or 'true'}"
    return option


def is_trusted(options: Sequence[str]) -> bool:
    """Return whether a command reads no checkpoint, or one that the user trusts."""
    trust_code = (value_of("--trust_code", options) or "false").lower() == "true"
    return trust_code or value_of("--ckpt_path", options) is None


def _help_options(options: list[str]) -> list[str]:
    """Return what asks for help: the rest of a command says nothing about it.

    `--model.policy.help` becomes `--model.help --model.policy.help`: that is how the parser takes
    it, and names the settings of the policy by their whole paths.
    """
    if {"-h", "--help"} & set(options):
        return ["--help"]
    asked = [option for option in options if asks_for_help([option])]
    flags = [option.partition("=")[0] for option in asked]
    for option, cls in reversed(OUTER.items()):
        if f"{option}.help" not in flags and any(flag.startswith(f"{option}.") for flag in flags):
            asked.insert(0, f"{option}.help={value_of(option, options) or cls}")
    return asked


def _with_config_of(checkpoint: str, subcommand: str, options: list[str]) -> Completed:
    """Take the configuration inside a checkpoint, and what the user gave on top of it."""
    path = find_checkpoint(
        checkpoint,
        value_of("--output_dir", options) or "outputs",
        value_of("--exp_name", options),
    )
    content = read_checkpoint(path, whole=False)
    require(
        CONFIG_KEY in content,
        f"The checkpoint {path} holds no configuration of rl-cli; give the one it was trained with "
        "as --config.",
    )
    text = str(content[CONFIG_KEY])
    settings = settings_of(text, path)
    _refuse_lacking(path, lacks_of(settings), subcommand, options)
    config = dump_yaml(written(settings))
    trusted = is_trusted(["--ckpt_path", checkpoint, *options])
    if not trusted:
        checked = checked_config(config, path)
        config = checked.config
        _say(str(checked))
    # The run that was found is meant from here on, not the newest of its name.
    rest = without("--ckpt_path", options)
    arguments = [subcommand, f"--config={config}", *rest, f"--ckpt_path={path.absolute()}"]
    return Completed(arguments, trusted, rest)


def _refuse_lacking(
    path: Path, lacks: Mapping[str, str], subcommand: str, options: Sequence[str]
) -> None:
    """Refuse a checkpoint of a run from Python whose configuration could not hold all of it.

    Unless the user gives what it lacks; what only trains is not asked of an evaluation.
    """
    lacking = {
        name: what
        for name, what in lacks.items()
        if not _is_given(name, options)
        and (subcommand in TRAINS or not name.startswith("trainer."))
    }
    if lacking:
        raise ConfigurationError(
            f"The checkpoint {path} is of a run in Python, with what a configuration cannot hold: "
            f"{in_words(lacking)}. Give it, as {', '.join(f'--{name} ...' for name in lacking)}, "
            "or a whole configuration as --config."
        )


def _is_given(name: str, options: Sequence[str]) -> bool:
    """Tell whether an option sets what has this name, or what it is a part of."""
    flags = {option.partition("=")[0].replace(".init_args", "") for option in options}
    parts = name.split(".")
    return any(f"--{'.'.join(parts[:end])}" in flags for end in range(1, len(parts) + 1))


@rank_zero_only
def _say(text: str) -> None:
    sys.stderr.write(text)


def value_of(flag: str, options: Sequence[str]) -> str | None:
    """Return the last value given to a flag, as `--flag value` or `--flag=value`."""
    value = None
    for option, following in zip(options, [*options, None][1:], strict=True):
        if option == flag:
            value = following
        elif option.startswith(f"{flag}="):
            value = option.split("=", 1)[1]
    return value


def without(flag: str, options: Sequence[str]) -> list[str]:
    """Return options, as `normal` has them, without those of a flag."""
    return [option for option in options if option.partition("=")[0] != flag]
