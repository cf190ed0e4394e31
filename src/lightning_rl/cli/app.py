"""Run `rl-cli fit`, `validate`, `test`, `check`, `play`; extensions define other subcommands."""

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_rl.algorithms import Algorithm
from lightning_rl.buffers import WriterError
from lightning_rl.checkpoints.format import CONFIG_KEY, STATE_KEY, read_checkpoint, restoring
from lightning_rl.checkpoints.registry import SECTIONS
from lightning_rl.cli.arguments import complete, is_trusted
from lightning_rl.cli.checking import check_run
from lightning_rl.cli.first_check import CORE, end_with
from lightning_rl.cli.help_pages import (
    TITLES_OF,
    HelpFormatter,
    SectionHelp,
    arrange,
    describe_class,
)
from lightning_rl.cli.imports import find_code_here, only_allowed_imports
from lightning_rl.cli.options import OptionParser
from lightning_rl.cli.parsing import asks_for_help, value_of
from lightning_rl.cli.subcommands import CommandLine, run_subcommand
from lightning_rl.system import ranks
from lightning_rl.system.construction import weights_follow
from lightning_rl.system.declared import shorten_message
from lightning_rl.system.errors import ConfigurationError, EnvFaultError, check_range
from lightning_rl.system.extensions import HOOKS, function_at
from lightning_rl.system.files import check_writable, expanded, read_text, shown, write_atomically
from lightning_rl.system.jsonargparse_private import PARSER_MODE, accept_plain_numpy_numbers
from lightning_rl.system.lightning_private import CommandLineAlone
from lightning_rl.system.output import tell
from lightning_rl.system.plain_yaml import dump_yaml, load_yaml, read_yaml
from lightning_rl.system.runs import refuse_live_run
from lightning_rl.system.saved_runs import CHECKPOINTS, find_checkpoint, run_dir_of
from lightning_rl.training.callbacks import SettingsWriter
from lightning_rl.training.data import RLDataModule
from lightning_rl.training.quiet import quieten_framework
from lightning_rl.training.trainer import RLTrainer

MISSING_REQUIREMENT = r"given class_path '([^']+)':\s+Requirement '([^']+)' not met"
"""Message of jsonargparse for a class that needs a missing package."""


class RLArgumentParser(OptionParser):
    """Parser with one-message errors and help pages in sections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {"prog": "rl-cli", "formatter_class": HelpFormatter, "parser_mode": PARSER_MODE}
        super().__init__(*args, **{**defaults, **kwargs})

    def format_help(self, formatter: Any = None) -> str:
        if hasattr(self, "subcommand"):
            if not self.usage:
                arrange(self, self.subcommand)
        else:
            describe_class(self)
        return super().format_help(formatter)


MOST_SEED = 2**32 - 1
"""Largest seed that NumPy accepts."""


class RunConfig(SaveConfigCallback, SettingsWriter):
    """Write the run's configuration to `config.yaml`, its checkpoints and its loggers."""

    # Replaces the hook of SaveConfigCallback, which writes into the logger's directory.
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None: ...

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            assert isinstance(trainer, RLTrainer)
            content = self._text.encode()
            write_atomically(
                trainer.run_dir / self.config_filename, lambda file: file.write(content)
            )
        SettingsWriter.on_fit_start(self, trainer, pl_module)

    def settings(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return cast(dict[str, Any], load_yaml(self._text))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[CONFIG_KEY] = self._text

    @cached_property
    def _text(self) -> str:
        """The configuration as YAML; cached, because dumping takes 0.15 s."""
        text = self.parser.dump(self.config, skip_none=False, skip_validation=True)  # parsed before
        config = load_yaml(text)
        return dump_yaml({key: config[key] for key in SECTIONS if key in config})


class RLCLI(CommandLineAlone, LightningCLI):
    """The command line; `RLCLI(args=[...])` runs it from Python."""

    def __init__(self, args: Sequence[str]) -> None:
        self._asked = args[0]
        # Before `super().__init__`, which parses, builds and runs everything.
        self._began_in = Path.cwd()  # the user's modules may change the working directory
        super().__init__(
            model_class=Algorithm,
            datamodule_class=RLDataModule,
            trainer_class=RLTrainer,
            save_config_callback=RunConfig,
            seed_everything_default=1,
            parser_class=RLArgumentParser,
            subclass_mode_model=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=list(args),
        )

    def subcommands(  # type: ignore[override]  # static in Lightning, but called on the object
        self,
    ) -> dict[str, set[str]]:
        """Return the requested subcommand only: building all parsers takes 0.25 s more."""
        extra = {name: {"model", "datamodule"} for name in ("check", "play")}
        methods = LightningCLI.subcommands() | extra
        return {self._asked: methods[self._asked]}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        accept_plain_numpy_numbers()
        return super().init_parser(**kwargs, allow_abbrev=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--exp_name", type=str, default="run", help="First part of the run directory's name."
        )
        parser.add_argument(
            "--output_dir", type=str, default="outputs", help="Where run directories are made."
        )
        parser.add_argument(
            "--trust_code",
            type=bool,
            default=False,
            help="Run the code that the configuration in a checkpoint names.",
        )
        parser.add_argument(
            "--restore_replay",
            type=bool,
            default=True,
            help="Restore the replay of the checkpoint; false starts with an empty replay.",
        )
        for option in TITLES_OF:
            parser.add_argument(option, action=SectionHelp, help="Show this section alone.")
        # The trainer gets these options from the top of the config.
        for key in ("exp_name", "output_dir", "restore_replay"):
            parser.link_arguments(key, f"trainer.{key}")
        # Policies get the spaces of the env, once the data module has built it.
        for key in ("observation_space", "action_space"):
            target = f"model.init_args.policy.init_args.{key}"
            parser.link_arguments(f"data.{key}", target, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        subcommand, settings = args[0], check_run(args)
        if asks_for_help(args):
            # The options are already checked: a wrong name gets an error, not a help page.
            parser.parse_args(args)
        try:
            self.config = parser.parse_object({"subcommand": subcommand, subcommand: settings})
        except ValueError as error:
            if isinstance(error, ConfigurationError):
                raise
            # jsonargparse fails so for an argument without a type annotation.
            hint = "A constructor of your own must annotate its arguments, as in policy: Policy."
            raise ConfigurationError(f"{shorten_message(str(error))} {hint}") from error
        if any(option.startswith("--print_config") for option in args):
            tell(dump_yaml(self.settings()), end="")
            sys.exit(0)
        seed = self.config[self.config.subcommand].seed_everything
        check_range("seed_everything", seed, minimum=0, maximum=MOST_SEED)
        self._find_checkpoint(args)

    def settings(self) -> dict[str, Any]:
        text = self.parser.dump(self.config, skip_none=False, skip_validation=True)
        return cast(dict[str, Any], load_yaml(text)[self.config.subcommand])

    def _find_checkpoint(self, args: Sequence[str]) -> None:
        config = self.config[self.config.subcommand]
        self._run_dir = config.trainer.run_dir
        if not config.ckpt_path:
            return
        path = find_checkpoint(str(config.ckpt_path), config.output_dir, config.exp_name)
        config.ckpt_path = str(path)
        if self.config.subcommand != "fit":
            if value_of("--trainer.run_dir", args) is None:
                self._run_dir = run_dir_of(path) or path.absolute().parent
        elif continued := _continued_run(config, args):
            self._run_dir = continued
            if ranks.is_first_process():
                refuse_live_run(continued)  # before envs are made

    def instantiate_classes(self) -> None:
        loads = self.config[self.config.subcommand].get("ckpt_path") is not None
        try:
            with weights_follow() if loads else nullcontext():
                super().instantiate_classes()
        except ValueError as error:
            missing = re.search(MISSING_REQUIREMENT, str(error))
            if missing is None:
                raise
            name, package = missing.groups()
            raise ConfigurationError(
                f"{name} needs a package that is not installed: pip install '{package}'"
            ) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config[self.subcommand]
        if self.subcommand == "check":
            self._scratch = TemporaryDirectory()  # no lasting run directory
            alone = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
            kwargs |= {"logger": False, "run_dir": self._scratch.name, **alone}
            return super().instantiate_trainer(**kwargs)
        if self.subcommand != "fit":
            kwargs["logger"] = False
        if self._run_dir:
            kwargs["run_dir"] = str(self._began_in / expanded(self._run_dir))
        kwargs["output_dir"] = str(self._began_in / expanded(config.output_dir))
        return super().instantiate_trainer(**kwargs)

    def check(self, **kwargs: Any) -> None:
        config = self.config[self.subcommand]
        with self._scratch:
            findings = cast(RLTrainer, self.trainer).check(**kwargs)
        function_at(HOOKS["report_findings"])(findings, config.trainer)

    def after_play(self) -> None:
        trainer = cast(RLTrainer, self.trainer)
        film = shown(trainer.run_dir) / "videos" / f"play_{self.model.env_steps}.mp4"
        if self.config[self.subcommand].trainer.video and trainer.is_global_zero:
            tell(f"Film: {film}")

    def before_fit(self) -> None:
        """Check that the run directory is writable, because the errors of loggers are unclear."""
        if self.trainer.is_global_zero:
            check_writable(cast(RLTrainer, self.trainer).run_dir)

    def after_fit(self) -> None:
        """After a stop signal, exit with its status."""
        trainer = cast(RLTrainer, self.trainer)
        # Rank 0 alone: with another status, the launcher would kill it.
        if trainer.is_global_zero and trainer.stop_signal is not None:
            sys.exit(128 + trainer.stop_signal)


class _ParsedError(Exception):
    """Carries the parsed settings out of the constructor of `RLCLI`."""


class _Options(RLCLI):
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        raise _ParsedError(self.settings())


def _parsed(options: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Check options of `fit`, without and with each list in `others`; return YAML."""
    arguments = complete(["fit", *options]).arguments
    for other in others:
        check_run([*arguments, *other])
    try:
        _Options(arguments)
    except _ParsedError as parsed:
        settings = parsed.args[0]
        return dump_yaml({key: settings[key] for key in SECTIONS if key in settings})
    raise AssertionError


def run(arguments: Sequence[str]) -> None:
    """Run the command line; print a user's error as one message, and exit with status 1 or 2."""
    quieten_framework()
    try:
        if arguments[0] not in CORE:
            if is_trusted(arguments):
                find_code_here()
            command_line = CommandLine(run, _parsed)
            run_subcommand(arguments[0], list(arguments[1:]), command_line)
            return
        completed = complete(list(arguments))
        if completed.trusted:
            find_code_here()
            RLCLI(completed.arguments)
        else:
            with only_allowed_imports(completed.typed):
                RLCLI(completed.arguments)
    except Exception as error:
        # jsonargparse wraps a user's error in its own: the chain of causes has the message.
        cause = _curable(error)
        if cause is None:
            raise
        advice = f"\n{CHECK}" if isinstance(cause, EnvFaultError) and arguments[0] == "fit" else ""
        end_with(cause, advice)


CHECK = "rl-cli check, with the same options, plays the env for some seconds and reports more."
"""Advice after an error of the env."""

CURABLE = (ConfigurationError, MisconfigurationException, FloatingPointError, ranks.LostRankError)
"""Errors whose message is enough without a traceback."""


def _curable(error: BaseException) -> BaseException | None:
    """Return the user's error in a chain of causes, or None; jsonargparse wraps such errors."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, CURABLE):
            return chain
        if isinstance(chain, WriterError) and not isinstance(chain.__cause__, ConfigurationError):
            return None  # raised in the env or the policy: the traceback shows where
        chain = chain.__cause__ or chain.__context__
    return None


NAMES_THE_RUN = (
    "rl-cli needs this file to resume the run in its directory. Repair the file, or copy the "
    "checkpoint to another directory to start a new run."
)


def _is_earlier(checkpoint: str, run_dir: Path) -> bool:
    """Return whether the run has later results, which a run from this checkpoint would replace."""
    last = run_dir / CHECKPOINTS / "last.ckpt"
    if Path(checkpoint).resolve() == last.resolve():
        return False  # a run that lives may write a later one between two reads
    try:
        with restoring("counter"):
            checkpoints = [read_checkpoint(path, verify=False) for path in (checkpoint, last)]
            env_steps, last_steps = (int(c[STATE_KEY]["env_steps"]) for c in checkpoints)
    except ConfigurationError:  # a damaged file; `fit` reports it, if it is the resumed one
        return False
    if env_steps < last_steps and ranks.is_first_process():
        later = f"{shown(last)} is {last_steps - env_steps:,} env steps further"
        tell(f"{later}: the run gets a directory of its own.")
    return env_steps < last_steps


def _continued_run(config: Namespace, args: Sequence[str]) -> Path | None:
    """Return the checkpoint's run directory, unless an option that was typed names another."""
    run_dir = run_dir_of(config.ckpt_path)
    if run_dir is None:
        return None
    for flag, directory in {"--trainer.run_dir": run_dir, "--output_dir": run_dir.parent}.items():
        typed = value_of(flag, args)
        if typed is not None and expanded(typed).resolve() != directory.resolve():
            return None
    path = run_dir / "config.yaml"
    try:
        run_config = read_yaml(read_text(path, run_dir), str(path), "")
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"{str(error).strip()} {NAMES_THE_RUN}") from error
    if not isinstance(run_config, dict):
        raise ConfigurationError(f"{path} holds no settings. {NAMES_THE_RUN}")
    # A copied checkpoint with another --exp_name begins a new run.
    if run_config.get("exp_name") != config.exp_name:
        return None
    goes_back = value_of("--trainer.run_dir", args) is not None  # into the directory that is typed
    return run_dir if goes_back or not _is_earlier(config.ckpt_path, run_dir) else None
