"""Run `rl-cli label`: say of each step of a dataset how good it was."""

from collections.abc import Sequence
from typing import Any

from lightning_rl.cli.help_pages import HelpFormatter
from lightning_rl.cli.options import OptionParser, check_names, explained_refusals
from lightning_rl.datasets.label import (
    Chosen,
    Labelled,
    LabelSettings,
    Rewards,
    Values,
    label_dataset,
)
from lightning_rl.system.errors import require

OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "success": (str, [], "numbers of episodes that succeeded; all: those not in --failure"),
    "failure": (str, [], "numbers of those that did not; all: those not in --success"),
    "reward": (Rewards, "success", "-1 for each step until success, or env: as recorded"),
    "failure_cost": (float, None, "of a failure, in steps; the longest episode where not given"),
    "gamma": (float, 1.0, "discount per step"),
    "value": (Values, "fitted", "what an advantage is above; mean: the mean return of the task"),
    "epochs": (int, 50, "passes over the steps to fit the value"),
    "n_steps": (int, None, "rewards of an advantage before the value; all where not given"),
    "positive": (float, 0.3, "share of the steps of a task that is to be good"),
    "seed": (int, 1, "of the fit"),
}
"""By their names: type, default and help."""

LISTS = ("success", "failure")
"""Options that take several values."""


def label(options: Sequence[str]) -> None:
    """Label a dataset, as options of the command line say.

    Raises:
        ConfigurationError: for episodes that are no numbers, and what the labelling itself refuses.
    """
    check_names("label", options, OPTIONS)
    parser = OptionParser(
        prog="rl-cli label",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        description="Write rewards, returns, values and advantages of each step into a dataset.",
    )
    parser.add_argument("path", type=str, help="directory of a LeRobotDataset v3.0")
    for name, (kind, default, text) in OPTIONS.items():
        several: dict[str, Any] = {"nargs": "+"} if name in LISTS else {}
        kind = kind | None if default is None else kind
        parser.add_argument(f"--{name}", type=kind, default=default, help=text, **several)
    with explained_refusals(options):
        settings = parser.parse_args(list(options)).as_dict()
    path = settings.pop("path")
    success, failure = (_chosen(name, settings.pop(name)) for name in LISTS)
    done = label_dataset(path, LabelSettings(**settings), success=success, failure=failure)
    print(_told(done), flush=True)
    print(f"Dataset: {path}", flush=True)


def _chosen(name: str, given: Sequence[str]) -> Chosen:
    """Return the episodes that an option names."""
    if list(given) == ["all"]:
        return "all"
    require(
        all(number.isdecimal() for number in given),
        f"--{name} takes numbers of episodes (0 3 7), or all; got {' '.join(given)}.",
    )
    return [int(number) for number in given]


def _told(labelled: Labelled) -> str:
    """Say what was written."""
    unknown = labelled.episodes - labelled.successes - labelled.failures
    ends = {"success": labelled.successes, "failure": labelled.failures, "unknown": unknown}
    shown = ", ".join(f"{name} {count}" for name, count in ends.items() if count)
    return (
        f"{labelled.episodes} episodes ({shown}), {labelled.steps:,} steps: "
        f"{labelled.positive:,} positive; the value is {labelled.error:.3g} from the return, "
        f"whose deviation is {labelled.spread:.3g}"
    )
