"""Complete the arguments of `rl-cli` before parsing: find configs and checkpoints."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import dict_to_namespace
from lightning.pytorch.utilities import rank_zero_only

from lightning_rl.checkpoints.format import CONFIG_KEY, read_checkpoint
from lightning_rl.checkpoints.own import is_own
from lightning_rl.checkpoints.saved import describe_missing, missing_settings, settings_of, written
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.cli.checking import kinds_of
from lightning_rl.cli.first_check import TRAINS, resolved_options
from lightning_rl.cli.parsing import asks_for_help, merge_options, normalize_options, value_of
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.output import tell
from lightning_rl.system.plain_yaml import dump_yaml
from lightning_rl.system.saved_runs import find_checkpoint

OUTER = {
    "--model": "lightning_rl.Algorithm",
    "--model.policy": "lightning_rl.ActorCritic",
    "--data.env": "lightning_rl.VectorEnv",
    "--data.eval_env": "lightning_rl.VectorEnv",
    "--data.collector": "lightning_rl.Collector",
    "--data.replay": "lightning_rl.Replay",
}
"""Options that take a class, and the class whose help is shown by default."""

OF_TRAINING: tuple[str, ...] = (
    *("restore_replay", "data.replay", "data.events", "data.extra_fields", "model."),
    *("trainer.best_", "trainer.checkpoint_", "trainer.enable_checkpointing", "trainer.init_from"),
    *("trainer.keep_checkpoints", "trainer.log", "trainer.max_", "trainer.save_replay"),
)
"""Beginnings of options without effect in `validate`, `test` and `play`."""


class Completed(NamedTuple):
    """Arguments for the parser.

    Attributes:
        arguments: with resolved names, and the checkpoint's configuration as text if it is used.
        trusted: whether all arguments came from the user, or the user trusts the checkpoint.
        typed: the user's options.
    """

    arguments: list[str]
    trusted: bool
    typed: list[str]


def complete(arguments: list[str]) -> Completed:
    """Resolve config names and checkpoint paths; without a config, use the checkpoint's."""
    subcommand, options = arguments[0], arguments[1:]
    if asks_for_help(options):
        return Completed([subcommand, *_help_options(normalize_options(options))], True, options)
    options = resolved_options(subcommand, options, kinds_of(subcommand))
    checkpoint, config = value_of("--ckpt_path", options), value_of("--config", options)
    if checkpoint is not None and config is None:
        completed = _with_config_of(checkpoint, subcommand, options)
        _name_unused(completed.arguments, options, checkpoint)
        return completed
    _name_unused([subcommand, *options], options, checkpoint)
    if config is not None and value_of("--exp_name", options) is None:
        first = next(option for option in options if option.startswith("--config="))
        # At the front: an exp_name in the config wins.
        options.insert(0, f"--exp_name={Path(first.partition('=')[2]).stem}")
    return Completed([subcommand, *options], True, options)


def _name_unused(arguments: Sequence[str], typed: Sequence[str], checkpoint: str | None) -> None:
    """Print a line for each reason for which typed options have no effect."""
    subcommand, settings = arguments[0], dict_to_namespace(merge_options(arguments[1:]))
    trains, every = subcommand in TRAINS, "trainer.checkpoint_every_n_iterations"
    resumes, is_path = checkpoint is not None, checkpoint not in ("last", "best")
    algorithm = f"{settings.get('model.class_path')}"
    # An algorithm of the user may evaluate by its own settings.
    is_own = not algorithm.startswith("lightning_rl.") and "." in algorithm
    effective = ("model.",) if is_own else ("model.policy", "model.threshold")
    of_start = ("trainer.init_from", "seed_everything", "data.seed")
    continued = "on training, which continues with the checkpoint's weights and random numbers"
    rules = (
        (not trains, OF_TRAINING, f"on {subcommand}, only on training"),
        (not trains and is_path, ("exp_name", "output_dir"), "without --ckpt_path last or best"),
        (trains and resumes, of_start, continued),
        (trains and not resumes, ("restore_replay", "trust_code"), "without --ckpt_path"),
        (trains and not settings.get(every), ("trainer.keep_checkpoints",), f"without --{every}"),
    )
    for applies, names, reason in rules:
        options = [
            option
            for option in typed
            if (name := option.partition("=")[0][2:].replace(".init_args", "")).startswith(names)
            and not name.startswith(effective)
        ]
        if applies and options:
            rank_zero_only(tell)(f"{', '.join(options)}: no effect {reason}.", sys.stderr)


def is_trusted(options: Sequence[str]) -> bool:
    """Return whether a command reads no checkpoint, a trusted one, or code of one's own run."""
    checkpoint = value_of("--ckpt_path", options)
    if checkpoint is None:
        return True
    try:
        content = read_checkpoint(_path_of(checkpoint, options), verify=False)
    except ConfigurationError:
        content = {}  # the command reports it
    return _trusts(content, options)


def _trusts(content: Mapping[str, Any], options: Sequence[str]) -> bool:
    answer = value_of("--trust_code", options)
    return is_own(content) if answer is None else answer.lower() == "true"


def _path_of(checkpoint: str, options: Sequence[str]) -> Path:
    directory = value_of("--output_dir", options) or "outputs"
    return find_checkpoint(checkpoint, directory, value_of("--exp_name", options))


def _help_options(options: list[str]) -> list[str]:
    """Return the options that ask for help, with one for each class on the path of the setting."""
    if {"-h", "--help"} & set(options):
        return ["--help"]
    help_options = [option for option in options if asks_for_help([option])]
    flags = [option.partition("=")[0] for option in help_options]
    # Backwards, because each option is put at the front: outer classes come first.
    for option, cls in reversed(OUTER.items()):
        if f"{option}.help" not in flags and any(flag.startswith(f"{option}.") for flag in flags):
            help_options.insert(0, f"{option}.help={value_of(option, options) or cls}")
    return help_options


def _with_config_of(checkpoint: str, subcommand: str, options: list[str]) -> Completed:
    path = _path_of(checkpoint, options)
    content = read_checkpoint(path, verify=False)
    require(
        CONFIG_KEY in content,
        f"The checkpoint {path} holds no configuration of rl-cli; give the config that it was "
        "trained with as --config.",
    )
    text = str(content[CONFIG_KEY])
    settings = settings_of(text, path)
    _refuse_lacking(path, missing_settings(settings), subcommand, options)
    if isinstance(trainer := settings.get("trainer"), dict):
        trainer.pop("run_dir", None)  # where the checkpoint lies now counts
    config = dump_yaml(written(settings))
    trusted = _trusts(content, options)
    if not trusted:
        checked = checked_config(config, path)
        config = checked.config
        rank_zero_only(tell)(str(checked), sys.stderr, end="")
    # Pass the path, because a newer run could be `last` later.
    remaining = [option for option in options if not option.startswith("--ckpt_path=")]
    arguments = [subcommand, f"--config={config}", *remaining, f"--ckpt_path={path.absolute()}"]
    return Completed(arguments, trusted, remaining)


def _refuse_lacking(
    path: Path, lacks: Mapping[str, str], subcommand: str, options: Sequence[str]
) -> None:
    """Refuse the incomplete configuration of a Python run, unless options complete it."""
    lacking = {
        name: reason
        for name, reason in lacks.items()
        if not _is_given(name, options)
        and (subcommand in TRAINS or not name.startswith("trainer."))
    }
    if lacking:
        raise ConfigurationError(
            f"The checkpoint {path} comes from a run in Python with settings that a configuration "
            f"cannot hold: {describe_missing(lacking)}. Give it, as "
            f"{', '.join(f'--{name} ...' for name in lacking)}, or a whole configuration as "
            "--config."
        )


def _is_given(name: str, options: Sequence[str]) -> bool:
    flags = {option.partition("=")[0].replace(".init_args", "") for option in options}
    parts = name.split(".")
    # An option for a section completes the settings in it.
    return any(f"--{'.'.join(parts[:end])}" in flags for end in range(1, len(parts) + 1))
