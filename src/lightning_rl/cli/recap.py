"""Run `rl-cli recap`: improve a policy in rounds of collecting, labelling and cloning.

Source: Physical Intelligence 2025, "pi*0.6: a VLA That Learns From Experience" (RECAP).
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace

from lightning_rl.algorithms import Algorithm, ValueFit
from lightning_rl.cli.arguments import is_trusted
from lightning_rl.cli.checking import check_options
from lightning_rl.cli.config_files import find_config
from lightning_rl.cli.imports import only_allowed_imports
from lightning_rl.cli.label import Run, fit_value, summary, value_config
from lightning_rl.cli.options import (
    FOR_CHECKPOINTS,
    NEEDED,
    Option,
    explained_refusals,
    option_parser,
    parse_options,
)
from lightning_rl.collectors.evaluation import MAX_EPISODE_STEPS, wilson_interval
from lightning_rl.datasets import EpisodeWriter, read_episodes
from lightning_rl.datasets.episode import Episode
from lightning_rl.datasets.label import LabelSettings, label_dataset
from lightning_rl.datasets.playing import play_policy
from lightning_rl.envs import VectorEnv
from lightning_rl.envs.factories import EnvFactory, make_env
from lightning_rl.system.errors import ConfigurationError, check_range, require
from lightning_rl.system.files import expanded, read_text, shown, write_atomically
from lightning_rl.system.plain_yaml import read_yaml
from lightning_rl.system.runs import find_checkpoint

OPTIONS = {
    "config": Option(str, NEEDED, "of BehaviorCloning with a ConditionedPolicy, or with weights"),
    "run_dir": Option(str, NEEDED, "directory of all results; an unfinished one is resumed"),
    "rounds": Option(int, 3, "number of rounds"),
    "episodes": Option(int, 400, "episodes that the policy plays in each round"),
    "base": Option(str, None, "checkpoint to begin with. Default: a clone by the config"),
    "from": Option(str, None, "dataset in place of the episodes of the first round"),
    "value": Option(str, None, "a config of ValueFit. Default: a small network, 500 steps"),
    "n_steps": Option(int, None, "rewards of an advantage before the value. Default: all"),
    "positive": Option(float, None, "share of good steps, see rl-cli label"),
    "doubtful": Option(Literal["warn", "refuse"], "warn", "see rl-cli label"),
    "deterministic": Option(bool, False, "play by the mode of the policy; false draws actions"),
    "eval_episodes": Option(int, 200, "episodes of each evaluation"),
    "num_envs": Option(int, 64, "episodes that are played in parallel"),
    "max_steps": Option(int, None, "of an episode. Default: the env's own limit"),
    "task": Option(str, "", "instruction of the task, as text"),
    "pictures": Option(Literal["video", "png"], "png", "format of pictures; png loses nothing"),
    "seed": Option(int, 1, "of the played episodes"),
    **FOR_CHECKPOINTS,
}
DESCRIPTION = (
    "Improve a policy in rounds: collect episodes, fit a value, label, clone from the base."
)
STATE = "recap.json"
"""File of the run directory with the settings and the results of finished phases."""

FREE = ("rounds", "output_dir", "trust_code", "run_dir")
"""Options that may change when a run is resumed."""

SEEDS, SEEDS_OF_A_ROUND, MOST_ROUNDS = 10_000_000, 100_000, 98
"""Distances between seeds of runs and of rounds; all evaluations of a run use the same seeds."""


def recap(options: Sequence[str], run: Run) -> None:
    """Run all rounds that are not finished, and print a table; `run` runs `fit`."""
    settings = parse_options("recap", DESCRIPTION, OPTIONS, options)
    for name in ("episodes", "eval_episodes"):
        check_range(name, settings[name], least=1, most=SEEDS_OF_A_ROUND)
    check_range("rounds", settings.rounds, least=1, most=MOST_ROUNDS)
    check_range("num_envs", settings.num_envs, least=1)
    check_range("max_steps", settings.max_steps, least=1)
    check_range("seed", settings.seed, least=0, most=200)
    Rounds(settings, run, is_trusted(list(options)), options).run()


class Rounds:
    """The rounds of a run directory: finished phases are not repeated.

    Args:
        settings: of the command line.
        run: runs a command line of `rl-cli`.
        trusted: whether checkpoints may name any code.
        typed: the command line, whose names of modules are allowed.
    """

    def __init__(self, settings: Namespace, run: Run, trusted: bool, typed: Sequence[str]) -> None:
        self.settings, self._run, self._trusted = settings, run, trusted
        file = find_config(settings.config)
        self.config = _checked(read_yaml(read_text(file), str(file)), str(file))
        self.directory = expanded(settings.run_dir).absolute()
        self.dataset = self.directory / "dataset"
        self._labels = LabelSettings(
            n_steps=settings.n_steps, positive=settings.positive, doubtful=settings.doubtful
        )
        env = self.config["data"]["env"]
        self.chunk: dict[str, Any] = {}
        if isinstance(env, dict) and env["class_path"].endswith("ActionChunk"):
            chunk = {"chunk_size": 4, **env.get("init_args", {})}
            env = chunk.pop("env")
            self.chunk = chunk
        with only_allowed_imports(list(typed)):
            self._make_env = _factory(env)
        self._state = self._opened_state()

    def run(self) -> None:
        """Run the phases of all rounds."""
        self._phase("base", self._base)
        self._phase("base evaluation", lambda: self._evaluate(self._checkpoint(0)))
        for number in range(1, self.settings.rounds + 1):
            for name, work in (
                ("collection", self._collect),
                ("value", self._fit_value),
                ("labels", self._label),
                ("policy", self._refit),
            ):
                self._phase(f"round {number} {name}", partial(work, number))
            evaluate = partial(self._evaluate, self._checkpoint(number))
            self._phase(f"round {number} evaluation", evaluate)
        print(self._table(), flush=True)

    # --- phases ---

    def _base(self) -> dict[str, Any]:
        settings = self.settings
        if settings.base is not None:
            found = find_checkpoint(settings.base, settings.output_dir)
            return {"checkpoint": str(found.absolute())}
        self._fit("base", _asking_for(self.config, "absent"))
        return {"checkpoint": str(self.directory / "base" / "checkpoints" / "last.ckpt")}

    def _collect(self, number: int) -> dict[str, Any]:
        """Extend the dataset by the episodes of a round; those that it has are not repeated."""
        settings = self.settings
        before = 0 if number == 1 else self._done(f"round {number - 1} collection")["total"]
        if number == 1 and settings["from"] is not None:
            copy = self.dataset.with_name("dataset.copy")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.rmtree(self.dataset, ignore_errors=True)
            shutil.copytree(expanded(settings["from"]), copy)
            copy.rename(self.dataset)
        else:
            first = settings.seed * SEEDS + number * SEEDS_OF_A_ROUND
            kept = _count(self.dataset) - before
            env = make_env(self._make_env, settings.num_envs, "data.env")
            spaces = (env.single_observation_space, env.single_action_space)
            writer = EpisodeWriter(
                self.dataset, *spaces, env.render_fps, settings.task, settings.pictures
            )
            try:
                played = self._played(env, self._checkpoint(number - 1), first, settings.episodes)
                for place, episode in enumerate(played):
                    if place >= kept:
                        writer.write(episode)
            finally:
                env.close()
                writer.finalise()
        new = read_episodes(self.dataset).successes()[before:]
        return {"total": before + len(new), "episodes": len(new), "successes": new.count(True)}

    def _fit_value(self, number: int) -> dict[str, Any]:
        if self.settings.value is None:
            config = value_config(str(self.dataset), {}, 500, self.settings.seed)
        else:
            file = find_config(self.settings.value)
            config = read_yaml(read_text(file), str(file))
            config["data"]["env"].setdefault("init_args", {})["path"] = str(self.dataset)
        self._fit(f"round_{number}/value", config)
        return {}

    def _label(self, number: int) -> dict[str, Any]:
        module = ValueFit.load_from_checkpoint(
            self.directory / f"round_{number}" / "value", trust_code=self._trusted
        )
        done = label_dataset(self.dataset, self._labels, value=module.values)
        print(summary(done), flush=True)
        error = sum(task.relative_error * task.steps for task in done.tasks) / done.steps
        return {"positive": done.positive / done.steps, "error_over_spread": error}

    def _refit(self, number: int) -> dict[str, Any]:
        config = _asking_for(self.config, "good")
        own = config["data"]["collector"].setdefault("init_args", {})
        for name in ("episodes", "path"):  # of the demonstrations that the base was cloned from
            own.pop(name, None)
        own["path"] = str(self.dataset)
        if _conditioned(config) is not None:
            own["condition"] = "advantage_positive"
        self._fit(f"round_{number}/policy", config, self._checkpoint(0))
        return {}

    def _evaluate(self, checkpoint: Path) -> dict[str, Any]:
        settings = self.settings
        env = make_env(self._make_env, settings.num_envs, "data.env")
        first = settings.seed * SEEDS + (MOST_ROUNDS + 1) * SEEDS_OF_A_ROUND
        try:
            played = self._played(env, checkpoint, first, settings.eval_episodes)
            successes = sum(bool(episode.success) for episode in played)
        finally:
            env.close()
        return {"episodes": settings.eval_episodes, "successes": successes}

    # --- parts of phases ---

    def _played(
        self, env: VectorEnv, checkpoint: Path, first: int, count: int
    ) -> Sequence[Episode] | Any:
        """Yield episodes of the policy of a checkpoint, with the seeds from `first` on."""
        settings = self.settings
        policy = Algorithm.load_from_checkpoint(checkpoint, trust_code=self._trusted).policy
        for begin in range(first, first + count, env.num_envs):
            yield from play_policy(
                env,
                policy,
                range(begin, min(begin + env.num_envs, first + count)),
                settings.max_steps or MAX_EPISODE_STEPS,
                deterministic=settings.deterministic,
                **self.chunk,
            )

    def _fit(self, name: str, config: dict[str, Any], base: Path | None = None) -> None:
        """Run or resume `fit` in a folder of the run directory."""
        run_dir = self.directory / name
        last = run_dir / "checkpoints" / "last.ckpt"
        options = [] if base is None else [f"--trainer.init_from={base}"]
        if last.is_file():
            options = [f"--ckpt_path={last}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
        options += ["--trust_code=true"] if self._trusted else []
        config["trainer"] = {"devices": 1, **config.get("trainer", {})}
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        fit_value(config, run_dir, lambda arguments: self._run([*arguments, *options]))

    def _checkpoint(self, number: int) -> Path:
        """Return the checkpoint of the policy of a round; 0: the base."""
        if number == 0:
            return Path(self._done("base")["checkpoint"])
        return self.directory / f"round_{number}" / "policy" / "checkpoints" / "last.ckpt"

    # --- what is finished ---

    def _opened_state(self) -> dict[str, Any]:
        chosen = {name: one for name, one in self.settings.items() if name not in FREE}
        settings = json.loads(json.dumps({**chosen, "config": self.config}))
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
        print(f"--- {name} ---", flush=True)
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


def _count(dataset: Path) -> int:
    return len(read_episodes(dataset)) if (dataset / "meta" / "info.json").is_file() else 0


def _conditioned(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of the config's ConditionedPolicy; None for another policy."""
    policy = config["model"].get("init_args", {}).get("policy")
    is_it = isinstance(policy, dict) and str(policy["class_path"]).endswith("ConditionedPolicy")
    settings: dict[str, Any] = policy.setdefault("init_args", {}) if is_it else {}
    return settings if is_it else None


def _asking_for(config: Mapping[str, Any], condition: str) -> dict[str, Any]:
    """Return a copy of a config whose ConditionedPolicy, if it has one, asks for a condition."""
    changed = deepcopy(dict(config))
    conditioned = _conditioned(changed)
    if conditioned is not None:
        conditioned["condition"] = condition
        if condition == "absent":
            conditioned.pop("guidance", None)
    else:
        weights = changed["model"]["init_args"]
        if condition == "absent":
            weights.pop("advantage_temperature")  # demonstrations have no advantages
    return changed


def _checked(config: Any, name: str) -> dict[str, Any]:
    """Return a config that the rounds can train with.

    Raises:
        ConfigurationError: for another algorithm, collector or number of processes, and for a
            policy that ignores the labels.
    """
    parts = config if isinstance(config, dict) else {}
    model, data, trainer = (parts.get(key) or {} for key in ("model", "data", "trainer"))
    collector = data.get("collector") or {}
    require(
        str(model.get("class_path")).endswith("BehaviorCloning")
        and str(collector.get("class_path") if isinstance(collector, dict) else "").endswith(
            "Demonstrations"
        )
        and "env" in data,
        f"rl-cli recap clones: {name} needs model: {{class_path: BehaviorCloning}}, "
        "data.collector: {class_path: Demonstrations}, and data.env, as in recap_doors.yaml.",
    )
    weighted = model.get("init_args", {}).get("advantage_temperature") is not None
    require(
        weighted or _conditioned(parts) is not None,
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
    return parts


def _factory(env: Any) -> EnvFactory:
    option = {"data.env": Option(EnvFactory, NEEDED, "the env")}
    text = env if isinstance(env, str) else json.dumps(env)
    checked = check_options([f"--data.env={text}"], {"data.env": EnvFactory})
    parser = option_parser("recap", DESCRIPTION, option)
    with explained_refusals():
        made = parser.instantiate(parser.parse_object(checked))
    return made.data.env  # type: ignore[no-any-return]  # a namespace
