"""Run `rl-cli judge` and `rl-cli compare`: play policies on tasks, episode by episode."""

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial
from importlib.metadata import packages_distributions, version
from itertools import groupby, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.checkpoints import find_checkpoint, load_trained, own_version, run_settings
from lightning_rl.extend.cli import NEEDED, CommandLine, Option, parse_classes, parse_options
from lightning_rl.extend.collectors import FirstEpisodes, action_function, summarize
from lightning_rl.extend.envs import EnvFactory, Event, Observation, make_env
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.files import lock_file, read_json, shown, tell, write_atomically
from lightning_rl.extend.policies import autocast
from lightning_rl.extend.rollout import leaves_by_path
from lightning_rl.extend.spaces import flat_actions
from lightning_rl.extensions.algorithms.frozen import fits
from lightning_rl.extensions.judging.code import digests_of
from lightning_rl.extensions.judging.paired import (
    difference_interval,
    mcnemar,
    needed_episodes,
    sign_flips,
)

Episode = dict[str, Any]
"""A line of the journal; `start` and `trace` are digests of the first and of all observations."""

MOST_EPISODES = 10_000
"""Maximum episodes of a task, and the distance between the seeds of tasks: see `seed_of`."""

MODULES = ("torch", "numpy", "gymnasium", "mujoco", "robosuite")
"""Modules whose versions are written, next to those that the env's settings name."""

SIZES = ("num_envs", "buffer_size", "total_env_steps", "iterations_per_epoch")
"""Settings of a training that set the limit of its evaluations in an env without one."""

PARSED = {
    "episodes": Option(int, 50, "episodes of each task"),
    "workers": Option(int, 1, "processes that play, without effect on the result"),
    "seed": Option(int, 0, "from which an episode's seed is made, with its task and its number"),
    "tasks": Option(dict[str, list[Any]], {}, "settings of the env: '{task_id: [0, 1, 2]}'"),
    "device": Option(str, "cpu", "device of the policy"),
    "data.env": Option(EnvFactory, None, "the env. Default: of the run's evaluations"),
    "data.eval_events": Option(dict[str, Event | None], {}, "events. Default: of the run"),
    "data.eval_deterministic": Option(bool, True, "act by the mode. Default: of the run"),
    "data.max_eval_episode_steps": Option(int, None, "limit of an episode. Default: of the run"),
    "output_dir": Option(str, "outputs", "folder of runs in which last and best are searched"),
    "trust_code": Option(bool, False, "run the code that the configuration in a checkpoint names"),
}
OPTIONS = {"<policies>": Option(str, NEEDED, "runs, checkpoints, last or best", True)} | PARSED


class Question(NamedTuple):
    """A policy, and options: of its run, and `typed` ones, which win.

    `trusted`: whether code that the run names may be imported. `training`: its `SIZES`, and the
    number of its processes; empty without a run. `model`: the settings of its model, as a text.
    """

    checkpoint: Path
    of_run: list[str]
    typed: list[str]
    trusted: bool
    training: dict[str, Any]
    model: str

    def settings(self, of_task: str = "") -> Namespace:
        """Parse the options, with the option of a task."""
        options = [*self.of_run, *self.typed, *filter(None, [of_task])]
        with nullcontext() if self.trusted else CommandLine.only_allowed_imports(self.typed):
            return parse_classes("judge", "", PARSED, options)


class Task(NamedTuple):
    """A task: the text of its settings of the env, the text of its suite, and the option."""

    name: str
    suite: str
    option: str


def judge(options: Sequence[str], command_line: CommandLine) -> None:
    """Play policies on tasks, and write a table for each policy."""
    _judge(_questions("judge", options))


def compare(options: Sequence[str], command_line: CommandLine) -> None:
    """Play two policies on the same episodes, and print whether the policies differ."""
    questions = _questions("compare", options)
    require(len(questions) == 2, f"rl-cli compare takes two policies, got {len(questions)}.")
    # Both play by the limit, the way of acting and the events of the first; runs may differ.
    of_both = [option for option in questions[0].of_run if not option.startswith("--data.env=")]
    env = [option for option in questions[1].of_run if option.startswith("--data.env=")]
    questions[1] = questions[1]._replace(of_run=env + of_both, training=questions[0].training)
    (first, second), (path, other_path), reports_success = _judge(questions)
    pairs = list(zip(first, second, strict=True))
    other = sum(a["start"] != b["start"] for a, b in pairs)
    require(
        not other or questions[0].of_run != questions[1].of_run,
        f"{other} of {len(pairs)} episodes began with another observation for the second policy: "
        "the env's start depends on more than the seed.",
    )
    if other:
        tell("The runs have different envs: equal seeds began with different observations.")
    groups = _groups(first).items()
    rows = {
        name: comparison([pairs[i] for i in numbers], reports_success) for name, numbers in groups
    }
    _print("first policy - second policy", rows)
    tell(list(rows.values())[-1]["answer"])
    _write(path.with_name(f"{path.stem}-{other_path.stem}.json"), rows)


def comparison(
    pairs: Sequence[tuple[Episode, Episode]], reports_success: bool = False
) -> dict[str, Any]:
    """Return differences of pairs of episodes, first minus second, with intervals and an answer.

    If any episode reported success, of these or by `reports_success` of others, an episode without
    a report is a failure: an env may report it at a success alone.
    """
    # The bootstrap of `summarize`, of differences instead of returns.
    summary = _summary([a | {"return": a["return"] - b["return"]} for a, b in pairs])
    row = {name: summary[name] for name in ("episodes", "avg_reward", "ci95")}
    effect, interval, step, p = row["avg_reward"], row["ci95"], 0, sign_flips(summary["returns"])
    test = f"signs of paired returns, p = {p:.3g}"
    row |= {"success_rate": None, "success_ci95": None, "p": p}
    if reports_success or _report_success(*pairs):
        gains = sum(bool(a["success"]) > bool(b["success"]) for a, b in pairs)
        losses = sum(bool(a["success"]) < bool(b["success"]) for a, b in pairs)
        effect, step, p = (gains - losses) / len(pairs), 1, mcnemar(gains, losses)
        interval = difference_interval(gains, losses, len(pairs))
        row |= {"success_rate": effect, "success_ci95": interval, "p": p}
        test = f"McNemar, p = {p:.3g}, {gains} : {losses} successes of one alone"
    differ = p <= 0.05
    needed = needed_episodes(len(pairs), effect, interval, step)
    answer = f"The policies differ ({test})." if differ else f"No difference is shown ({test})."
    if not differ and needed is not None:
        answer += f" A difference of this size needs about {needed:,} episodes (power 80 %)."
    return row | {"differ": differ, "needed_episodes": needed, "answer": answer}


def _questions(subcommand: str, options: Sequence[str]) -> list[Question]:
    first = next((i for i, text in enumerate(options) if text.startswith("-")), len(options))
    names, typed = options[:first], CommandLine.normalize_options(options[first:])
    if not names:  # prints the help, or names the missing policies
        parse_options(subcommand, "Play policies on tasks, episode by episode.", OPTIONS, typed)
    directory = CommandLine.value_of("--output_dir", typed) or "outputs"
    questions: list[Question] = []
    for path in (find_checkpoint(name, directory) for name in names):
        trusted = CommandLine.is_trusted([f"--ckpt_path={path}", *typed])
        is_export = path.suffix == ".safetensors"
        settings = {} if is_export else run_settings(path, trusted)
        data = settings.get("data", {})
        data = data | {"env": data.get("eval_env") or data.get("env")}
        values = {name: data.get(name[5:]) for name in PARSED if name.startswith("data.")}
        of_run = [f"--{n}={_text(value)}" for n, value in values.items() if value is not None]
        training = {name: data[name] for name in SIZES} if {*SIZES} <= data.keys() else {}
        if is_export and questions:  # it has no env, and plays in the env of the first policy
            of_run, training = questions[-1].of_run, questions[-1].training
        elif training:
            training["processes"] = _processes(path)
        model = json.dumps(settings.get("model"), default=str)
        questions.append(Question(path, of_run, typed, trusted, training, model))
    return questions


def _processes(checkpoint: Path) -> int:
    try:
        directory = checkpoint.absolute().parent.parent
        return int(read_json(directory / "run.json", directory)["world_size"])
    except (OSError, KeyError, TypeError, ValueError):  # a copied checkpoint, or a damaged file
        return 1


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tasks(values: Mapping[str, Sequence[Any]]) -> list[Task]:
    for name, choices in values.items():
        require(
            0 < len(choices) == len(set(map(_text, choices))),
            f"--tasks: {name} has the values {choices}: list at least one, and none twice.",
        )
    tasks = []
    for choices in product(*values.values()):
        settings = dict(zip(values, choices, strict=True))
        names = [f"{name}={_text(value)}" for name, value in settings.items()]
        option = f"--data.env={json.dumps(settings)}" if settings else ""
        tasks.append(Task(", ".join(names) or "env", ", ".join(names[:-1]), option))
    return tasks


def _judge(questions: Sequence[Question]) -> tuple[list[list[Episode]], list[Path], bool]:
    """Play, print and write tables; return episodes, paths, and whether one reported success."""
    played = [_play(question) for question in questions]
    reports_success = _report_success(*(episodes for episodes, *_ in played))
    for episodes, path, suites, facts in played:
        groups = _groups(episodes, suites)
        rows = {
            name: _summary([episodes[i] for i in members], reports_success)
            for name, members in groups.items()
        }
        _print(str(shown(Path(facts["checkpoint"]))), rows)
        if cut := sum(episode["cut"] for episode in episodes):
            tell(f"{cut} of {len(episodes)} episodes were cut, data.max_eval_episode_steps.")
        _write(path, facts | {"rows": rows})
        tell(", ".join(f"{name} {number}" for name, number in facts["versions"].items()))
    return [episodes for episodes, *_ in played], [path for _, path, *_ in played], reports_success


def _report_success(*parts: Iterable[Episode]) -> bool:
    return any(episode["success"] is not None for part in parts for episode in part)


def _play(question: Question) -> tuple[list[Episode], Path, dict[str, str], dict[str, Any]]:
    """Return the episodes, the path of their table, the suites of tasks, and facts to write."""
    settings, checkpoint = question.settings(), question.checkpoint
    check_range("--episodes", settings.episodes, minimum=1, maximum=MOST_EPISODES)
    check_range("--workers", settings.workers, minimum=1)
    check_range("--seed", settings.seed, minimum=0)
    require(settings.data.env is not None, f"{checkpoint} names no env: give one, --data.env.")
    tasks = _tasks(settings.tasks)
    for task in tasks:
        question.settings(task.option)  # a wrong one is refused before the first episode
    with checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    options = [*question.of_run, *question.typed]
    options = [option for option in options if option.startswith(("--data.", "--device"))]
    all_options = [*options, *(task.option for task in tasks)]
    versions, code = _versions(all_options), digests_of("\n".join(all_options), question.model)
    facts = {"sha256": digest, "seed": settings.seed, "options": options, "versions": versions}
    facts |= {"code": code}
    # Another policy, setting, version or code has a journal of its own.
    name = hashlib.sha256(json.dumps([facts, question.training]).encode()).hexdigest()[:12]
    folder = checkpoint.absolute().parent
    folder = folder.parent if (folder.parent / "run.json").is_file() else folder
    path = folder / "judged" / f"{checkpoint.stem}-{name}.json"
    episodes = _play_tasks(question, tasks, settings, path.with_suffix(".jsonl"))
    suites = {task.name: task.suite for task in tasks}
    return episodes, path, suites, facts | {"checkpoint": str(checkpoint)}


def _versions(options: Sequence[str]) -> dict[str, str]:
    owners = packages_distributions()
    modules = [*MODULES, *re.findall(r"\w+", " ".join(options))]
    names = dict.fromkeys(name for module in modules for name in owners.get(module, []))
    return {"lightning-rl": own_version()} | {name: version(name) for name in names}


def _groups(episodes: Sequence[Episode], suites: Mapping[str, str] = {}) -> dict[str, list[int]]:
    """Return the indices of the episodes of each task, of each of several suites, and of all."""
    groups: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        groups.setdefault(episode["task"], []).append(i)
    for i, episode in enumerate(episodes if len({*suites.values()}) > 1 else ()):
        groups.setdefault(suites[episode["task"]], []).append(i)
    return groups if len(groups) == 1 else groups | {"all": list(range(len(episodes)))}


def _summary(episodes: Sequence[Episode], reports_success: bool = False) -> dict[str, Any]:
    absent: Episode = {"metrics": {}, "intervened": None}
    summary = summarize([absent | episode for episode in episodes], reports_success)
    return summary if len(episodes) > 1 else summary | {"ci95": None}  # of one, it has no width


def _print(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table("task", "episodes", "success", "return", "steps", title=title)
    for name, row in rows.items():
        success = _interval(row["success_rate"], row["success_ci95"], ".1%")
        returns = _interval(row["avg_reward"], row["ci95"], ".4g")
        length = f"{row['avg_length']:.1f}" if "avg_length" in row else ""
        table.add_row(name, str(row["episodes"]), success, returns, length)
    Console(highlight=False).print(table)


def _interval(value: float | None, ends: Sequence[float] | None, form: str) -> str:
    if value is None:
        return "not reported"
    return f"{value:{form}}" + (f" [{ends[0]:{form}}, {ends[1]:{form}}]" if ends else "")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, lambda file: file.write(json.dumps(content, indent=1).encode()))
    tell(f"Written to {shown(path)}")


# --- play, in worker processes ---


def seed_of(seed: int, task: str, episode: int) -> int:
    """Return the seed of an episode, which depends on the arguments alone.

    Seeds of a task follow each other from a multiple of 10,000: an env with n listed starts, which
    begins from start `seed % n`, begins episode k from start k % n if n divides 10,000.
    """
    words = np.random.SeedSequence([seed, *task.encode()]).generate_state(1)
    return int(words[0] % (2**31 // MOST_EPISODES)) * MOST_EPISODES + episode


def _read_journal(path: Path) -> dict[tuple[str, int], Episode]:
    content = path.read_bytes() if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1]
    if len(lines) < len(content):  # a kill has cut a line
        os.truncate(path, len(lines))
    return {(e["task"], e["episode"]): e for e in map(json.loads, lines.splitlines())}


def _play_tasks(
    question: Question, tasks: Sequence[Task], settings: Namespace, journal: Path
) -> list[Episode]:
    """Play the episodes that the journal lacks; return all, in order."""
    lock = lock_file(journal.with_suffix(".lock"), f"{{owner}} writes {journal}: wait for its end.")
    try:
        finished = _read_journal(journal)
        numbers = [(task, k) for task in tasks for k in range(settings.episodes)]
        missing = [(task, k) for task, k in numbers if (task.name, k) not in finished]
        if count_played := len(numbers) - len(missing):
            tell(f"{count_played} of {len(numbers)} episodes are from {shown(journal)}.")
        count = max(1, min(settings.workers, len(missing)))
        # Neighbours share a worker: making an env may take longer than an episode.
        bounds = [len(missing) * i // count for i in range(count + 1)]
        shares = [missing[bounds[i] : bounds[i + 1]] for i in range(count)]
        play = partial(_play_share, question, settings.seed, journal, os.getpid())
        if count == 1:
            play(shares[0])
        else:
            # No fork: it would copy threads and contexts of OpenGL. A worker ends with its share,
            # because an idle one would outlive a command that is killed.
            try:
                with ProcessPoolExecutor(
                    count, get_context("spawn"), max_tasks_per_child=1
                ) as pool:
                    list(pool.map(play, shares))
            except BrokenProcessPool as error:
                raise ConfigurationError(
                    f"A worker was killed, perhaps for lack of memory (--workers {count}). The "
                    f"finished episodes are in {shown(journal)}: the same command goes on."
                ) from error
        finished = _read_journal(journal)
        return [finished[task.name, k] for task, k in numbers]
    finally:
        if lock is not None:
            os.close(lock)


def _play_share(
    question: Question, seed: int, journal: Path, parent: int, share: Sequence[tuple[Task, int]]
) -> None:
    """Play episodes, and append them to the journal; an env is kept for its task."""
    torch.set_num_threads(1)  # the sums of several threads differ in their last bits
    policy = load_trained(question.checkpoint, trust_code=question.trusted).policy
    for task, numbers in groupby(share, key=lambda pair: pair[0]):
        settings = question.settings(task.option)
        player = _Player(policy.to(settings.device), task.name, settings.data, question.training)
        try:
            for _, k in numbers:
                if parent not in (os.getpid(), os.getppid()):
                    os._exit(1)  # the command was killed, and may run again
                episode = player.play(seed_of(seed, task.name, k))
                line = json.dumps({"task": task.name, "episode": k} | episode) + "\n"
                with journal.open("ab", buffering=0) as file:
                    file.write(line.encode())  # one call of the system: the line is whole
        finally:
            player.env.close()


class _Player:
    """Plays single episodes of a task: another number of envs might change their last bits."""

    def __init__(
        self, policy: Policy, task: str, data: Namespace, training: Mapping[str, Any]
    ) -> None:
        self.policy, self.task, self.data = policy, task, data
        self.env = env = make_env(data.env, 1, "data.env", data.eval_events)
        env.stop_interventions()
        # Without what only a critic reads: a robot does not have it.
        observations, actions = policy.acting_space, policy.action_space
        of_env = env.single_observation_space, flat_actions(env.single_action_space)
        require(
            fits(observations, of_env[0]) and actions == of_env[1],
            f"The policy acts in the spaces {(observations, actions)}, but the env of {task} has "
            f"{of_env}: give an env with the same spaces, --data.env.",
        )
        limit = None
        if not env.max_episode_steps:  # it might never end
            limit = FirstEpisodes.LEAST_BOUND
            if training:
                steps = env.steps_per_action
                limit = FirstEpisodes.endless_limit(**training, steps_per_action=steps)
        self._limit = data.max_eval_episode_steps or limit
        self._is_checked = False

    @torch.no_grad()
    def play(self, seed: int) -> Episode:
        length, total, success = 0, 0.0, None
        with autocast(self.policy.version.device, self.policy.autocast_dtype):
            sampled = None if self.data.eval_deterministic else [seed]
            episode = self._begin(seed, action_function(self.policy, 1, sampled))
            trace = _add(hashlib.sha256(), episode.observation)
            start = trace.hexdigest()
            for info in episode:
                total += float(episode.reward[0])
                executed = info.get("executed")  # actions of a chunk
                length += 1 if executed is None else int(executed[0].sum())
                success = info.get("success")
                _add(trace, episode.observation)
        terminated = bool(episode.terminated[0])
        if not self._is_checked:
            again = self._begin(seed, lambda *_: torch.empty(0)).observation
            require(
                _add(hashlib.sha256(), again).hexdigest() == start,
                f"The env of {self.task} began with another observation at a second reset with "
                f"seed {seed}: no evaluation of it repeats. Draw by self.np_random, which "
                "reset(seed=...) seeds, and keep nothing of the last episode.",
            )
            self._is_checked = True
        return {
            "seed": seed,
            "success": None if success is None else bool(success[0]),
            "return": total,
            "length": length,
            "terminated": terminated,
            "cut": not (terminated or episode.truncated[0]),
            "start": start,
            "trace": trace.hexdigest(),
        }

    def _begin(self, seed: int, choose: Callable[..., torch.Tensor]) -> FirstEpisodes:
        # Some envs draw from the streams of the process.
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return FirstEpisodes(self.env, choose, [seed], self._limit)


def _add(digest: Any, observation: Observation) -> Any:
    for leaf in leaves_by_path(observation).values():
        digest.update(leaf.cpu().numpy().tobytes())
    return digest
