"""Run `rl-cli record`: episodes of a person, a script or a checkpoint, into a dataset."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

from jsonargparse import Namespace

from lightning_rl.checkpoints.format import CONFIG_KEY, read_checkpoint
from lightning_rl.checkpoints.loading import load_trained
from lightning_rl.checkpoints.trust import checked_config, only_allowed_imports
from lightning_rl.cli.arguments import is_trusted, value_of
from lightning_rl.cli.config_files import find_config
from lightning_rl.cli.help_pages import HelpFormatter
from lightning_rl.cli.kept_config import config_of
from lightning_rl.cli.options import OptionParser, check_names, explained_refusals
from lightning_rl.cli.parsing import check_classes, check_options, take_numpy_numbers
from lightning_rl.collectors.evaluation import chooser_of
from lightning_rl.collectors.loop import Chooser
from lightning_rl.datasets.record import Recorded, Recorder, neutral_action, script_chooser
from lightning_rl.datasets.writer import EpisodeWriter
from lightning_rl.envs import GymnasiumEnv, InterventionSource
from lightning_rl.envs.factories import EnvFactory, make_env
from lightning_rl.system.errors import require
from lightning_rl.system.files import read_text
from lightning_rl.system.plain_yaml import read_yaml
from lightning_rl.system.runs import find_checkpoint

OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "path": (str, None, "directory of the dataset; an existing one is extended"),
    "data.env": (EnvFactory, None, "the env, where neither config nor checkpoint says which"),
    "source": (InterventionSource, None, "who may take over: Keyboard, Gamepad, SpaceMouse"),
    "script": (
        Callable[[Any], Any],
        None,
        "import path of a function that acts: given the observation, it returns an action or None",
    ),
    "ckpt_path": (str, None, "a checkpoint, a run directory, or last or best: its policy acts"),
    "deterministic": (bool, True, "it acts by the mode of its distribution; false draws actions"),
    "episodes": (int, 20, "how many; those that are recorded again do not count"),
    "fps": (float, None, "steps per second; what the env says where not given"),
    "real_time": (bool, None, "keep that pace; where not given, if there is a source"),
    "max_steps": (int, None, "of an episode; the env's own limit where not given"),
    "task": (str, "", "what is to be done, in words"),
    "pictures": (Literal["video", "png"], "video", "how they are kept; png loses nothing"),
    "extra": (list[str], [], "names of numbers in info that each frame holds, such as penalties"),
    "seed": (int, 1, "of the env"),
    "output_dir": (str, "outputs", "where last and best are looked for"),
    "trust_code": (bool, False, "run whatever code the configuration in a checkpoint names"),
}
"""By their names: type, default and help."""


def record(options: Sequence[str]) -> None:
    """Record episodes, as options of the command line say.

    Each is safe once its line is printed. Ctrl+C ends the recording, without the episode under way.

    Raises:
        ConfigurationError: for options that do not fit together, and what env, policy, source and
            dataset refuse.
    """
    interrupt = _Interrupt()
    try:
        options, configs = _without_configs(options)
        check_options(options)
        check_names("record", options, OPTIONS)
        checkpoint = value_of("--ckpt_path", options)
        trusted = is_trusted(options)
        with nullcontext() if trusted else only_allowed_imports(options):
            env = configs or _env_of(checkpoint, options, trusted)
            _record(_parsed([*env, *options], options), interrupt)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        interrupt.close()


def _record(settings: Namespace, interrupt: "_Interrupt") -> None:
    made = make_env(settings.data.env, 1, "data.env")
    env = cast(GymnasiumEnv, made)
    writer: EpisodeWriter | None = None
    kept = 0
    try:
        acts = settings.ckpt_path is not None or settings.script is not None
        source = settings.source
        recorder = Recorder(env, source, source is not None and not acts, settings.extra)
        require(
            acts or source is not None or env.reports_interventions,
            "Nobody acts: give --source (Keyboard, Gamepad, SpaceMouse), --script "
            "my_module.my_function, or --ckpt_path of a policy.",
        )
        choose_for = interrupt.asked_before(_choosers(settings, env))
        fps = settings.fps or env.render_fps
        spaces = (env.single_observation_space, env.single_action_space)
        writer = EpisodeWriter(settings.path, *spaces, fps, settings.task, settings.pictures)
        paced = source is not None if settings.real_time is None else settings.real_time
        played = recorder.record(
            writer,
            settings.episodes,
            choose_for,
            seed=settings.seed,
            fps=fps if paced else None,
            max_steps=settings.max_steps,
        )
        with closing(played):  # nothing is written any more when the dataset is finalised
            for result in played:
                kept += result.kept
                print(_line(result, kept, settings.episodes), flush=True)
    finally:
        interrupt.hold()
        made.close()
        if writer is not None:
            writer.finalise()
        if kept:
            print(f"Dataset: {settings.path}", flush=True)


class _Interrupt:
    """Notes Ctrl+C: Arrow swallows the exception while it looks for pandas."""

    def __init__(self) -> None:
        self._came = self._holds = False
        self._before = signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            os.write(2, b"\nThe dataset is being finished; SIGTERM ends that.\n")
            return
        self._came = True
        raise KeyboardInterrupt

    def hold(self) -> None:
        """Interrupt no more: the dataset is being finished."""
        self._holds = True

    def asked_before(self, choose_for: Callable[[int], Chooser]) -> Callable[[int], Chooser]:
        """Return the same, but end the recording at its next step once the signal has come."""

        def choose_unless(choose: Chooser, *step: Any) -> Any:
            if self._came:
                raise KeyboardInterrupt
            return choose(*step)

        return lambda number: partial(choose_unless, choose_for(number))

    def close(self) -> None:
        """Restore the handler of the signal."""
        signal.signal(signal.SIGINT, self._before)


def _line(result: Recorded, kept: int, episodes: int) -> str:
    """Return the line about an episode."""
    words = [f"{result.steps} steps", f"return {result.total:.4g}"]
    if result.success is not None:
        words.append("success" if result.success else "failure")
    if result.intervened:
        words.append(f"{result.intervened} steps by a person or a script")
    if result.missed:
        words.append(f"{result.missed} ticks missed: lower fps")
    name = f"episode {kept} of {episodes}" if result.kept else "to be recorded again"
    return f"{name}: {', '.join(words)}"


def _choosers(settings: Namespace, env: GymnasiumEnv) -> Callable[[int], Chooser]:
    """Return what chooses the actions of an episode, by its number."""
    space = env.single_action_space
    require(
        settings.ckpt_path is None or settings.script is None,
        "--script and --ckpt_path both choose the actions: give one of them.",
    )
    if settings.ckpt_path is None:
        script = settings.script or (lambda observation: neutral_action(space))
        return lambda _: script_chooser(script, space)
    policy = load_trained(
        settings.ckpt_path, trust_code=settings.trust_code, output_dir=settings.output_dir
    ).policy
    for kind, theirs in {"observation": env.single_observation_space, "action": space}.items():
        own = getattr(policy, f"{kind}_space")
        require(
            own == theirs,
            f"The policy of {settings.ckpt_path} has the {kind} space {own}, and the env has "
            f"{theirs}: record in the env that it was trained in.",
        )

    def choose_for(number: int) -> Chooser:
        return chooser_of(policy, 1, None if settings.deterministic else [settings.seed + number])

    return choose_for


def _parsed(arguments: list[str], typed: Sequence[str]) -> Namespace:
    """Check the options, and make what they say."""
    take_numpy_numbers()
    parser = OptionParser(
        prog="rl-cli record",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        description="Record episodes of a person, a script or a checkpoint into a dataset.",
    )
    for name, (kind, default, text) in OPTIONS.items():
        needed = {} if name not in ("path",) else {"required": True}
        kind = kind if default is not None or needed else kind | None
        parser.add_argument(f"--{name}", type=kind, default=default, help=text, **needed)
    parser.add_argument("--config", default=None, type=str, help="a training config, for its env")
    with explained_refusals(typed):
        parsed = parser.parse_args(arguments)
        check_classes(parsed)
        settings = parser.instantiate(parsed)
    require(
        settings.data.env is not None,
        "record needs an env: --config FILE of a training config, --ckpt_path, or --data.env "
        "GymnasiumEnv --data.env.id CartPole-v1.",
    )
    return cast(Namespace, settings)


def _without_configs(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options without configs, and as an option the env that the last of these names."""
    rest: list[str] = []
    env: list[str] = []
    waiting = False
    for option in options:
        flag, _, inline = option.partition("=")
        if waiting or (flag in ("--config", "-c") and inline):
            env, waiting = _env_option(find_config(option if waiting else inline)), False
        elif flag in ("--config", "-c"):
            waiting = True
        else:
            rest.append(option)
    return rest, env


def _env_option(config: Path) -> list[str]:
    return _env_in(read_yaml(read_text(config), str(config)), str(config))


def _env_in(settings: Any, name: str) -> list[str]:
    """Return the env of a training config as an option."""
    data = settings.get("data") if isinstance(settings, Mapping) else None
    env = data.get("env") if isinstance(data, Mapping) else None
    require(env is not None, f"{name} names no env under data.env: give one, --data.env.")
    return [f"--data.env={env if isinstance(env, str) else json.dumps(env)}"]


def _env_of(checkpoint: str | None, options: Sequence[str], trusted: bool) -> list[str]:
    """Return the env of the run that a checkpoint is of, as an option, if none is given."""
    given = any(option.partition("=")[0] == "--data.env" for option in options)
    if checkpoint is None or given:
        return []
    path = find_checkpoint(checkpoint, value_of("--output_dir", options) or "outputs", None)
    content = read_checkpoint(path, whole=False)
    require(
        CONFIG_KEY in content,
        f"The checkpoint {path} does not say which env it was trained in: give --config or "
        "--data.env.",
    )
    text = config_of(content, path)
    if not trusted:
        text = checked_config(text, path).config
    return _env_in(read_yaml(text, str(path)), str(path))
