"""Run `rl-cli recap`: improve a policy in rounds of collecting, labelling and cloning.

Source: Physical Intelligence 2025, "pi*0.6: a VLA That Learns From Experience" (RECAP).
"""

import json
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from jsonargparse import Namespace

from lightning_rl import Algorithm, ConfigurationError, VectorEnv
from lightning_rl.extend.checkpoints import find_checkpoint
from lightning_rl.extend.cli import (
    NEEDED,
    CommandLine,
    Option,
    parse_classes,
    parse_options,
)
from lightning_rl.extend.collectors import wilson_interval
from lightning_rl.extend.envs import EnvFactory, make_env
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.files import expanded, shown, tell, write_atomically
from lightning_rl.extensions.checks.play import random_actions
from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.extensions.datasets.label import LabelSettings, label_dataset
from lightning_rl.extensions.datasets.lerobot_format import LABELS
from lightning_rl.extensions.datasets.playing import play_policy, play_side_by_side
from lightning_rl.extensions.datasets.reader import read_episodes
from lightning_rl.extensions.datasets.record_command import tell_unused_in, without_chunks
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from lightning_rl.extensions.recap.label_command import Run, fit_value, summary, value_config
from lightning_rl.extensions.recap.value_fit import ValueFit


def _plays_none(settings: Namespace) -> str:
    recorded = settings["from"] is not None and settings.rounds == 1
    return "the only round takes the episodes of --from" if recorded else ""


OPTIONS = {
    "config": Option(str, NEEDED, "of BehaviorCloning with a ConditionedPolicy, or with weights"),
    "run_dir": Option(str, NEEDED, "directory of all results; an unfinished one is resumed"),
    "rounds": Option(int, 3, "number of rounds"),
    "episodes": Option(
        int, 400, "episodes that the policy plays in each round", unused=_plays_none
    ),
    "base": Option(str, None, "checkpoint that every round starts from. Default: train the config"),
    "from": Option(str, None, "dataset for the first round, in which then no episode is played"),
    "value": Option(str, None, "a config of ValueFit. Default: a small network, 500 steps"),
    "n_steps": Option(int, None, "rewards of an advantage before the value. Default: all"),
    "positive": Option(float, None, "share of good steps, see rl-cli label"),
    "doubtful": Option(Literal["warn", "refuse"], "warn", "see rl-cli label"),
    "deterministic": Option(bool, False, "act by the policy's mode; false draws actions"),
    "eval_episodes": Option(int, 200, "episodes of each evaluation"),
    "num_envs": Option(int, 64, "number of episodes in parallel"),
    "max_steps": Option(int, None, "of an episode. Default: the env's own limit"),
    "task": Option(str, "", "instruction of the task, as text", unused=_plays_none),
    "pictures": Option(Literal["video", "png"], "png", "format of pictures; png loses nothing"),
    "seed": Option(int, 1, "of the played episodes"),
    **Option.of_checkpoint("base"),
}
DESCRIPTION = (
    "Improve a policy in rounds: collect episodes, fit a value, label, clone from the base. "
    "Settings of the config may follow, as in fit: --model.learning_rate 1e-4."
)
STATE = "recap.json"
"""File in the run directory with the settings and the results of finished phases."""

OF_FIT = ("--model.", "--data.", "--trainer.")
"""Options that change the config, as in `rl-cli sweep`."""

FREE = ("rounds", "output_dir", "trust_code", "run_dir")
"""Options that may change when a run is resumed."""

SEEDS, SEEDS_OF_A_ROUND, MOST_ROUNDS = 10_000_000, 100_000, 98
"""Seeds reserved for a run and for a round; all evaluations of a run use the same seeds."""


def recap(options: Sequence[str], command_line: CommandLine) -> None:
    """Run the unfinished rounds, and print a table; options of `fit` change the config."""
    typed = CommandLine.normalize_options(options)
    # As in `rl-cli sweep`: options of fit change the config, the others are this command's.
    changes = [option for option in typed if option.startswith(OF_FIT)]
    recap_options = [option for option in typed if option not in changes]
    settings = parse_options("recap", DESCRIPTION, OPTIONS, recap_options)
    for name in ("episodes", "eval_episodes"):
        check_range(name, settings[name], minimum=1, maximum=SEEDS_OF_A_ROUND)
    check_range("rounds", settings.rounds, minimum=1, maximum=MOST_ROUNDS)
    check_range("num_envs", settings.num_envs, minimum=1)
    check_range("max_steps", settings.max_steps, minimum=1)
    check_range("seed", settings.seed, minimum=0, maximum=200)
    base = [] if settings.base is None else [f"--ckpt_path={settings.base}"]
    trusted = CommandLine.is_trusted([*typed, *base])
    Rounds(settings, command_line.run, trusted, typed, changes).run()


class Rounds:
    """Runs the phases of each round, and skips those that the run directory has already.

    Args:
        settings: options of the command line.
        run: runs a command line of `rl-cli`.
        trusted: whether checkpoints may name any code.
        typed: the command line; modules that it or the env of the config names may be imported.
        changes: options of `fit` that change the config.

    Raises:
        ConfigurationError: for a config that rounds cannot improve, and for a run directory of
            other settings.
    """

    def __init__(
        self,
        settings: Namespace,
        run: Run,
        trusted: bool,
        typed: Sequence[str],
        changes: Sequence[str] = (),
    ) -> None:
        self.settings, self._run, self._trusted = settings, run, trusted
        self._typed_pictures = CommandLine.value_of("--pictures", typed)
        self.config = _checked(_read(settings.config, changes), settings.config)
        self.value = None if settings.value is None else _read(settings.value)
        require(
            self.value is None or _is_a("ReturnFramesEnv", self.value.get("data", {}).get("env")),
            f"{settings.value} fits no value of recorded steps: set data.env: {{class_path: "
            "ReturnFramesEnv}, as on the page RECAP.",
        )
        self.directory = expanded(settings.run_dir).absolute()
        self.dataset = self.directory / "dataset"
        self._labels = LabelSettings(
            n_steps=settings.n_steps, positive=settings.positive, doubtful=settings.doubtful
        )
        env, self.chunk = without_chunks(self.config["data"]["env"])
        # The config is a file of anyone: its env may import only what the user typed.
        with CommandLine.only_allowed_imports([*typed, json.dumps(env)]):
            self._make_env = _factory(env)
        self._state = self._opened_state()

    def run(self) -> None:
        """Run the phases of all rounds."""
        demonstrations = self.config["data"]["collector"].get("init_args", {}).get("path")
        if self.settings["from"] is not None:
            self._phase("recordings", self._copy_recordings)
        elif demonstrations is not None:
            tell(
                f"The rounds will train on played episodes, not on {demonstrations}. If its "
                f"episodes have success labels, --from {demonstrations} adds them."
            )
        if self.value is not None and "round 1 value" not in self._state["done"]:
            self._rehearse_value()
        self._phase("base", self._base)
        # Before the first round, so that each round compares with it.
        self._phase("base evaluation", partial(self._evaluate, 0))
        for number in range(1, self.settings.rounds + 1):
            for name, work in (
                ("collection", self._collect),
                ("value", self._fit_value),
                ("labels", self._label),
                ("policy", self._refit),
                ("evaluation", self._evaluate),
            ):
                self._phase(f"round {number} {name}", partial(work, number))
        tell(self._table())

    # --- phases ---

    def _copy_recordings(self) -> dict[str, Any]:
        """Copy the dataset of `--from`, and check that episodes of the env can extend the copy."""
        path = self.settings["from"]
        episodes = read_episodes(path)
        extras = {*getattr(episodes, "extras", ())} - {*LABELS}
        require(
            not extras,
            f"{path} has the extras {', '.join(sorted(extras))}, which episodes of the rounds do "
            "not have: record it without them (rl-cli record without --extra), or copy it without "
            "them: EpisodeWriter.write(replace(episode, extra={})).",
        )
        unknown = episodes.successes().count(None)
        require(
            unknown == 0,
            f"{unknown} episodes of {path} have no success label: label them, rl-cli label {path} "
            "--success NUMBERS --failure all.",
        )
        # A kill while copying leaves only the .copy, so the dataset is never half a copy.
        for place in (self.dataset, self.dataset.with_suffix(".copy")):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(expanded(path), place)
        place.rename(self.dataset)
        with closing(self._new_env(1)) as env:
            self._writer(env).finalise()
        return {}

    def _rehearse_value(self) -> None:
        """Fit the value for one iteration: its mistakes show before hours of training and play."""
        tell("--- rehearsal of the value ---")
        with TemporaryDirectory() as folder:
            dataset, config = self.dataset, deepcopy(self.value or {})
            settings = config["data"]["env"].setdefault("init_args", {})
            if self.settings["from"] is None:
                dataset = Path(folder) / "dataset"
                self._write_random_episodes(dataset, settings.get("folds", 4))
            settings["path"] = str(dataset)
            fit_value(
                config,
                Path(folder) / "value",
                lambda arguments: self._run(
                    [
                        *arguments,
                        "--trainer.fast_dev_run=true",
                        "--trainer.enable_progress_bar=false",
                    ]
                ),
            )

    def _write_random_episodes(self, dataset: Path, count: int) -> None:
        """Write short episodes of random actions."""
        with closing(self._new_env(1)) as env:
            writer = self._writer(env, dataset)
            draw = random_actions(env.single_observation_space, env.single_action_space, 1, 0)
            for seed in range(count):
                for episode in play_side_by_side(env, lambda seen, _: draw(seen), [seed], 2):
                    episode.success = bool(seed % 2)
                    writer.write(episode)
            writer.finalise()

    def _base(self) -> dict[str, Any]:
        settings = self.settings
        if settings.base is not None:
            checkpoint = find_checkpoint(settings.base, settings.output_dir)
            return {"checkpoint": str(checkpoint.absolute())}
        self._fit("base", _asking_for(self.config, "absent"))
        return {"checkpoint": str(self.directory / "base" / "checkpoints" / "last.ckpt")}

    def _collect(self, number: int) -> dict[str, Any]:
        """Extend the dataset by the episodes of a round, except those written before a kill."""
        settings = self.settings
        old_total = 0 if number == 1 else self._done(f"round {number - 1} collection")["total"]
        if number > 1 or settings["from"] is None:
            # Each round has a block of seeds of its own; a round never plays an episode twice.
            first = settings.seed * SEEDS + number * SEEDS_OF_A_ROUND
            written_count = _count(self.dataset) - old_total
            with (
                closing(self._new_env(settings.num_envs)) as env,
                closing(self._played(env, number - 1, first, settings.episodes)) as played,
            ):
                writer = self._writer(env)
                # After a kill the same seeds play the same episodes: skip those that are written.
                for place, episode in enumerate(played):
                    if place >= written_count:
                        # An episode without a `success` entry counts as a failure.
                        episode.success = bool(episode.success)
                        writer.write(episode)
                writer.finalise()
        new = read_episodes(self.dataset).successes()[old_total:]
        return {"total": old_total + len(new), "episodes": len(new), "successes": new.count(True)}

    def _fit_value(self, number: int) -> dict[str, Any]:
        config = deepcopy(self.value)
        if config is None:
            config = value_config(str(self.dataset), {}, 500, self.settings.seed)
        config["data"]["env"].setdefault("init_args", {})["path"] = str(self.dataset)
        self._fit(f"round_{number}/value", config)
        return {}

    def _label(self, number: int) -> dict[str, Any]:
        module = ValueFit.load_from_checkpoint(
            self.directory / f"round_{number}" / "value", trust_code=self._trusted
        )
        labels = label_dataset(self.dataset, self._labels, value=module.values)
        tell(summary(labels))
        error = sum(task.relative_error * task.steps for task in labels.tasks) / labels.steps
        return {"positive": labels.positive / labels.steps, "error_over_spread": error}

    def _refit(self, number: int) -> dict[str, Any]:
        config = _asking_for(self.config, "good")
        collector_settings = config["data"]["collector"].setdefault("init_args", {})
        for name in ("episodes", "path"):  # of the demonstrations that the base was cloned from
            collector_settings.pop(name, None)
        collector_settings["path"] = str(self.dataset)
        if _conditioned(config) is not None:
            collector_settings["condition"] = "advantage_positive"
        self._fit(f"round_{number}/policy", config, self._checkpoint(0))
        return {}

    def _evaluate(self, number: int) -> dict[str, Any]:
        settings = self.settings
        # A block after those of all rounds: every policy is tested on the same episodes.
        first = settings.seed * SEEDS + (MOST_ROUNDS + 1) * SEEDS_OF_A_ROUND
        with (
            closing(self._new_env(settings.num_envs)) as env,
            closing(self._played(env, number, first, settings.eval_episodes)) as played,
        ):
            if number == 0:
                tell_unused_in(env, settings.max_steps, self._typed_pictures)
            successes = [episode.success for episode in played]
        require(
            number > 0 or any(success is not None for success in successes),
            f"{type(env).__name__} reported no success in {len(successes)} episodes, but RECAP "
            "labels by success and failure: return info['success'] when an episode ends.",
        )
        return {"episodes": len(successes), "successes": successes.count(True)}

    # --- parts of phases ---

    def _new_env(self, num_envs: int) -> VectorEnv:
        return make_env(self._make_env, num_envs, "data.env")

    def _writer(self, env: VectorEnv, dataset: Path | None = None) -> EpisodeWriter:
        spaces = (env.single_observation_space, env.single_action_space)
        task, pictures = self.settings.task, self.settings.pictures
        return EpisodeWriter(dataset or self.dataset, *spaces, env.render_fps, task, pictures)

    def _played(self, env: VectorEnv, number: int, first: int, count: int) -> Generator[Episode]:
        """Yield episodes by the policy of a round, with the seeds from `first` on.

        A thread plays the next `num_envs` episodes while the caller writes the previous ones.
        """
        checkpoint = self._checkpoint(number)
        policy = Algorithm.load_from_checkpoint(checkpoint, trust_code=self._trusted).policy
        acting = {"deterministic": self.settings.deterministic, **self.chunk}

        def play(begin: int) -> list[Episode]:
            seeds = range(begin, min(begin + env.num_envs, first + count))
            return list(play_policy(env, policy, seeds, self.settings.max_steps, **acting))

        with ThreadPoolExecutor(1, "player") as thread:
            future = thread.submit(play, first)
            for begin in range(first + env.num_envs, first + count, env.num_envs):
                episodes, future = future.result(), thread.submit(play, begin)
                yield from episodes
            yield from future.result()

    def _fit(self, name: str, config: dict[str, Any], base: Path | None = None) -> None:
        """Run or resume `fit` in the folder `name` of the run directory."""
        run_dir = self.directory / name
        last = run_dir / "checkpoints" / "last.ckpt"
        options = [] if base is None else [f"--trainer.init_from={base}"]
        # An interrupted `fit` of this phase continues; without a checkpoint it starts again.
        if last.is_file():
            options = [f"--ckpt_path={last}", f"--trust_code={str(self._trusted).lower()}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
        # One process: `auto` would take all GPUs, and the phases follow each other here.
        config["trainer"] = {"devices": 1, **config.get("trainer", {})}
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        fit_value(config, run_dir, lambda arguments: self._run([*arguments, *options]))

    def _checkpoint(self, number: int) -> Path:
        """Return the checkpoint of the policy of a round; of the base for 0."""
        if number == 0:
            return Path(self._done("base")["checkpoint"])
        return self.directory / f"round_{number}" / "policy" / "checkpoints" / "last.ckpt"

    # --- what is finished ---

    def _opened_state(self) -> dict[str, Any]:
        options = {name: value for name, value in self.settings.items() if name not in FREE}
        content = {**options, "config": self.config, "value": self.value}
        # Through JSON, because the file to compare with has lists where these settings have tuples.
        settings = json.loads(json.dumps(content))
        file = self.directory / STATE
        if not file.is_file():
            self.directory.mkdir(parents=True, exist_ok=True)
            return {"settings": settings, "done": {}}
        state: dict[str, Any] = json.loads(file.read_text())
        old = state["settings"]
        changed = [name for name in settings if settings[name] != old.get(name)]
        require(
            not changed,
            f"{file} is of a run with another {', '.join(changed)}: resume it with its own "
            "options, or name another run_dir.",
        )
        return state

    def _done(self, phase: str) -> dict[str, Any]:
        result: dict[str, Any] = self._state["done"][phase]
        return result

    def _phase(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        if name in self._state["done"]:
            return
        tell(f"--- {name} ---")
        # After the work: a killed phase has no entry, and runs again.
        self._state["done"][name] = work()
        text = json.dumps(self._state, indent=1).encode()
        write_atomically(self.directory / STATE, lambda file: file.write(text))

    def _table(self) -> str:
        lines = [f"{'':8} {'collected':>16} {'positive':>9} {'error/spread':>13} {'success':>18}"]
        for number in range(self.settings.rounds + 1):
            collected = positive = error = ""
            name = f"round {number}" if number else "base"
            if number:
                new, labels = self._done(f"{name} collection"), self._done(f"{name} labels")
                collected = f"{new['successes']} of {new['episodes']}"
                positive = f"{labels['positive']:.2f}"
                error = f"{labels['error_over_spread']:.2f}"
            tested = self._done(f"{name} evaluation")
            low, high = wilson_interval(tested["successes"], tested["episodes"])
            rate = tested["successes"] / tested["episodes"]
            success = f"{rate:.3f} ({low:.2f}-{high:.2f})"
            lines.append(f"{name:8} {collected:>16} {positive:>9} {error:>13} {success:>18}")
        return "\n".join([*lines, f"Run directory: {shown(self.directory)}"])


def _read(name: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    file = CommandLine.find_config(name)
    if changes:
        return CommandLine.check_run(["fit", f"--config={file}", *changes])
    config = CommandLine.read_config(file)
    return config if isinstance(config, dict) else {}


def _count(dataset: Path) -> int:
    return len(read_episodes(dataset)) if (dataset / "meta" / "info.json").is_file() else 0


def _conditioned(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a config's ConditionedPolicy; None for another policy."""
    policy = config["model"].get("init_args", {}).get("policy")
    if not _is_a("ConditionedPolicy", policy):
        return None
    # `setdefault`, so that the caller's changes reach the config.
    settings: dict[str, Any] = policy.setdefault("init_args", {})
    return settings


def _is_a(name: str, part: Any) -> bool:
    """Return whether a part of a config names a class."""
    return isinstance(part, dict) and str(part.get("class_path")).endswith(name)


def _asking_for(config: Mapping[str, Any], condition: str) -> dict[str, Any]:
    """Return a copy of a config whose policy acts by a condition; `absent`: without labels."""
    changed = deepcopy(dict(config))
    conditioned = _conditioned(changed)
    if conditioned is not None:
        conditioned["condition"] = condition
    if condition == "absent":
        # The base has no labels, so it can use neither their weights nor guidance.
        changed["model"]["init_args"].pop("advantage_temperature", None)
        (conditioned or {}).pop("guidance", None)
    return changed


def _checked(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a config that the rounds can train with.

    Raises:
        ConfigurationError: for another algorithm, collector or number of processes, and for a
            policy that ignores the labels.
    """
    model, data, trainer = (config.get(key) or {} for key in ("model", "data", "trainer"))
    require(
        _is_a("BehaviorCloning", model)
        and _is_a("DatasetCollector", data.get("collector"))
        and "env" in data,
        f"rl-cli recap clones: {name} needs model: {{class_path: BehaviorCloning}}, "
        "data.collector: {class_path: DatasetCollector}, and data.env, as in recap_doors.yaml.",
    )
    weighted = model.get("init_args", {}).get("advantage_temperature") is not None
    require(
        weighted or _conditioned(config) is not None,
        f"The policy of {name} ignores the labels, so no round can improve it: set model.policy: "
        "{class_path: ConditionedPolicy, ...}, or model.advantage_temperature: 0.05.",
    )
    devices, strategy = trainer.get("devices", 1), trainer.get("strategy", "auto")
    if devices not in (1, "1") or strategy != "auto":
        raise ConfigurationError(
            f"rl-cli recap trains in one process, and {name} has trainer.devices: {devices} and "
            f"trainer.strategy: {strategy}: remove them. For more, run the phases by rl-cli fit, "
            "label and fit."
        )
    return config


def _factory(env: Any) -> EnvFactory:
    option = {"data.env": Option(EnvFactory, NEEDED, "the env")}
    text = env if isinstance(env, str) else json.dumps(env)
    # Parsed like a typed option, so that a wrong setting gets the same message.
    factory: EnvFactory = parse_classes(
        "recap", DESCRIPTION, option, [f"--data.env={text}"]
    ).data.env
    return factory
