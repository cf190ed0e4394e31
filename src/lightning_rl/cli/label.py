"""Run `rl-cli label`: write rewards, returns, values and advantages into a dataset."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import gymnasium

from lightning_rl.algorithms import ValueFit
from lightning_rl.cli.options import FOR_CHECKPOINTS, NEEDED, Option, parse_options
from lightning_rl.datasets import read_episodes
from lightning_rl.datasets.label import (
    Chosen,
    LabelSettings,
    LabelSummary,
    Rewards,
    TaskSummary,
    label_dataset,
)
from lightning_rl.policies.networks.encoders import picture_keys
from lightning_rl.policies.spaces import space_of
from lightning_rl.system.errors import check_range, require
from lightning_rl.system.files import write_atomically
from lightning_rl.system.plain_yaml import dump_yaml

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
        float, None, "of a failure, in steps. Default: length of the longest episode"
    ),
    "gamma": Option(float, None, "discount per step. Default: 1"),
    "value": Option(
        str,
        "fitted",
        "baseline of the advantage: a run or checkpoint of ValueFit; fitted: a perceptron or CNN, "
        "fitted now; mean: the mean return of the task",
    ),
    "value_steps": Option(int, 500, "optimizer steps of a value that is fitted now"),
    "n_steps": Option(int, None, "rewards of an advantage before the value. Default: all"),
    "positive": Option(
        float, None, "share of good steps. Default: the task's success rate, at most 0.3"
    ),
    "doubtful": Option(
        Literal["warn", "refuse"], "warn", "whether labels that may do harm are written"
    ),
    "seed": Option(int, 1, "of the fit"),
    **FOR_CHECKPOINTS,
}
DESCRIPTION = "Write rewards, returns, values and advantages of each step into a dataset."


def label(options: Sequence[str], run: Run) -> None:
    """Label a dataset as the options say; `run` fits the value."""
    settings = parse_options("label", DESCRIPTION, OPTIONS, options).as_dict()
    path, value, seed = (settings.pop(name) for name in ("path", "value", "seed"))
    steps = settings.pop("value_steps")
    where = {name: settings.pop(name) for name in FOR_CHECKPOINTS}
    check_range("value_steps", steps, least=1)
    success, failure = (_chosen(name, settings.pop(name)) for name in ("success", "failure"))
    frames = ("reward", "failure_cost", "gamma")
    returns = {name: settings.pop(name) for name in frames}
    given = {name: one for name, one in returns.items() if one is not None}
    chosen = LabelSettings(**settings, **given)
    if value == "mean":
        done = label_dataset(path, chosen, success=success, failure=failure)
    else:
        if success or failure:  # the value is fitted to the success in the dataset
            label_dataset(path, chosen, success=success, failure=failure)
        if value == "fitted":
            with TemporaryDirectory() as folder:
                fit_value(value_config(path, given, steps, seed), Path(folder) / "value", run)
                module = ValueFit.load_from_checkpoint(Path(folder) / "value")
        else:
            module = ValueFit.load_from_checkpoint(value, **where)
            known: dict[str, Any] = {name: module.frame_settings.get(name) for name in frames}
            require(
                given.items() <= known.items(),
                f"{value} was fitted to returns with {known}, and {given} were asked for: leave "
                "these options out, or fit a value with them.",
            )
            chosen = replace(chosen, **known)
        done = label_dataset(path, chosen, value=module.values)
    print(summary(done), flush=True)
    print(f"Dataset: {path}", flush=True)


def value_config(path: str, frames: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Return a config that fits a small network to the returns of a dataset.

    Args:
        path: of the dataset.
        frames: further settings of `ReturnFrames`.
        steps: optimizer steps.
        seed: of the weights and the order of frames.
    """
    space = space_of(read_episodes(path)[0].observation)
    policy: dict[str, Any] = {"hidden_sizes": [64, 64]}
    if not picture_keys(space):
        policy["normalize_observation"] = True
    else:
        kind = "DictEncoder" if isinstance(space, gymnasium.spaces.Dict) else "NatureCNN"
        policy["encoder"] = {"class_path": kind, "init_args": {"normalize": True}}
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
            "env": {"class_path": "ReturnFrames", "init_args": {"path": str(path), **frames}},
            "num_envs": batch,
            "buffer_size": updates,
            "total_env_steps": batch * updates * iterations,
            "iterations_per_epoch": iterations,
        },
        "trainer": {"accelerator": "auto", "logger": False},
    }


def fit_value(config: dict[str, Any], run_dir: Path, run: Run) -> None:
    """Run a config as `rl-cli fit`, in a run directory; the config is saved beside it."""
    text = dump_yaml(config).encode()
    file = run_dir.with_suffix(".yaml")
    write_atomically(file, lambda opened: opened.write(text))
    run(["fit", "--config", str(file), "--trainer.run_dir", str(run_dir)])


def _chosen(name: str, given: Sequence[str]) -> Chosen:
    if list(given) == ["all"]:
        return "all"
    require(
        all(number.isdecimal() for number in given),
        f"--{name} takes numbers of episodes (0 3 7), or all; got {' '.join(given)}.",
    )
    return [int(number) for number in given]


def summary(labelled: LabelSummary) -> str:
    """Return a summary of labels as text: a line for the dataset and one for each task."""
    unknown = labelled.episodes - labelled.successes - labelled.failures
    ends = {"success": labelled.successes, "failure": labelled.failures, "unknown": unknown}
    shown = ", ".join(f"{name} {count}" for name, count in ends.items() if count)
    first = (
        f"{labelled.episodes} episodes ({shown}), {labelled.steps:,} steps: "
        f"{labelled.positive:,} positive"
    )
    return "\n".join([first, *map(_line, labelled.tasks)])


def _line(task: TaskSummary) -> str:
    rate = "unknown" if task.success_rate is None else f"{task.success_rate:.2f}"
    name = f"task '{task.task}'" if task.task else "all steps"
    return (
        f"  {name}: success rate {rate}, positive {task.positive:.2f} (share {task.share:.2f} "
        f"without interventions, threshold {task.threshold:.3g}), value error / spread "
        f"{task.error:.3g} / {task.spread:.3g} = {task.relative_error:.2f}"
    )
