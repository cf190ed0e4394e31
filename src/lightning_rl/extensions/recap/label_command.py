"""Run `rl-cli label`: write rewards, returns, values and advantages into a dataset."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import gymnasium
from jsonargparse import Namespace

from lightning_rl.extend.cli import NEEDED, CommandLine, Option, parse_options
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.files import dump_yaml, tell, write_atomically
from lightning_rl.extend.policies import picture_keys
from lightning_rl.extend.spaces import space_of
from lightning_rl.extensions.datasets.frames import ReturnFramesEnv
from lightning_rl.extensions.datasets.label import (
    Chosen,
    LabelSettings,
    LabelSummary,
    Rewards,
    TaskSummary,
    label_dataset,
)
from lightning_rl.extensions.datasets.reader import read_episodes
from lightning_rl.extensions.recap.value_fit import ValueFit

Run = Callable[[Sequence[str]], None]
"""Runs a command line of `rl-cli`."""

OPTIONS = {
    "<path>": Option(str, NEEDED, "directory of a LeRobotDataset v3.0"),
    "success": Option(str, [], "numbers of episodes that succeeded; all: those not failed", True),
    "failure": Option(str, [], "numbers of those that did not; all: those not in --success", True),
    "reward": Option(
        Rewards, None, "success: -1 for each step until success (default); or env: as recorded"
    ),
    "failure_cost": Option(
        float,
        None,
        "of a failure, in steps. Default: length of the longest episode",
        unused=Option.only_with("reward", "success", None),
    ),
    "gamma": Option(float, None, "discount per step. Default: 1"),
    "value": Option(
        str,
        "fitted",
        "value of the advantages: a run or checkpoint of ValueFit; fitted: fit a small network "
        "first; mean: the mean return of the task",
    ),
    "value_steps": Option(
        int, 500, "optimizer steps of --value fitted", unused=Option.only_with("value", "fitted")
    ),
    "n_steps": Option(int, None, "rewards of an advantage before the value. Default: all"),
    "positive": Option(
        float, None, "share of good steps. Default: the task's success rate, at most 0.3"
    ),
    "doubtful": Option(
        Literal["warn", "refuse"], "warn", "warn of labels that may do harm, or do not write them"
    ),
    "seed": Option(int, 1, "seed of --value fitted", unused=Option.only_with("value", "fitted")),
    **Option.of_checkpoint("value", "fitted", "mean"),
}
DESCRIPTION = "Write rewards, returns, values and advantages of each step into a dataset."
RETURNS = ("reward", "failure_cost", "gamma")
"""Options that decide the returns, and so the value."""


def label(options: Sequence[str], command_line: CommandLine) -> None:
    """Label a dataset by the given options."""
    settings = parse_options("label", DESCRIPTION, OPTIONS, options)
    path = settings.path
    check_range("value_steps", settings.value_steps, minimum=1)
    lists: dict[str, Any] = {name: _chosen(name, settings[name]) for name in ("success", "failure")}
    return_settings = {name: settings[name] for name in RETURNS if settings[name] is not None}
    other_settings = {name: settings[name] for name in ("n_steps", "positive", "doubtful")}
    label_settings = LabelSettings(**other_settings, **return_settings)
    if settings.value == "mean":
        done = label_dataset(path, label_settings, **lists)
    else:
        if any(lists.values()):  # the value is fitted to the success in the dataset
            label_dataset(path, label_settings, **lists)
        module = _value(settings, return_settings, command_line.run)
        fit_settings: dict[str, Any] = {name: module.frame_settings.get(name) for name in RETURNS}
        # A value predicts the returns that it was fitted to; other returns would make wrong
        # advantages.
        require(
            return_settings.items() <= fit_settings.items(),
            f"{settings.value} was fitted to returns with {fit_settings}, but the options ask for "
            f"{return_settings}: remove these options, or fit a value with them.",
        )
        # The success labels are in the dataset by now.
        done = label_dataset(path, replace(label_settings, **fit_settings), value=module.values)
    tell(summary(done))
    tell(f"Dataset: {path}")


def _value(settings: Namespace, return_settings: dict[str, Any], run: Run) -> ValueFit:
    """Load the value of a run, or fit one to returns with the given settings."""
    if settings.value != "fitted":
        loading = {name: settings[name] for name in ("output_dir", "trust_code")}
        return ValueFit.load_from_checkpoint(settings.value, **loading)
    with TemporaryDirectory() as folder:
        config = value_config(settings.path, return_settings, settings.value_steps, settings.seed)
        with redirect_stdout(io.StringIO()):  # its paths are of a directory that is then deleted
            fit_value(config, Path(folder) / "value", run)
        return ValueFit.load_from_checkpoint(Path(folder) / "value")


def value_config(path: str, frames: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Return a config that fits a small network to the returns of a dataset.

    Args:
        path: of the dataset.
        frames: further settings of `ReturnFramesEnv`.
        steps: optimizer steps.
        seed: of the weights and the order of frames.
    """
    space = space_of(read_episodes(path)[0].observation)
    # With several tasks, the env adds a key of the task to a single picture.
    if picture_keys(space) and not isinstance(space, gymnasium.spaces.Dict):
        space = ReturnFramesEnv(1, path, **frames).single_observation_space
    policy: dict[str, Any] = {"hidden_sizes": [64, 64]}
    # Numbers need a normalizer; an encoder of pictures normalizes its other inputs itself.
    if not picture_keys(space):
        policy["normalize_observation"] = True
    else:
        kind = "DictEncoder" if isinstance(space, gymnasium.spaces.Dict) else "NatureCNN"
        policy["encoder"] = {"class_path": kind, "init_args": {"normalize": True}}
    # Ten updates per rollout, so that the rollout's overhead is small.
    batch, updates = 256, min(10, steps)
    iterations = -(-steps // updates)
    return {
        "seed_everything": seed,
        "model": {
            "class_path": "ValueFit",
            "init_args": {
                "policy": {"class_path": "ActorOnly", "init_args": policy},
                "learning_rate": 2e-3,
                "lr_schedule": "linear",
                "batch_size": batch,
            },
        },
        "data": {
            # Each rollout holds as many random frames as its updates consume.
            "env": {"class_path": "ReturnFramesEnv", "init_args": {"path": str(path), **frames}},
            "num_envs": batch,
            "buffer_size": updates,
            "total_env_steps": batch * updates * iterations,
            "iterations_per_epoch": iterations,
        },
        "trainer": {"accelerator": "auto", "logger": False, "enable_progress_bar": False},
    }


def fit_value(config: dict[str, Any], run_dir: Path, run: Run) -> None:
    """Run a config as `rl-cli fit`, in a run directory; the config is saved beside it."""
    text = dump_yaml(config).encode()
    file = run_dir.with_suffix(".yaml")
    write_atomically(file, lambda opened: opened.write(text))
    run(["fit", "--config", str(file), "--trainer.run_dir", str(run_dir)])


def _chosen(name: str, texts: Sequence[str]) -> Chosen:
    # `all` means the episodes that the other option does not name.
    if list(texts) == ["all"]:
        return "all"
    require(
        all(number.isdecimal() for number in texts),
        f"--{name} takes numbers of episodes (0 3 7), or all; got {' '.join(texts)}.",
    )
    return [int(number) for number in texts]


def summary(labelled: LabelSummary) -> str:
    """Return a summary of labels as text: a line for the dataset and one for each task."""
    unknown = labelled.episodes - labelled.successes - labelled.failures
    ends = {"success": labelled.successes, "failure": labelled.failures, "unknown": unknown}
    counts = ", ".join(f"{name} {count}" for name, count in ends.items() if count)
    first = (
        f"{labelled.episodes} episodes ({counts}), {labelled.steps:,} steps: "
        f"{labelled.positive:,} positive"
    )
    return "\n".join([first, *map(_line, labelled.tasks)])


def _line(task: TaskSummary) -> str:
    rate = "unknown" if task.success_rate is None else f"{task.success_rate:.2f}"
    name = f"task '{task.task}'" if task.task else "all steps"
    signal = "" if task.signal is None else f", signal of advantages {task.signal:.3g}"
    positive = f"{task.positive / task.steps:.2f} (share {task.share:.2f}"
    return (
        f"  {name}: success rate {rate}, positive {positive} "
        f"without interventions, threshold {task.threshold:.3g}), value error / spread "
        f"{task.error:.3g} / {task.spread:.3g} = {task.relative_error:.2f}{signal}"
    )
