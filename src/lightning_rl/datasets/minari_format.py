"""Read and write Minari datasets on this machine, an episode at a time, by Minari itself.

`<dataset>/data/metadata.json` says what it is; episodes lie beside it. Nothing is downloaded, no
env is made, and pictures are written as they are, not as the JPEG that Minari makes of them.

Source: Minari 0.5 (Farama Foundation, minari.farama.org), `minari.dataset.minari_storage`.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from lightning_rl.buffers.columns import available_bytes
from lightning_rl.datasets.lerobot_format import MOST_VALUES, check_file, import_extra, read_json
from lightning_rl.datasets.pictures import jpeg_bytes
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.files import move, writing

METADATA = "metadata.json"

NOTES = ("task", "tasks", "names", "final_known")
"""What we write into an episode's metadata: Minari has no place for it.

`names` maps the names that HDF5 gives back to those that had a slash, which HDF5 takes for a level.
"""

HDF5 = "main_data.hdf5"
"""The file of all episodes; the Arrow form has a folder for each episode instead."""

MOST_EPISODES = 10**6
"""The most episodes that are read."""

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
        self.path, folder = path, minari_folder(path) or path
        self._folder = folder
        try:
            said = read_json(folder / METADATA)
            require(  # else Minari would make the env that the dataset names
                {"observation_space", "action_space"} <= set(said),
                f"The dataset at {path} does not say its spaces: record it again with Minari 0.4 "
                "or newer.",
            )
            count = said.get("total_episodes", -1)
            require(
                type(count) is int and 0 <= count <= MOST_EPISODES,
                f"The dataset at {path} has {count!r} episodes, which is a number up to "
                f"{MOST_EPISODES:,}: restore {METADATA}.",
            )
            self._check_files(range(count))
            _check_spaces(said)
            self._storage = storage.read(folder)
            found = self._storage.get_episode_metadata(range(count))
            self.lengths = [int(episode["total_steps"]) for episode in found]
        except Exception as error:  # a damaged or malicious file fails in many ways
            raise _unreadable(path, error) from error
        self.spaces = self._storage.observation_space, self._storage.action_space

    def read(self, index: int) -> dict[str, Any]:
        """Return what Minari has of an episode, with `NOTES` where we have written them.

        Raises:
            ConfigurationError: where the file is damaged.
        """
        try:
            self._check_size(index)
            (episode,) = self._storage.get_episodes([index])
            (said,) = self._storage.get_episode_metadata([index])
            tasks = [str(task) for task in json.loads(said.get("tasks", "[]"))]
            names = {str(k): str(v) for k, v in json.loads(said.get("names", "{}")).items()}
        except Exception as error:  # a damaged or malicious file fails in many ways
            raise _unreadable(self.path, error) from error
        return {
            **episode,
            "task": str(said.get("task", "")),
            "tasks": tasks,
            "names": names,
            "final_known": bool(said.get("final_known", True)),
        }

    def _check_files(self, episodes: Iterable[int]) -> None:
        """Refuse what is no regular file, and an HDF5 file whose entries lie elsewhere.

        Raises:
            OSError, ValueError: naming what is wrong.
        """
        if not (self._folder / HDF5).exists():  # Arrow: a folder for each episode
            for number in episodes:
                for file in (self._folder / str(number)).iterdir():
                    check_file(file)
            return
        check_file(self._folder / HDF5)
        with import_extra("h5py").File(self._folder / HDF5, "r") as file:
            for number in episodes:
                _linked(file, f"episode_{number}")

    def _check_size(self, index: int) -> None:
        """Refuse an episode that the memory has no room for.

        Raises:
            ValueError: naming the size, or an entry that lies elsewhere.
        """
        if not (self._folder / HDF5).exists():
            return
        with import_extra("h5py").File(self._folder / HDF5, "r") as file:
            size = _size_of(file, f"episode_{index}", set())
        room = available_bytes("cpu", torch.device("cpu"), self.path)
        if room is not None and size > room:
            raise ValueError(f"episode {index} takes {size:,} bytes, and {room:,} are free")


def _check_spaces(said: Mapping[str, Any]) -> None:
    """Refuse spaces of arrays that are too large to be made.

    Raises:
        ValueError: naming the shape.
    """
    pending = [json.loads(said[name]) for name in ("observation_space", "action_space")]
    while pending:
        one = pending.pop()
        below = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        pending += [child for child in below if isinstance(child, dict | list)]
        shape = one.get("shape") if isinstance(one, dict) else None
        if isinstance(shape, list) and prod(map(int, shape)) > MOST_VALUES:
            raise ValueError(f"a space has the shape {shape}")


def _linked(group: Any, name: str) -> Any:
    """Return an entry of an HDF5 group that lies in this file.

    Raises:
        ValueError: if the entry is a link: to another file, host or entry.
    """
    h5py = import_extra("h5py")
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"its entry {group.name}/{name} is missing, or a link to another one")
    return group[name]


def _size_of(group: Any, name: str, seen: set[int]) -> int:
    """Return how many bytes an entry of an HDF5 group takes in memory.

    Raises:
        ValueError: if its values lie in other files, or it holds itself.
    """
    h5py = import_extra("h5py")
    entry = _linked(group, name)
    address = h5py.h5o.get_info(entry.id).addr
    if address in seen:
        raise ValueError(f"its entry {entry.name} occurs twice")
    seen.add(address)
    if isinstance(entry, h5py.Group):
        return sum(_size_of(entry, key, seen) for key in entry)
    if not isinstance(entry, h5py.Dataset) or entry.external or entry.is_virtual:
        raise ValueError(f"the values of its entry {entry.name} lie in other files")
    size = int(entry.nbytes)
    if h5py.check_vlen_dtype(entry.dtype) == np.uint8:  # pictures, which Minari decodes
        size += sum(jpeg_bytes(bytes(content)) for content in entry)
    return size


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
