"""Run `rl-cli record`: write episodes of a person, a script or a checkpoint into a dataset."""

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import gymnasium
from jsonargparse import Namespace

from lightning_rl import VectorEnv
from lightning_rl.extend.checkpoints import find_checkpoint, load_trained, run_settings
from lightning_rl.extend.cli import (
    NEEDED,
    CommandLine,
    Option,
    handle_signals,
    parse_classes,
)
from lightning_rl.extend.collectors import action_function
from lightning_rl.extend.envs import EnvFactory, make_env
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.files import tell, tell_from_handler
from lightning_rl.extend.policies import picture_keys
from lightning_rl.extensions.datasets.ahead import ActionFunction, ChunksAhead
from lightning_rl.extensions.datasets.playing import ChunkActor, check_fits
from lightning_rl.extensions.datasets.record import (
    RecordedEpisode,
    Recorder,
    neutral_action,
    script_action_function,
    single_env,
)
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from lightning_rl.extensions.teleoperation.intervention import Event, InterventionSource
from lightning_rl.extensions.vla.policy import ChunkPolicy, RealTimeActor

OPTIONS = {
    "path": Option(str, NEEDED, "directory of the dataset; an existing one is extended"),
    "config": Option(str, None, "a training config, for its env"),
    "data.env": Option(EnvFactory, None, "the env, if neither config nor checkpoint names it"),
    "source": Option(InterventionSource, None, "who takes over: Keyboard, Gamepad, SpaceMouse"),
    "script": Option(
        Callable[[Any], Any],
        None,
        "import path of a function that acts: given the observation, it returns an action or None",
    ),
    "ckpt_path": Option(str, None, "a checkpoint, a run directory, or last or best: it acts"),
    "execute": Option(
        int,
        None,
        "actions of a chunk after which the next one is computed. Default: as in the config; else "
        "all, or in real time half, while the rest executes",
        unused=Option.only_with("ckpt_path"),
    ),
    "deterministic": Option(
        bool,
        True,
        "the checkpoint acts by its mode; false draws actions",
        unused=Option.only_with("ckpt_path"),
    ),
    "episodes": Option(int, 20, "number of episodes; re-recorded ones do not count"),
    "fps": Option(float, None, "steps per second. Default: the env's own rate"),
    "real_time": Option(bool, None, "keep that pace. Default: only with a source of interventions"),
    "max_steps": Option(int, None, "of an episode. Default: the env's own limit"),
    "task": Option(str, "", "instruction of the task, as text"),
    "pictures": Option(Literal["video", "png"], None, "png loses nothing. Default: video"),
    "extra": Option(list[str], [], "names of numbers in info that each frame holds: penalties"),
    "ask": Option(
        bool,
        None,
        "ask for the success of an episode if the env does not report it. Default: on a terminal, "
        "with a source of interventions or a real arm",
    ),
    "seed": Option(int, 1, "of the env"),
    **Option.of_checkpoint("ckpt_path"),
}
DESCRIPTION = "Record episodes of a person, a script or a checkpoint into a dataset."


def record(options: Sequence[str], command_line: CommandLine) -> None:
    """Record episodes.

    An episode is safe once its line is printed. Ctrl+C ends the recording before the next step,
    without the current episode.
    """
    interrupt = _Interrupt()
    try:
        options = CommandLine.normalize_options(options)
        config = CommandLine.value_of("--config", options) or CommandLine.value_of("-c", options)
        other_options = [
            option for option in options if option.partition("=")[0] not in ("--config", "-c")
        ]
        checkpoint = CommandLine.value_of("--ckpt_path", options)
        if config is not None and _names_env(options):
            tell(f"--config {config} has no effect: --data.env names the env.", sys.stderr)
        trusted = CommandLine.is_trusted(options)
        # The checkpoint is trusted only on request, so its env's class is imported under the same
        # rule as a typed one.
        env = [] if config is None else _env_option(CommandLine.find_config(config))
        with nullcontext() if trusted else CommandLine.only_allowed_imports([*options, *env]):
            env = env or _env_of(checkpoint, options, trusted)
            _record_episodes(_parsed([*env, *other_options]), interrupt)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        interrupt.close()


def _record_episodes(settings: Namespace, interrupt: "_Interrupt") -> None:
    env = make_env(settings.data.env, 1, "data.env")
    recorded_env = single_env(env)
    writer: EpisodeWriter | None = None
    kept_count = 0
    try:
        acts = settings.ckpt_path is not None or settings.script is not None
        source = settings.source
        is_real = bool(recorded_env.metadata.get("is_real"))
        # Only a person at a terminal can answer the question for success.
        has_person = (source is not None or is_real) and sys.stdin.isatty()
        asks = has_person if settings.ask is None else settings.ask
        # A source of interventions acts alone where neither policy nor script acts.
        in_charge = source is not None and not acts
        tell_unused_in(env, settings.max_steps, settings.pictures)
        if not (source is not None or is_real or settings.real_time):
            _tell_other_rate(settings.fps, env)
        recorder = Recorder(
            recorded_env, source, in_charge, settings.extra, interrupt.answer if asks else None
        )
        require(
            # The neutral action of a real arm would move it to the middle of its limits.
            acts or source is not None or (recorded_env.reports_interventions and not is_real),
            "No source of actions: set --source (Keyboard, Gamepad, SpaceMouse), --script "
            "my_module.my_function, or --ckpt_path of a policy.",
        )
        paced = source is not None if settings.real_time is None else settings.real_time
        in_real_time = paced or is_real
        # The check for Ctrl+C stands before each action, so an episode ends between two steps.
        choose_for = interrupt.asked_before(_action_functions(settings, recorder, in_real_time))
        fps = settings.fps or recorded_env.render_fps
        spaces = (recorded_env.single_observation_space, recorded_env.single_action_space)
        writer = EpisodeWriter(
            settings.path, *spaces, fps, settings.task, settings.pictures or "video"
        )
        played = recorder.record_episodes(
            writer,
            settings.episodes,
            choose_for,
            seed=settings.seed,
            fps=fps if paced else None,
            max_steps=settings.max_steps,
        )
        interrupt.defer()
        with closing(played):  # ends all writes before the dataset is finalised
            for result in played:
                kept_count += result.is_saved
                tell(_line(result, kept_count, settings.episodes))
    finally:
        # No second Ctrl+C may interrupt the end of the dataset; the env stops first, as an arm may
        # move.
        interrupt.hold()
        env.close()
        if writer is not None:
            writer.finalise()
        if kept_count:
            tell(f"Dataset: {settings.path}")


def tell_unused_in(env: VectorEnv, max_steps: int | None, pictures: str | None) -> None:
    """Print a line for each option that has no effect in an env."""
    limit, line = env.max_episode_steps, "--{} {} has no effect: the env {}."
    if max_steps is not None and limit is not None and max_steps > limit:
        reason = f"ends each episode after {limit} steps"
        tell(line.format("max_steps", max_steps, reason), sys.stderr)
    if pictures and not picture_keys(env.single_observation_space):
        tell(line.format("pictures", pictures, "observes no pictures"), sys.stderr)


def _tell_other_rate(fps: float | None, env: VectorEnv) -> None:
    if fps is not None and fps != env.render_fps:
        tell(
            f"--fps {fps:g} does not change the simulation, which takes {env.render_fps:g} steps "
            "per second: only the dataset will say so.",
            sys.stderr,
        )


class _Interrupt:
    """Ctrl+C: an exception during the set-up, and the end before the next step afterwards.

    An exception at an arbitrary line of a step may leave a lock or a file unfinished. A second
    Ctrl+C raises it all the same, for a step that hangs.
    """

    def __init__(self) -> None:
        # Arrow swallows the exception while it looks for pandas, so remember Ctrl+C.
        self._came = self._deferred = self._holds = False
        self.close = handle_signals([signal.SIGINT], self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            tell_from_handler("The dataset is being finished; SIGTERM ends that.")
            return
        is_second, self._came = self._came, True
        if is_second or not self._deferred:
            raise KeyboardInterrupt
        tell_from_handler("The recording ends after this step (Ctrl+C again to end immediately).")

    def defer(self) -> None:
        """From now on, let Ctrl+C wait for the end of the step."""
        self._deferred = True

    def hold(self) -> None:
        """Ignore Ctrl+C from now on: the dataset is being finished."""
        self._holds = True

    def asked_before(
        self, choose_for: Callable[[int], ActionFunction]
    ) -> Callable[[int], ActionFunction]:
        """Wrap choosers: the first step after Ctrl+C ends the recording."""

        def choose_unless(choose: ActionFunction, *step: Any) -> Any:
            self._end_if_asked()
            return choose(*step)

        return lambda number: partial(choose_unless, choose_for(number))

    def answer(self) -> Event | None:
        """Ask how an episode ended; Ctrl+C ends the wait for the answer."""
        # Reading from the terminal is no step: Ctrl+C must end it immediately.
        self._deferred = False
        self._end_if_asked()
        answer = _answer()
        self._deferred = True
        return answer

    def _end_if_asked(self) -> None:
        if self._came:
            raise KeyboardInterrupt


def _line(result: RecordedEpisode, number: int, episodes: int) -> str:
    words = [f"{result.steps} steps", f"return {result.total:.4g}"]
    if result.success is not None:
        words.append("success" if result.success else "failure")
    if result.intervened:
        words.append(f"{result.intervened} steps by a person or a script")
    if result.missed:
        words.append(f"{result.missed} ticks missed: lower fps")
    name = f"episode {number} of {episodes}" if result.is_saved else "to be recorded again"
    return f"{name}: {', '.join(words)}"


def _answer() -> Event | None:
    """Ask on the terminal how an episode ended; None: unknown, also at the end of the input."""
    answers: dict[str, Event | None] = {"y": "success", "n": "failure", "r": "rerecord", "": None}
    while True:
        tell("Success? y, n, r to record it again, or Enter if unknown: ", end="")
        # At the end of the input `readline` gives "", which means unknown: no endless loop.
        if (answer := sys.stdin.readline().strip().lower()) in answers:
            return answers[answer]


def _action_functions(
    settings: Namespace, recorder: Recorder, in_real_time: bool
) -> Callable[[int], ActionFunction]:
    """Return a function that maps the number of an episode to its chooser of actions.

    After an intervention the rest of a chunk is outdated, and a new chunk is computed.
    """
    env = recorder.env
    space = env.single_action_space
    require(
        settings.ckpt_path is None or settings.script is None,
        "--script and --ckpt_path both choose the actions: give one of them.",
    )
    if settings.ckpt_path is None:
        # Without a script the neutral action stays until the source takes over.
        script = settings.script or (lambda observation: neutral_action(space))
        return lambda _: script_action_function(script, space)
    policy = load_trained(
        settings.ckpt_path, trust_code=settings.trust_code, output_dir=settings.output_dir
    ).policy
    size = chunk_size_of(policy.action_space, space)
    name, cure = f"The policy of {settings.ckpt_path}", "record in the env that it was trained in."
    check_fits(policy, env, size, name, cure)
    require(
        settings.execute is None or size is not None,
        "execute is for a policy of chunks, and this one chooses single actions.",
    )
    check_range("execute", settings.execute, minimum=1, maximum=size)
    if getattr(policy, "real_time", None) is not None:
        return _real_time_functions(cast(ChunkPolicy, policy), settings, recorder, in_real_time)
    # In real time the next chunk is computed while the last one executes.
    chunks = ChunksAhead(size, settings.execute) if size is not None and in_real_time else None

    def is_outdated() -> bool:
        return recorder.intervened

    def choose_for(number: int) -> ActionFunction:
        seeds = None if settings.deterministic else [settings.seed + number]
        if chunks is not None:
            return chunks.episode(action_function(policy, 1, seeds), is_outdated)
        return ChunkActor(policy, 1, seeds, size, settings.execute, is_outdated)

    return choose_for


def _real_time_functions(
    policy: ChunkPolicy, settings: Namespace, recorder: Recorder, in_real_time: bool
) -> Callable[[int], ActionFunction]:
    """Return the choosers of a policy whose chunks continue the old ones."""
    assert policy.real_time is not None
    size, horizon = policy.head.chunk_size, policy.real_time.execution_horizon
    require(
        settings.execute in (None, horizon),
        f"--execute is {settings.execute}, but the policy begins a chunk every {horizon} steps "
        "(real_time.execution_horizon): remove --execute, or train with another horizon.",
    )
    chunks = ChunksAhead(size, horizon) if in_real_time else None

    def choose_for(number: int) -> ActionFunction:
        seed = None if settings.deterministic else settings.seed + number
        actor = RealTimeActor(policy, seed)

        def is_outdated() -> bool:
            has_intervened = recorder.intervened
            if has_intervened and chunks is None:
                actor.continue_after(0)
            return has_intervened

        if chunks is not None:
            return chunks.episode(actor, is_outdated, actor.continue_after)
        return ChunkActor(policy, 1, None, size, horizon, is_outdated, actor)

    return choose_for


def chunk_size_of(space: gymnasium.Space[Any], executed: gymnasium.Space[Any]) -> int | None:
    """Return K if the policy chooses chunks of K actions; None for single actions."""
    kinds = gymnasium.spaces.Box | gymnasium.spaces.MultiDiscrete
    # The first axis of a chunk's space counts its actions.
    if isinstance(space, kinds) and space.shape[1:] == executed.shape:
        return space.shape[0]
    return None


def _parsed(arguments: list[str]) -> Namespace:
    settings = parse_classes("record", DESCRIPTION, OPTIONS, arguments)
    require(
        settings.data.env is not None,
        "record needs an env: --config FILE of a training config, --ckpt_path, or --data.env "
        "GymnasiumEnv --data.env.id CartPole-v1.",
    )
    return settings


def _env_option(config: Path) -> list[str]:
    return _env_in(CommandLine.read_config(config), str(config))


def _env_in(settings: Any, name: str) -> list[str]:
    """Return the env of a training config as options, without its chunks."""
    data = settings.get("data") if isinstance(settings, Mapping) else None
    env = data.get("env") if isinstance(data, Mapping) else None
    require(env is not None, f"{name} names no env under data.env: give one, --data.env.")
    env, chunk = without_chunks(env)
    execute = chunk.get("execute")
    option = f"--data.env={env if isinstance(env, str) else json.dumps(env)}"
    return [option] if execute is None else [option, f"--execute={execute}"]


def without_chunks(env: Any) -> tuple[Any, dict[str, Any]]:
    """Return the env within an `ActionChunk` of a config, and the settings of the chunks."""
    if not (isinstance(env, Mapping) and str(env.get("class_path")).endswith("ActionChunk")):
        return env, {}
    chunk = {"chunk_size": 4, **(env.get("init_args") or {})}
    return chunk.pop("env"), chunk


def _names_env(options: Sequence[str]) -> bool:
    return CommandLine.value_of("--data.env", options) is not None


def _env_of(checkpoint: str | None, options: Sequence[str], trusted: bool) -> list[str]:
    """Return the env of the checkpoint's run as an option, unless the options name an env."""
    if checkpoint is None or _names_env(options):
        return []
    directory = CommandLine.value_of("--output_dir", options) or "outputs"
    path = find_checkpoint(checkpoint, directory, None)
    return _env_in(run_settings(path, trusted), str(path))
