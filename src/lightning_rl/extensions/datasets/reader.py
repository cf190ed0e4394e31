"""Open a dataset in LeRobot's or Minari's format."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import gymnasium
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_rl.extend.errors import require
from lightning_rl.extend.files import expanded
from lightning_rl.extensions.datasets.ends import EndRule, Ends
from lightning_rl.extensions.datasets.episode import Episodes, Outside
from lightning_rl.extensions.datasets.lerobot_reader import LeRobotEpisodes
from lightning_rl.extensions.datasets.minari import MinariEpisodes, minari_folder
from lightning_rl.extensions.wrappers.encoded import encoded, recorded_space

Reader = Callable[[Path, Mapping[str, str], Any, Any, Ends | None], Episodes]
"""Opens a dataset from its path, `keys`, spaces of observations and actions, and `ends`."""


def read_episodes(
    path: str | Path,
    keys: Mapping[str, str] | None = None,
    *,
    observation_space: gymnasium.Space[Any] | None = None,
    action_space: gymnasium.Space[Any] | None = None,
    fps: float | None = None,
    ends: Ends | None = None,
    actions_outside: Outside = "clip",
    reader: Reader | None = None,
) -> Episodes:
    """Open the directory of a LeRobotDataset v3.0, of a Minari dataset, or of your own format.

    Args:
        path: path of the directory.
        keys: maps columns of the dataset to names of this package, if their own names do not fit:
            `observation`, `observation.<key>` (one dot per level of a Dict), `action`, `reward`,
            `done`, `terminated`, `truncated`, `success`, `intervened`. For Minari only entries of
            `infos` can be mapped.
        observation_space: of the env; checked if given, and only its columns are read. Pictures
            become the features of an `EncodedObservations`.
        action_space: of the env; checked if given.
        fps: of the env; checked if given.
        ends: how episodes ended if the dataset does not record it: see `EndRule`. The rule is
            logged, as a warning if it is a guess.
        actions_outside: clip actions outside the bounds of a Box, with one warning, or refuse
            them. Choices that the action space does not have are always refused.
        reader: your subclass of `Episodes`, for another format.

    Returns:
        the episodes in recorded order. Choices count from 0, as in policies, if the action space is
        given or the dataset describes it.

    Raises:
        ConfigurationError: for a missing dataset, another env, and contradictions in the dataset.
    """
    directory = expanded(path)
    for name, value, kind in (("ends", ends, Ends), ("actions_outside", actions_outside, Outside)):
        allowed = get_args(kind)
        text = f"{name}={value!r} must be one of {', '.join(allowed)}."
        require(value in (None, *allowed), text)  # only YAML is checked by its types
    require(
        directory.is_dir(),
        f"No dataset at {directory}: give the directory of a LeRobotDataset v3.0 (it contains "
        "meta/info.json) or of a Minari dataset (it contains data/metadata.json).",
    )
    if reader is None:
        reader = LeRobotEpisodes if minari_folder(directory) is None else MinariEpisodes
    recorded = None if observation_space is None else recorded_space(observation_space)
    episodes = reader(directory, keys or {}, recorded, action_space, ends)
    if observation_space is not None and recorded != observation_space:
        episodes.encode = partial(encoded, observation_space)
    episodes.action_space, episodes.actions_outside = action_space, actions_outside
    check_fps(directory, episodes.fps, fps)
    _report_rule(directory, episodes.rule)
    return episodes


def check_fps(directory: Path, dataset_fps: float | None, fps: float | None) -> None:
    """Refuse a dataset with another rate than the env's, `fps`; None: unknown.

    Raises:
        ConfigurationError: naming both rates.
    """
    # Minari datasets have no rate.
    require(
        fps is None or dataset_fps is None or abs(fps - dataset_fps) <= 1e-3 * fps,
        f"The dataset at {directory} has {dataset_fps or 0:g} frames per second, but the env takes "
        f"{fps or 0:g} steps per second, so an action would have another duration. Record the "
        "dataset with this env, or set the env to the dataset's rate.",
    )


def _report_rule(directory: Path, rule: EndRule | None) -> None:
    """Log the rule that decides how episodes ended, as a warning if it is a guess."""
    if rule is not None and rule.assumed:
        rank_zero_warn(
            f"The dataset at {directory} does not record which episodes were truncated: "
            f"{rule.words}. If this is wrong, set ends to terminated or truncated, or name the "
            f"column: keys: {{<column>: terminated}}."
        )
    elif rule is not None:
        _log_once(f"Dataset {directory}: {rule.words}.")


@cache
def _log_once(text: str) -> None:
    rank_zero_info(text)  # several phases of a command read the same dataset
