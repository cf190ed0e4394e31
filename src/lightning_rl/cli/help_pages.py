"""Lay out the pages of `rl-cli fit --help` and `--model.help PPO`, which jsonargparse generates."""

import inspect
import re
from argparse import SUPPRESS, Action, ArgumentParser, _HelpAction
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from jsonargparse import DefaultHelpFormatter

from lightning_rl.checkpoints.registry import PROBES
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.training.trainer import RLTrainer
from lightning_rl.training.unfit import REFUSED

RUN = (
    *("help", "config", "ckpt_path", "exp_name", "output_dir", "trust_code", "restore_replay"),
    "seed_everything",
)
"""Options of the run, in order; options without a section follow."""

TITLES = {
    "run": "The run",
    "model": "The algorithm, its policy and its optimizer",
    "data": "The envs, and how rollouts are collected and evaluations played",
    "trainer": "The trainer: checkpoints, films, logs",
    "lightning": "The trainer: Lightning's own settings",
}

TITLES_OF = {"--data.help": ("data",), "--trainer.help": ("trainer", "lightning")}
"""Sections that an option shows."""

NOT_LISTED = (
    *(f"trainer.{name}" for name in REFUSED),
    *("trainer.accelerator.help", "trainer.strategy.help", "weights_only"),
)
"""Options that the command line refuses, or that only programs use."""

DOES = {
    "fit": "Train from a config, or resume from a checkpoint.",
    "validate": "Evaluate the policy of a checkpoint.",
    "test": "Evaluate the policy of a checkpoint on seeds that no evaluation has used.",
    "check": "Play the env of a run for some seconds, and report problems before training.",
    "play": "Watch the policy of a checkpoint play the episodes of its evaluation, or film it.",
}

SETTINGS = (
    "A config file takes all of these options, too. Settings of a class: --model.help PPO, "
    "--model.policy.help ActorCritic, --model.optimizer.help Adam, --data.env.help PushCube, "
    "--data.collector.help AsyncCollector, --data.replay.help ReplayBuffer. Options of one "
    "section: --data.help, --trainer.help."
)

SUPPORTED = {
    "trainer.accelerator": "cpu, gpu or mps; auto uses a GPU if there is one (default: auto)",
    "trainer.strategy": "auto: one device; ddp, fsdp: a process for each device (default: auto)",
    "trainer.precision": "32-true, or bf16-mixed: networks in bfloat16 (default: 32-true)",
    "trainer.plugins": "a class of Lightning, or a list of classes (default: null)",
}
"""Help on options whose documentation in Lightning lists unsupported values."""

DESCRIBED = {
    "config": "a YAML file, or the name of a shipped one; may be given several times",
    "ckpt_path": "a checkpoint, a run directory, or last or best of the newest run",
    "seconds": "approximate play time, without the time to create envs (default: 5.0)",
    "json_file": "also write the findings to this file, as JSON",
    "seed_everything": "seed of the run; true draws one",
    "model": "the algorithm; its settings are --model.NAME VALUE",
    "print_config": "print the whole configuration, and exit",
}
"""Help on options, for users instead of programmers."""

FILLED_IN = ("observation_space", "action_space", "params")
"""Arguments of classes that users cannot set."""

FILLED_IN_OF_A_REPLAY = ("num_envs", "device", "seed", "directory", "goals")
"""Arguments of replays that users cannot set."""

BUILDING_BLOCKS = (
    *("Algorithm", "Policy", "Optimizer", "Callback", "Env", "Wrapper", "DummyLogger"),
    *("ActionWrapper", "ObservationWrapper", "RewardWrapper", "ProgressBar", "Checkpoint"),
    *("BaseFinetuning", "BasePredictionWriter", "SaveConfigCallback", "RunConfig"),
    *("GradientAccumulationScheduler", "StochasticWeightAveraging", "ChunkWrapper"),
    *("ReplayableEpisode", "GymnasiumTask", "RandomPolicy", "DatasetSpaces", "RecordedInfo"),
    "ExportedPolicy",
)
"""Base classes, classes that other classes create, and classes that the update ignores."""


class HelpFormatter(DefaultHelpFormatter):
    """Formats each option in short: type, default and class names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_help_position": 28, **kwargs})

    def _get_help_string(self, action: Action) -> str:
        if action.dest in SUPPORTED:
            return SUPPORTED[action.dest]
        # jsonargparse also lists building blocks, which configs do not name.
        text = super()._get_help_string(action)
        return _plain(re.sub(r", known subclasses: (.+?)\)\Z", _names, text))

    def _format_action_invocation(self, action: Action) -> str:
        # `--x+ ITEM` adds to a list; it is the same option.
        return re.sub(r", --\S+\+ .*\Z", "", super()._format_action_invocation(action))


def _names(match: re.Match[str]) -> str:
    names = [path.rpartition(".")[2] for path in match[1].split(", ") if _is_offered(path)]
    return f"; one of: {', '.join(sorted(names))})" if names else ")"


def _is_offered(path: str) -> bool:
    package, _, name = path.rpartition(".")
    ours = package == "lightning_rl.training.callbacks"
    return not (name in BUILDING_BLOCKS or ours or name.startswith("XLA") or name in PROBES)


def _plain(text: str) -> str:
    """Remove Sphinx markup: ``:class:`x.Y` `` becomes `Y`."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"\s*Default: ``[^`]*``\.?", "", text)
    return text.replace("``", "`")


def arrange(parser: ArgumentParser, subcommand: str, sections: Iterable[str] = TITLES) -> None:
    """Sort the options of a subcommand into sections, and hide others, to print help."""
    listed: dict[str, list[Action]] = {name: [] for name in TITLES}
    for action in _actions(parser):
        if action.dest not in NOT_LISTED:
            action.help = DESCRIBED.get(action.dest, action.help)
            listed[_section_of(action)].append(action)
    listed["run"].sort(key=_place)
    parser.usage = f"rl-cli {subcommand} [--config FILE] [--ckpt_path PATH] [--NAME VALUE ...]"
    parser.description = (
        f"{DOES[subcommand]} {SETTINGS}\n\nShipped: {', '.join(shipped_configs())}."
    )
    # jsonargparse made a group for each class; `sections` give the order of the page.
    parser._action_groups = []
    for name in sections:
        group = parser.add_argument_group(TITLES[name])
        group._group_actions.extend(listed[name])


def describe_class(parser: ArgumentParser) -> None:
    """Hide arguments that users cannot set from the help on a class."""
    parser.usage = SUPPRESS
    parser.description = (parser.description or "").partition("=")[2]
    for group in parser._action_groups:
        # In place, because the parser holds this list.
        group._group_actions[:] = [
            action
            for action in group._group_actions
            if not _is_filled_in(action.dest.removesuffix(".help"))
        ]


def _is_filled_in(path: str) -> bool:
    section, _, name = path.rpartition(".")
    return name in FILLED_IN or (section == "data.replay" and name in FILLED_IN_OF_A_REPLAY)


class SectionHelp(_HelpAction):
    """`--data.help`: show the options of some sections only."""

    def __call__(self, parser: Any, *args: Any, **kwargs: Any) -> None:
        arrange(parser, parser.subcommand, TITLES_OF[self.option_strings[0]])
        super().__call__(parser, *args, **kwargs)


def _actions(parser: ArgumentParser) -> Iterator[Action]:
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help != SUPPRESS and "".join(action.option_strings).startswith("-"):
                yield action


def _section_of(action: Action) -> str:
    section, _, name = action.dest.partition(".")
    if section == "trainer" and name:
        settings = inspect.signature(RLTrainer.__init__).parameters
        # `trainer.video.fps` belongs to the setting `video`.
        return "trainer" if name.split(".")[0] in settings else "lightning"
    return section if section in TITLES else "run"


def _place(action: Action) -> int:
    with suppress(ValueError):
        return RUN.index(action.dest)
    return len(RUN)  # behind the listed options
