"""Read and write Minari datasets on this machine, an episode at a time, by Minari itself.

`<dataset>/data/metadata.json` says what it is; episodes lie beside it. Nothing is downloaded, no
env is made, and pictures are written as they are, not as the JPEG that Minari makes of them.

Source: Minari 0.5 (Farama Foundation, minari.farama.org), `minari.dataset.minari_storage`.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from lightning_rl.errors import ConfigurationError, require
from lightning_rl.files import move, writing
from lightning_rl.offline.lerobot_format import import_extra

METADATA = "metadata.json"

NOTES = ("task", "tasks", "names", "final_known")
"""What we write into an episode's metadata: Minari has no place for it.

`names` maps the names that HDF5 gives back to those that had a slash, which HDF5 takes for a level.
"""

UNFINISHED = ".tmp-minari"
"""How the name of a dataset begins that is being written."""


def minari_folder(path: Path) -> Path | None:
    """Return the folder of a Minari dataset's data; None where there is none."""
    return next((one for one in (path / "data", path) if (one / METADATA).is_file()), None)


class MinariFile:
    """A Minari dataset that is there.

    Args:
        path: of the dataset, or of its folder `data`.

    Attributes:
        spaces: of observations and of actions.
        lengths: steps of each episode.

    Raises:
        ConfigurationError: where it cannot be read, or does not say its spaces.
    """

    def __init__(self, path: Path) -> None:
        storage = import_extra("minari.dataset.minari_storage").MinariStorage
        self.path, folder = path, minari_folder(path)
        try:
            said = storage.read_raw_metadata(folder)
            require(  # else Minari would make the env that the dataset names
                {"observation_space", "action_space"} <= set(said),
                f"The dataset at {path} does not say its spaces: record it again with Minari 0.4 "
                "or newer.",
            )
            self._storage = storage.read(folder)
            found = self._storage.get_episode_metadata(range(self._storage.total_episodes))
            self.lengths = [int(episode["total_steps"]) for episode in found]
        except (OSError, ValueError, KeyError, AssertionError) as error:
            raise _unreadable(path, error) from error
        self.spaces = self._storage.observation_space, self._storage.action_space

    def read(self, index: int) -> dict[str, Any]:
        """Return what Minari has of an episode, with `NOTES` where we have written them.

        Raises:
            ConfigurationError: where the file is damaged.
        """
        try:
            (episode,) = self._storage.get_episodes([index])
            (said,) = self._storage.get_episode_metadata([index])
        except (OSError, ValueError, KeyError, AssertionError) as error:
            raise _unreadable(self.path, error) from error
        return {
            **episode,
            "task": str(said.get("task", "")),
            "tasks": json.loads(said.get("tasks", "[]")),
            "names": json.loads(said.get("names", "{}")),
            "final_known": bool(said.get("final_known", True)),
        }


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    if isinstance(error, ConfigurationError):
        return error
    return ConfigurationError(
        f"The Minari dataset at {path} cannot be read ({error}): restore it, or give another one."
    )


def write_minari_files(
    path: Path,
    episodes: Iterable[Mapping[str, Any]],
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> None:
    """Write episodes, as Minari's `EpisodeBuffer` has them, and `NOTES`; all of them or none.

    Raises:
        ConfigurationError: where something is there already.
        WriteError: where the disk is full.
    """
    minari = import_extra("minari")
    storage = import_extra("minari.dataset.minari_storage").MinariStorage
    buffer = import_extra("minari.data_collector.episode_buffer").EpisodeBuffer
    require(
        not path.exists() or not any(path.iterdir()),
        f"{path} is not empty: give a directory that is not there yet.",
    )
    # Absolute: of a relative path Minari asks for sizes at another place.
    unfinished = path.absolute().parent / f"{UNFINISHED}-{path.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    with writing(path):
        unfinished.mkdir(parents=True)
        made = storage.new(
            unfinished / "data", observation_space, action_space, jpeg_encoding=False
        )
        made.update_metadata({"dataset_id": path.name, "minari_version": minari.__version__})
        for number, episode in enumerate(episodes):
            fields = {name: value for name, value in episode.items() if name not in NOTES}
            made.update_episodes([buffer(id=number, **fields)])
            notes: dict[str, Any] = {"task": episode["task"]}
            notes |= {key: json.dumps(episode[key]) for key in ("tasks", "names") if episode[key]}
            if not episode["final_known"]:
                notes["final_known"] = False
            made.update_episode_metadata([notes], [number])
    move(unfinished, path)


def steps_of(infos: Mapping[str, Any] | None, length: int) -> dict[str, np.ndarray]:
    """Return what infos say of each step [L, ...], by name, with a dot for each level.

    Minari has one more where it also keeps the info of the reset, which is of no step.
    """
    found: dict[str, np.ndarray] = {}
    for name, value in (infos or {}).items():
        if isinstance(value, Mapping):
            below = steps_of(value, length)
            found |= {f"{name}.{key}": array for key, array in below.items()}
            continue
        array = np.asarray(value)
        if array.ndim and array.dtype.kind in "biuf" and len(array) in (length, length + 1):
            found[name] = array[len(array) - length :]
    return found


def infos_of(steps: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the infos of a reset and of each step, zero at the reset: see `steps_of`."""
    infos: dict[str, Any] = {}
    for name, values in steps.items():
        *above, last = name.split(".")
        here = infos
        for key in above:
            here = here.setdefault(key, {})
        here[last] = np.concatenate([np.zeros_like(values[:1]), values])
    return infos
