"""Complete the arguments of `rl-cli` before they are parsed: find configs and checkpoints."""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_only

from lightning_rl.checkpoints.format import CONFIG_KEY, read_checkpoint
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.cli.config_files import find_config, shipped_configs
from lightning_rl.cli.kept_config import config_of, in_words, lacks_of, of_a_script, settings_of
from lightning_rl.cli.parsing import UsageError, asks_for_help
from lightning_rl.system.errors import ConfigurationError, closest, require
from lightning_rl.system.runs import find_checkpoint

FAMILIES = {
    "--model": "lightning_rl.Algorithm",
    "--data.env": "lightning_rl.VectorEnv",
    "--data.eval_env": "lightning_rl.VectorEnv",
    "--data.collector": "lightning_rl.Collector",
    "--data.replay": "lightning_rl.Replay",
}
"""Options that take a class, and the class that all of them derive from."""

SEES = "lightning_rl.ActorCritic"
"""Whose help leads to that of an encoder, where no policy is named."""


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
        return Completed([subcommand, *_help_options(options)], True, options)
    options, configs = _resolve_config_names(_spell_out_video(options))
    checkpoint = value_of("--ckpt_path", options)
    if checkpoint is None and subcommand not in TRAINS:
        raise UsageError(
            f"{_misspelt(options)}{subcommand} needs a trained policy: give --ckpt_path FILE, a "
            "run directory, last or best."
        )
    if configs:
        named = "--exp_name" in options or any(
            option.startswith("--exp_name=") for option in options
        )
        completed = [subcommand, *([] if named else ["--exp_name", configs[0].stem]), *options]
        return Completed(completed, True, options)
    if checkpoint is not None:
        return _with_config_of(checkpoint, subcommand, options)
    if value_of("--model", options) is None:
        raise UsageError(
            f"{_misspelt(options)}{subcommand} needs a config or a checkpoint: --config FILE, "
            f"or --ckpt_path last. Shipped: {', '.join(shipped_configs())}."
        )
    return Completed(arguments, True, options)


NEEDED = ("--config", "--ckpt_path", "--model")
"""Options of which every run has one."""


def _misspelt(options: Sequence[str]) -> str:
    """Say which option was meant for one of those that are needed, where that can be told."""
    if options and options[-1] in NEEDED:
        return f"{options[-1]} needs a value. "
    for before, option in pairwise(["", *options]):
        flag = option.partition("=")[0]
        if flag.startswith("-") and "." not in flag and flag not in NEEDED:
            if match := closest(f"--{flag.lstrip('-')}", NEEDED, most=1):
                return f"Unknown option '{flag}'{match}. "
        elif not before.startswith("-") and option.endswith((".yaml", ".yml", ".ckpt")):
            needed = "--ckpt_path" if option.endswith(".ckpt") else "--config"
            return f"'{option}' belongs to no option: write {needed} {option}. "
    return ""


def is_trusted(options: Sequence[str]) -> bool:
    """Return whether a command reads no checkpoint, or one that the user trusts."""
    trust_code = (value_of("--trust_code", options) or "false").lower() == "true"
    return trust_code or value_of("--ckpt_path", options) is None


def _help_options(options: list[str]) -> list[str]:
    """Return what asks for help: the rest of a command says nothing about it.

    `--model.policy.help` becomes `--model.help --model.policy.help`: that is how the parser takes
    it, and names the settings of the policy by their whole paths.
    """
    asking: list[str] = []
    follows = False
    for option in options:
        if option in ("-h", "--help"):
            return [option]
        follows = asks_for_help([option]) or (follows and not option.startswith("-"))
        if follows:
            asking.append(option)
    flags = [option.partition("=")[0] for option in asking]
    if "--model.policy.encoder.help" in flags and "--model.policy.help" not in flags:
        asking = ["--model.policy.help", value_of("--model.policy", options) or SEES, *asking]
    for section, family in FAMILIES.items():
        wanted = any(flag.startswith(f"{section}.") and flag.endswith(".help") for flag in flags)
        if wanted and f"{section}.help" not in flags:
            return [f"{section}.help", value_of(section, options) or family, *asking]
    return asking


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
    config = config_of(content, path)
    lacks = lacks_of(content) | of_a_script(settings_of(config, path))
    _refuse_lacking(path, lacks, subcommand, options)
    trusted = is_trusted(["--ckpt_path", checkpoint, *options])
    if not trusted:
        checked = checked_config(config, path)
        config = checked.config
        _say(str(checked))
    # The run that was found is meant from here on, not the newest of its name.
    rest = without("--ckpt_path", options)
    arguments = [subcommand, "--config", config, *rest, "--ckpt_path", str(path)]
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


def _spell_out_video(options: list[str]) -> list[str]:
    """Read `--video`, alone or with a value, as `--trainer.video`."""
    spelt: list[str] = []
    for option, following in pairwise([*options, "--"]):
        if option == "--video" or option.startswith(("--video=", "--video.")):
            alone = option == "--video" and following.startswith("-")
            option = f"--trainer.{option[2:]}{'=true' if alone else ''}"
        spelt.append(option)
    return spelt


def _resolve_config_names(options: list[str]) -> tuple[list[str], list[Path]]:
    """Replace each `--config NAME` by the path it stands for, and return the paths too."""
    resolved, configs = list(options), []
    for i, option in enumerate(options):
        flag, _, inline = option.partition("=")
        if flag not in ("--config", "-c"):
            continue
        at = i if inline else i + 1
        if at >= len(options):
            continue
        path = find_config(inline or options[at])
        resolved[at] = f"{flag}={path}" if inline else str(path)
        configs.append(path)
    return resolved, configs


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
    """Return options without a flag and its value."""
    kept, skip = [], False
    for option in options:
        if skip:
            skip = False
        elif option == flag:
            skip = True
        elif not option.startswith(f"{flag}="):
            kept.append(option)
    return kept
