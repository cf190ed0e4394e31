"""Read and write local Minari datasets, one episode at a time, with Minari itself.

`<dataset>/data/metadata.json` describes the dataset; next to it is one HDF5 file, or one Arrow or
Parquet file per episode. Reading downloads nothing and makes no env.

Source: Minari 0.5 (Farama Foundation, minari.farama.org), `minari.dataset.minari_storage`.
"""

import json
import shutil
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl import ConfigurationError
from lightning_rl.extend.algorithms import available_bytes
from lightning_rl.extend.errors import reason_of, require
from lightning_rl.extend.files import expanded, move, writing
from lightning_rl.extend.rollout import map_tree, tree_of_leaves
from lightning_rl.extend.spaces import as_env_counts, as_policy_counts, choices_of, first_choice
from lightning_rl.extensions.datasets.ends import EndRule, Ends, as_flags
from lightning_rl.extensions.datasets.episode import Episode, Episodes
from lightning_rl.extensions.datasets.lerobot_format import (
    MOST_VALUES,
    action_leaf,
    as_dtype,
    check_file,
    file_form,
    import_extra,
    kind_of,
    leaves_of,
    read_json,
)
from lightning_rl.extensions.datasets.lerobot_reader import MOST_STEPS
from lightning_rl.extensions.datasets.pictures import jpeg_bytes
from lightning_rl.extensions.datasets.tables import TableFile

METADATA = "metadata.json"
"""File that describes a dataset, and each episode unless the format is HDF5."""

HDF5 = "main_data.hdf5"
"""File of all episodes; the other formats have a folder per episode."""

MOST_EPISODES = 10**6
"""Maximum number of episodes to read."""

UNFINISHED = ".tmp-minari"
"""Prefix of the folder of an incomplete dataset."""


def minari_folder(path: Path) -> Path | None:
    """Return the folder of a Minari dataset's data; None if there is none."""
    # `path` is the dataset's folder, or already its `data` folder.
    return next((folder for folder in (path / "data", path) if (folder / METADATA).is_file()), None)


class MinariEpisodes(Episodes):
    """Episodes of a Minari dataset; see `read_episodes` for the arguments.

    Raises:
        ConfigurationError: if the dataset cannot be read, lacks its spaces, or belongs to another
            env.
    """

    fps = None

    def __init__(
        self,
        path: Path,
        keys: Mapping[str, str],
        observation_space: gymnasium.Space[Any] | None,
        action_space: gymnasium.Space[Any] | None,
        ends: Ends | None,
    ) -> None:
        self.path, self._folder = path, minari_folder(path) or path
        self._infos = {"success": "success", "is_success": "success", "intervened": "intervened"}
        self._infos |= {"is_intervention": "intervened", **keys}
        self._left_out: set[str] = set()  # infos that a warning has named
        for name in keys.values():
            require(
                name in ("success", "intervened"),
                f"keys names an entry of a Minari dataset's infos {name}, but only success and "
                "intervened are possible.",
            )
        try:
            lengths = self._open()
        except Exception as error:  # a damaged or malicious file may raise anything
            raise self._unreadable(error) from error
        self._dtypes: dict[str, str] = {}  # of the env, if it is known, by name of the array
        self._check_spaces(observation_space, action_space)
        self.first_action = first_choice(self._storage.action_space)
        self._action_shape = (action_space or self._storage.action_space).shape or ()
        self.rule = EndRule({name: name for name in ("terminated", "truncated")}, ends, path)
        self._numbers = self._with_steps(lengths)
        self.lengths = [lengths[number] for number in self._numbers]

    def _open(self) -> list[int]:
        storage = import_extra("minari.dataset.minari_storage").MinariStorage
        metadata = read_json(self._folder / METADATA)
        require(  # without spaces, Minari would make the dataset's env
            {"observation_space", "action_space"} <= set(metadata),
            f"The dataset at {self.path} does not contain its spaces: record it again with Minari "
            "0.4 or newer.",
        )
        count = metadata.get("total_episodes", -1)
        require(
            type(count) is int and 0 <= count <= MOST_EPISODES,
            f"The dataset at {self.path} has {count!r} episodes, not a number up to "
            f"{MOST_EPISODES:,}: restore {METADATA}.",
        )
        self._hdf5 = (self._folder / HDF5).exists()
        # Before Minari opens anything: a link may leave the dataset, a shape may take all memory.
        self._check_files(count)
        _check_shapes(metadata)
        self._storage = storage.read(self._folder)
        episodes = self._storage.get_episode_metadata(range(count))
        return [int(episode["total_steps"]) for episode in episodes]

    def _unreadable(self, error: Exception) -> ConfigurationError:
        if isinstance(error, ConfigurationError):
            return error
        return ConfigurationError(
            f"The Minari dataset at {self.path} cannot be read ({reason_of(error)}): restore it, "
            "or give another one."
        )

    def _check_files(self, count: int) -> None:
        if not self._hdf5:
            for number in range(count):
                for file in (self._folder / str(number)).iterdir():
                    check_file(file)
            return
        check_file(self._folder / HDF5)
        with import_extra("h5py").File(self._folder / HDF5, "r") as file:
            for number in range(count):
                _linked(file, f"episode_{number}")

    def _check_spaces(self, *spaces: gymnasium.Space[Any] | None) -> None:
        names, stored_spaces = ("observation", "action"), self.spaces()
        for name, env_space, stored_space in zip(names, spaces, stored_spaces, strict=True):
            stored = _arrays_of(stored_space, name)
            require(
                name == "observation" or [path for path, *_ in stored] == [()],
                f"The dataset at {self.path} has actions of several parts, {stored_space}, but "
                "only actions of one array are read: record them as one Box.",
            )
            if env_space is None:
                continue
            forms = [env_space] if name == "observation" else [env_space, file_form(env_space)]
            require(
                sorted(stored) in [sorted(_arrays_of(form, name)) for form in forms]
                and (name == "observation" or _same_choices(env_space, stored_space)),
                f"The dataset at {self.path} belongs to another env: its {name} space is "
                f"{stored_space}, but this env's is {env_space}. Record it with this env.",
            )
            for leaf in leaves_of(env_space, name):
                self._dtypes[".".join((name, *leaf.path))] = leaf.dtype

    def _check_size(self, number: int) -> None:
        if self._hdf5:
            with import_extra("h5py").File(self._folder / HDF5, "r") as file:
                size = _size_of(file, f"episode_{number}", set())
        else:
            size = sum(
                _size_of_table(file, self._storage.FORMAT)
                for file in (self._folder / str(number)).iterdir()
                if file.name != METADATA
            )
        room = available_bytes("cpu", torch.device("cpu"), self.path)
        if room is not None and size > room:
            raise ValueError(f"episode {number} takes {size:,} bytes, but {room:,} are free")

    def read(self, index: int) -> Episode:
        assert self.rule is not None
        number, length, name = self._numbers[index], self.lengths[index], self.name_of(index)
        try:
            # Minari reads whole arrays, so their size must be known before.
            self._check_size(number)
            (raw,) = self._storage.get_episodes([number])
            (metadata,) = self._storage.get_episode_metadata([number])
            tasks = tuple(str(task) for task in json.loads(metadata.get("tasks", "[]")))
            names = {str(k): str(v) for k, v in json.loads(metadata.get("names", "{}")).items()}
        except Exception as error:  # a damaged or malicious file may raise anything
            raise self._unreadable(error) from error
        infos = self._steps_of(raw["infos"] or {}, length)
        step_flags = {}
        for key, flag in self._infos.items():
            if key in infos:
                step_flags[flag] = _per_step(infos.pop(key), length, key, name).astype(bool)
            # `_steps_of` left it out, although the user or Minari's convention gives it a meaning.
            elif key in (raw["infos"] or {}):
                raise ConfigurationError(
                    f"{name}: its info '{key}' has no number for each of its {length} steps. "
                    "Correct it, or name another entry: keys: {<entry>: " + flag + "}."
                )
        successes = step_flags.get("success")
        success = None if successes is None else self._success_of(successes, name)
        flags = {
            flag: as_flags(_per_step(raw[key], length, key, name), f"{name}: its {key}")
            for flag, key in {"terminated": "terminations", "truncated": "truncations"}.items()
        }
        terminated, truncated = self.rule.apply(length, flags, success, name)
        observation, action = self._values(raw, length, name)
        return Episode(
            observation=map_tree(torch.from_numpy, observation),
            action=torch.from_numpy(as_policy_counts(action, self.first_action)),
            reward=torch.from_numpy(_per_step(raw["rewards"], length, "rewards", name)),
            terminated=terminated,
            truncated=truncated,
            success=success,
            intervened=torch.from_numpy(step_flags.get("intervened", np.zeros(length, bool))),
            task=str(metadata.get("task", "")),
            extra={names.get(key, key): torch.from_numpy(x) for key, x in infos.items()},
            final_known=bool(metadata.get("final_known", True)),
            tasks=tasks,
            end_rule=str(metadata.get("end_rule", "")),
        )

    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        return self._storage.observation_space, self._storage.action_space

    def _values(self, raw: Mapping[str, Any], length: int, name: str) -> tuple[Any, np.ndarray]:
        """Return observations and actions, in the dtypes of the env if it is known."""
        action, space = raw["actions"], self._storage.action_space
        require(
            action.shape == (length, *(space.shape or ())) and action.dtype.kind in "biuf",
            f"{name} has actions of shape {list(action.shape)} for {length} steps of {space}. "
            "Correct them, or leave the episode out.",
        )
        leaves = {}
        for leaf in leaves_of(self._storage.observation_space):
            part = ".".join(("observation", *leaf.path))
            values = raw["observations"]
            for key in leaf.path:
                values = values.get(key) if isinstance(values, Mapping) else None
            # By leaf: Minari does not compare what it reads with the space.
            require(
                isinstance(values, np.ndarray)
                and values.dtype.kind in "biuf"
                and values.shape[1:] == leaf.shape,
                f"{name} has no numbers of shape {list(leaf.shape)} as {part}, which its space "
                "has. Correct it, or leave the episode out.",
            )
            leaves[leaf.path] = self._in_dtype(values, part, name)
        action = self._in_dtype(action, "action", name).reshape(length, *self._action_shape)
        return tree_of_leaves(leaves), action

    def _in_dtype(self, values: np.ndarray, part: str, name: str) -> np.ndarray:
        dtype = self._dtypes.get(part, values.dtype.name)
        return values if values.dtype == dtype else as_dtype(values, dtype, f"{name}: its {part}")

    def _steps_of(self, infos: Mapping[str, Any], length: int) -> dict[str, np.ndarray]:
        steps = {}
        left_out = set()
        pending = dict(infos)
        while pending:
            # Nested infos become dotted names; a loop, because the nesting may be deep.
            name, value = next(iter(pending.items()))
            del pending[name]
            if isinstance(value, Mapping):
                pending |= {f"{name}.{key}": below for key, below in value.items()}
                continue
            array = np.asarray(value)
            # With L + 1 entries, the first entry is the info of the reset.
            if array.ndim and array.dtype.kind in "biuf" and len(array) in (length, length + 1):
                steps[name] = array[len(array) - length :]
            else:
                left_out.add(name)
        if new := left_out - self._left_out:
            rank_zero_warn(
                f"The dataset at {self.path} has infos that are not read, because they do not have "
                f"one number per step: {', '.join(sorted(new))}."
            )
        self._left_out |= left_out
        return steps


def _arrays_of(space: gymnasium.Space[Any], name: str) -> list[tuple[Any, ...]]:
    return [(leaf.path, leaf.shape, kind_of(leaf.dtype)) for leaf in leaves_of(space, name)]


def _same_choices(space: Any, stored: Any) -> bool:
    same_first = np.array_equal(first_choice(space), first_choice(stored))
    return not choices_of(stored) or (same_first and choices_of(space) == choices_of(stored))


def _per_step(values: Any, length: int, key: str, name: str) -> np.ndarray:
    array = np.asarray(values)
    require(
        array.ndim > 0 and array.size == length == len(array) and array.dtype.kind in "biuf",
        f"{name} has {array.shape[0] if array.ndim else 1} {key} of shape {list(array.shape[1:])} "
        f"for {length} steps. Correct them, or leave the episode out.",
    )
    return array.reshape(length)


def _check_shapes(metadata: Mapping[str, Any]) -> None:
    pending = [json.loads(metadata[name]) for name in ("observation_space", "action_space")]
    # Before the space is made: a Box allocates its bounds.
    while pending:
        node = pending.pop()
        parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        pending += [child for child in parts if isinstance(child, dict | list)]
        shape = node.get("shape") if isinstance(node, dict) else None
        if isinstance(shape, list) and prod(map(int, shape)) > MOST_VALUES:
            raise ValueError(f"a space has the shape {shape}")


def _linked(group: Any, name: str) -> Any:
    h5py = import_extra("h5py")
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"its entry {group.name}/{name} is missing, or is a link to another entry")
    return group[name]


def _size_of(group: Any, name: str, addresses: set[int]) -> int:
    """Return the bytes in memory of an HDF5 entry; refuse external values and cycles."""
    h5py = import_extra("h5py")
    entry = _linked(group, name)
    # Two links to one group could form a cycle, or count one array twice.
    address = h5py.h5o.get_info(entry.id).addr
    if address in addresses:
        raise ValueError(f"its entry {entry.name} occurs twice")
    addresses.add(address)
    if isinstance(entry, h5py.Group):
        return sum(_size_of(entry, key, addresses) for key in entry)
    if not isinstance(entry, h5py.Dataset) or entry.external or entry.is_virtual:
        raise ValueError(f"the values of its entry {entry.name} lie in other files")
    size = int(entry.nbytes)
    if h5py.check_vlen_dtype(entry.dtype) == np.uint8:  # pictures: Minari decodes them
        size += sum(jpeg_bytes(bytes(content)) for content in entry)
    return size


def _size_of_table(path: Path, kind: str) -> int:
    if kind == "parquet":
        table = TableFile(path).rows(0, MOST_STEPS + 2)
    else:
        _refuse_compressed(np.memmap(path, np.uint8, "r"))
        with path.open("rb") as file:
            table = import_extra("pyarrow.ipc").open_file(file).read_all()
    if len(table) > MOST_STEPS + 1:
        raise ValueError(f"{path} has more than the {MOST_STEPS + 1:,} rows of the longest episode")
    size = int(table.nbytes)
    # `nbytes` counts compressed pictures; look for them inside structs too.
    columns = import_extra("pyarrow").table(table.select(["observations", "actions"]))
    while any(hasattr(kind, "fields") for kind in columns.schema.types):
        columns = columns.flatten()
    for column in columns.columns:
        if "binary" in str(column.type):  # pictures: Minari decodes them
            size += sum(jpeg_bytes(content.as_py()) for content in column)
    return size


def _refuse_compressed(content: Any) -> None:
    """Refuse an Arrow file with compressed columns, which could expand to any size.

    Source: the format of Arrow's files, version 5 (`File.fbs`, `Message.fbs`), and of flatbuffers.
    """

    def number(kind: str, at: int) -> int:
        return int(struct.unpack_from(f"<{kind}", content, at)[0])

    def target(at: int) -> int:
        return at + number("I", at)

    def field(table: int, index: int) -> int:
        # A table begins with the distance to its vtable: its size, the table's, then one uint16
        # offset per field; 0 means absent.
        vtable = table - number("i", table)
        at = 4 + 2 * index
        offset = number("H", vtable + at) if at < number("H", vtable) else 0
        return table + offset if offset else 0

    footer_end = len(content) - 10  # before the footer's size and ARROW1
    footer = target(footer_end - number("i", footer_end))
    for kind in (2, 3):  # dictionaries and groups of rows
        first_block = target(field(footer, kind)) if field(footer, kind) else 0
        for i in range(number("I", first_block) if first_block else 0):
            # A block takes 24 bytes: its offset, the size of its metadata, the size of its body.
            start = number("q", first_block + 4 + 24 * i)
            message = target(start + (8 if number("I", start) == 2**32 - 1 else 4))
            # Field 2 of a message is its header; field 3 of a group of rows is the compression.
            rows = target(field(message, 2))
            rows = target(field(rows, 1)) if kind == 2 else rows
            if field(rows, 3):
                raise ValueError(
                    "its columns are compressed: write it without compression, or as HDF5"
                )


def write_minari(
    path: str | Path,
    episodes: Iterable[Episode],
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> None:
    """Write episodes as a Minari dataset, bit for bit; all of them or none.

    Args:
        path: path of a new directory. Minari finds it by name in `MINARI_DATASETS_PATH`.
        episodes: consumed one at a time.
        observation_space: observation space of the env.
        action_space: action space of the env.

    Raises:
        ConfigurationError: if the directory is not empty, and for a space that cannot be written.
        WriteError: if the disk is full.
    """
    for leaf in leaves_of(observation_space):
        require(
            not any("/" in key for key in leaf.path),
            f"Minari cannot read an observation with the key {leaf.path}, which has a slash: "
            "rename it (gymnasium.wrappers.TransformObservation), or write a LeRobotDataset.",
        )
    action_space = file_form(action_space)
    action_leaf(action_space)
    minari = import_extra("minari")
    storage = import_extra("minari.dataset.minari_storage").MinariStorage
    path = expanded(path)
    require(
        not path.exists() or not any(path.iterdir()), f"{path} is not empty: give a new directory."
    )
    # Absolute, because Minari resolves relative paths against another folder.
    # On the same file system as the target, so that the last move is atomic.
    unfinished = path.absolute().parent / f"{UNFINISHED}-{path.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    with writing(path):
        unfinished.mkdir(parents=True)
        dataset = storage.new(
            unfinished / "data", observation_space, action_space, jpeg_encoding=False
        )
        dataset.update_metadata({"dataset_id": path.name, "minari_version": minari.__version__})
        for number, episode in enumerate(episodes):
            _write_episode(dataset, number, episode, action_space)
    move(unfinished, path)


def _write_episode(
    storage: Any, number: int, episode: Episode, space: gymnasium.Space[Any]
) -> None:
    episode.check_lengths()
    actions = as_env_counts(episode.action.numpy(), first_choice(space))
    if isinstance(space, gymnasium.spaces.MultiBinary):  # flat floats in rollouts
        actions = as_dtype(actions, "int8", f"Episode {number}: its action")
        actions = actions.reshape(len(episode), *space.shape)
    steps = {name: values.numpy() for name, values in episode.extra.items()}
    steps["is_intervention"] = episode.intervened.numpy()
    if episode.success is not None:
        success = np.zeros(len(episode), bool)
        success[-1] = episode.success
        steps["success"] = success
    # Minari also stores an info of the reset: zeros.
    infos = {
        tuple(name.split(".")): np.concatenate([np.zeros_like(values[:1]), values])
        for name, values in steps.items()
    }
    buffer = import_extra("minari.data_collector.episode_buffer").EpisodeBuffer(
        id=number,
        observations=map_tree(lambda leaf: leaf.numpy(), episode.observation),
        actions=actions,
        rewards=episode.reward.numpy(),
        terminations=episode.terminated.numpy(),
        truncations=episode.truncated.numpy(),
        infos=tree_of_leaves(infos),
    )
    storage.update_episodes([buffer])
    # Minari has no fields for these numbers. HDF5 reads a slash in a name as a level.
    names = {name.replace("/", "."): name for name in steps if "/" in name}
    lists = {"tasks": episode.tasks, "names": names}
    notes: dict[str, Any] = {"task": episode.task}
    notes |= {key: json.dumps(value) for key, value in lists.items() if value}
    notes |= {"end_rule": episode.end_rule} if episode.end_rule else {}
    notes |= {} if episode.final_known else {"final_known": False}
    storage.update_episode_metadata([notes], [number])
