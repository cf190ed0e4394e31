"""Run `rl-cli label`: write rewards, returns, values and advantages into a dataset."""

from collections.abc import Sequence

from lightning_rl.cli.options import NEEDED, Option, parse_options
from lightning_rl.datasets.label import (
    Chosen,
    LabelSettings,
    LabelSummary,
    Rewards,
    Values,
    label_dataset,
)
from lightning_rl.system.errors import require

OPTIONS = {
    "<path>": Option(str, NEEDED, "directory of a LeRobotDataset v3.0"),
    "success": Option(str, [], "numbers of episodes that succeeded; all: those not failed", True),
    "failure": Option(str, [], "numbers of those that did not; all: those not in --success", True),
    "reward": Option(Rewards, "success", "-1 for each step until success, or env: as recorded"),
    "failure_cost": Option(
        float, None, "of a failure, in steps. Default: length of the longest episode"
    ),
    "gamma": Option(float, 1.0, "discount per step"),
    "value": Option(
        Values, "fitted", "baseline of the advantage; mean: the mean return of the task"
    ),
    "epochs": Option(int, 50, "passes over the steps to fit the value"),
    "n_steps": Option(int, None, "rewards of an advantage before the value. Default: all"),
    "positive": Option(float, 0.3, "share of the steps of a task that is to be good"),
    "seed": Option(int, 1, "of the fit"),
}
DESCRIPTION = "Write rewards, returns, values and advantages of each step into a dataset."


def label(options: Sequence[str]) -> None:
    """Label a dataset as the options say."""
    settings = parse_options("label", DESCRIPTION, OPTIONS, options).as_dict()
    path = settings.pop("path")
    success, failure = (_chosen(name, settings.pop(name)) for name in ("success", "failure"))
    done = label_dataset(path, LabelSettings(**settings), success=success, failure=failure)
    print(_summary(done), flush=True)
    print(f"Dataset: {path}", flush=True)


def _chosen(name: str, given: Sequence[str]) -> Chosen:
    if list(given) == ["all"]:
        return "all"
    require(
        all(number.isdecimal() for number in given),
        f"--{name} takes numbers of episodes (0 3 7), or all; got {' '.join(given)}.",
    )
    return [int(number) for number in given]


def _summary(labelled: LabelSummary) -> str:
    unknown = labelled.episodes - labelled.successes - labelled.failures
    ends = {"success": labelled.successes, "failure": labelled.failures, "unknown": unknown}
    shown = ", ".join(f"{name} {count}" for name, count in ends.items() if count)
    return (
        f"{labelled.episodes} episodes ({shown}), {labelled.steps:,} steps: {labelled.positive:,} "
        f"positive; root mean squared error of the value: {labelled.error:.3g}; standard deviation "
        f"of the return: {labelled.returns_std:.3g}"
    )
