"""Read episodes that somebody recorded, and record some, without holding a dataset in memory."""

import os
import shutil
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf, nan, prod
from pathlib import Path
from typing import Any, Literal, overload

import gymnasium
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_rl.buffers.columns import available_bytes
from lightning_rl.datasets import lerobot_format as lerobot
from lightning_rl.datasets.ends import FLAGS, EndRule, Ends, as_flags, check_times
from lightning_rl.datasets.joining import (
    FINISHED,
    TOPS,
    UNFINISHED,
    complete_join,
    join_files,
    part_of,
)
from lightning_rl.datasets.lerobot_format import Leaf, leaves_of
from lightning_rl.datasets.minari_format import (
    MinariFile,
    infos_of,
    minari_folder,
    steps_of,
    write_minari_files,
)
from lightning_rl.datasets.pictures import CURE, decode_picture, read_frames
from lightning_rl.datasets.recording import ROWS, Recording
from lightning_rl.datasets.tables import TableFile, read_table, readable
from lightning_rl.rollout.contract import map_tree
from lightning_rl.rollout.structured_actions import (
    StructuredActions,
    as_env_counts,
    as_policy_counts,
    choices_of,
    first_choice,
)
from lightning_rl.system.errors import ConfigurationError, check_range, closest, require
from lightning_rl.system.files import (
    TEMPORARY,
    expanded,
    lock_file,
    move,
    write_atomically,
    writing,
)

Pictures = Literal["video", "png"]
"""How pictures are kept: compressed with some loss in a video, or without in the table."""

UNDER_WAY = ".recording"
"""The folder of what is not yet an episode."""

LOCK = ".lock"
"""The file that the process which records into a directory holds."""

BEGUN = ".lightning_rl_recording"
"""The file that marks a dataset without a finished episode.

Only a directory with this mark, or a dataset, is written into.
"""

BEGUN_TEXT = b"rl-cli record began a dataset here. No episode is finished yet.\n"
"""The content of that file."""

_NONE_FINISHED = "The dataset at {} holds no finished episode: record one."

Outside = Literal["clip", "refuse"]
"""What becomes of actions outside the bounds of a Box action space."""


@dataclass
class Episode:
    """One finished episode of L steps.

    Attributes:
        observation: [L+1, ...], a tensor or a tree of them; the last is the episode's true final
            observation, unless `final_known` is false.
        action: [L, *A], what was executed.
        reward: [L] float32, or float64 where the dataset has that; NaN where it has none.
        terminated: [L] bool, only the last may be true.
        truncated: [L] bool, only the last may be true, next to `terminated` too.
        success: whether it succeeded; None where nobody has said.
        intervened: [L] bool, whether somebody else than the policy chose the action.
        task: what was to be done, in words, at the first step.
        tasks: the task of each step [L] if the task changes during the episode; else empty.
        extra: [L, ...] each, what else is known of each step, by name: penalties, labels.
        final_known: whether the dataset holds the true final observation. Where not, the last one
            is that before it again: nothing may be bootstrapped from it.
    """

    observation: Any
    action: Any
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: bool | None
    intervened: Tensor
    task: str
    extra: dict[str, Tensor] = field(default_factory=dict)
    final_known: bool = True
    tasks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.reward)


class Episodes(Sequence[Episode]):
    """Episodes of a dataset, each read when it is asked for and not kept.

    Attributes:
        path: of the dataset.
        fps: frames per second; None where the dataset does not say.
        lengths: steps of each episode.
        action_space: actions are checked against it; None if unknown.
        actions_outside: what becomes of actions outside its bounds.
        rule: how the ends of episodes are read; None where `read` does not ask for one.
        columns: the column of each part of an observation, by its path, of the action and the
            reward, for messages; their own names where absent.
        first_action: the number of the first choice in the files, see `first_choice`.
    """

    path: Path
    fps: float | None
    lengths: list[int]
    action_space: gymnasium.Space[Any] | None = None
    actions_outside: Outside = "clip"
    rule: EndRule | None = None
    columns: Mapping[str, str] = {}
    first_action: np.ndarray = np.asarray(0)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Episode]:
        # Sequence's own iterator takes any IndexError inside `read` for the end.
        return self.each(range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...

    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        if isinstance(index, slice):
            return list(self.each(range(*index.indices(len(self)))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} episodes, there is none {index}.")
        (episode,) = self.each([index % len(self)])
        return episode

    def each(self, numbers: Iterable[int]) -> Iterator[Episode]:
        """Read episodes, by their numbers from 0, and warn once of actions that were clipped.

        Raises:
            ConfigurationError: for numbers that are not finite, and for actions that the action
                space does not have.
        """
        clipped = steps = 0
        try:
            for number in numbers:
                episode, name = self.read(number), self.name_of(number)
                check_lengths(episode, name)
                check_finite(episode, self.columns, name)
                if self.action_space is not None:
                    refuse = self.actions_outside == "refuse"
                    clipped += keep_within(episode, self.action_space, refuse, name)
                steps += len(episode)
                yield episode
        finally:
            if clipped:
                rank_zero_warn(
                    f"{clipped:,} of {steps:,} actions of the dataset at {self.path} lie outside "
                    f"of {self.action_space}, and are clipped to it (actions_outside: refuse "
                    "refuses them)."
                )

    @abstractmethod
    def read(self, index: int) -> Episode:
        """Read an episode, by its number from 0, without the checks of `each`."""

    def name_of(self, index: int) -> str:
        """Return what messages call an episode."""
        return f"Episode {index} of the dataset at {self.path}"

    def successes(self) -> list[bool | None]:
        """Return whether each episode succeeded; None where nobody has said."""
        return [self.read(index).success for index in range(len(self))]

    def _without_empty(self, lengths: Sequence[int]) -> list[int]:
        """Return which episodes have steps, and warn of those that have none."""
        kept = [i for i, length in enumerate(lengths) if length > 0]
        if len(kept) < len(lengths):
            empty = ", ".join(str(i) for i, length in enumerate(lengths) if length <= 0)
            rank_zero_warn(
                f"The dataset at {self.path} has episodes without steps ({empty}): they are left "
                "out, and those behind them have lower numbers here."
            )
        return kept


def check_lengths(episode: Episode, name: str) -> None:
    """Refuse an episode whose parts do not have one entry for each step.

    Args:
        episode: of L steps, by its rewards; its observations have one more.
        name: of the episode, for the message.

    Raises:
        ConfigurationError: naming the part.
    """
    length = len(episode)
    leaves = _leaves_of(episode.observation)
    parts: list[tuple[str, Sized, int]] = [(part, values, length + 1) for part, values in leaves]
    fields = ("action", "terminated", "truncated", "intervened")
    parts += [(field, getattr(episode, field), length) for field in fields]
    parts += [(f"extra {key}", values, length) for key, values in episode.extra.items()]
    parts += [("tasks", episode.tasks, length)] if episode.tasks else []
    for part, values, expected in parts:
        require(
            len(values) == expected,
            f"{name} has {length} rewards, and {len(values)} of its {part} instead of {expected}. "
            "Correct it, or leave the episode out.",
        )


def check_finite(episode: Episode, columns: Mapping[str, str], name: str) -> None:
    """Refuse an episode with observations, actions or some rewards that are not finite.

    Args:
        episode: of a dataset. Where no reward is known, all of them are NaN.
        columns: see `Episodes`.
        name: of the episode, for the message.

    Raises:
        ConfigurationError: naming the column and the step.
    """
    parts = dict(_leaves_of(episode.observation))
    parts["action"] = episode.action
    if not episode.reward.isnan().all():
        parts["reward"] = episode.reward
    for part, values in parts.items():
        if not values.is_floating_point() or values.isfinite().all():
            continue
        step = int(values.isfinite().logical_not().nonzero()[0, 0])
        row = values[step].flatten()
        raise ConfigurationError(
            f"{name} has {row[~row.isfinite()][0]} in '{columns.get(part, part)}' at step {step}: "
            "networks learn from finite numbers. Correct it, or leave the episode out."
        )


def _leaves_of(tree: Any, name: str = "observation") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
        return
    for key, child in tree.items():
        yield from _leaves_of(child, f"{name}.{key}")


def keep_within(episode: Episode, space: gymnasium.Space[Any], refuse: bool, name: str) -> int:
    """Clip the actions of an episode to a Box; return how many were outside of it.

    Args:
        episode: whose choices count from 0.
        space: of its actions.
        refuse: whether an action outside of a Box is an error.
        name: of the episode, for the message.

    Raises:
        ConfigurationError: for a choice that the space does not have, and as `refuse` says.
    """
    action, first = episode.action, first_choice(space)
    flat = action.reshape(len(action), -1)
    box = space if isinstance(space, gymnasium.spaces.Box) else None
    bounds = (box.low, box.high) if box is not None else (0, np.array(choices_of(space)) - 1)
    low, high = (torch.as_tensor(bound).reshape(1, -1).to(flat) for bound in bounds)
    beyond = (flat < low) | (flat > high)
    outside = beyond.any(1)
    wrong = outside.clone() if refuse or box is None else torch.zeros_like(outside)
    if isinstance(space, StructuredActions):  # whose choices cannot be clipped
        for part in space.parts:
            if part.counts:
                numbers = flat[:, part.start : part.stop]
                wrong |= (beyond[:, part.start : part.stop] | (numbers != numbers.round())).any(1)
    if wrong.any():
        step = int(wrong.int().argmax())
        shown = as_env_counts(action[step].numpy(), first).tolist()
        raise ConfigurationError(
            f"{name} has the action {shown} at step {step}, and {space} does not have it. Correct "
            "it, leave the episode out, or take the action space that it was recorded in."
        )
    if outside.any():
        episode.action = flat.clamp(low, high).reshape(action.shape)
    return int(outside.sum())


def read_episodes(
    path: str | Path,
    keys: Mapping[str, str] | None = None,
    *,
    observation_space: gymnasium.Space[Any] | None = None,
    action_space: gymnasium.Space[Any] | None = None,
    fps: float | None = None,
    ends: Ends | None = None,
    actions_outside: Outside = "clip",
) -> Episodes:
    """Open a dataset: the directory of a LeRobotDataset v3.0, or of a Minari dataset.

    Args:
        path: of the directory.
        keys: what a column of the dataset is here, where that is not clear from its name:
            `observation`, `observation.<key>` (of a Dict, with a dot for each level), `action`,
            `reward`, `done`, `terminated`, `truncated`, `success`, `intervened`. Of Minari's, only
            an entry of its infos can be named.
        observation_space: of the env that the episodes are for; checked where given, and only its
            columns are read.
        action_space: likewise.
        fps: frames per second of that env; checked where given.
        ends: how episodes ended where the dataset does not say whether by time: see `EndRule`. The
            rule is logged, as a warning if it had to be assumed.
        actions_outside: clip actions outside the bounds of a Box, with a warning that counts them,
            or refuse them. Choices that the action space does not have are refused.

    Returns:
        a sequence of them, in the order of recording. Choices of actions count from 0, as policies
        do, where the action space is given or the dataset says it.

    Raises:
        ConfigurationError: if there is no dataset, or it is of another env or contradicts itself.
    """
    directory = expanded(path)
    if not directory.is_dir():
        raise ConfigurationError(
            f"No dataset at {directory}: give the directory of a LeRobotDataset v3.0 (the one that "
            "holds meta/info.json), or of a Minari dataset (that which holds data/metadata.json)."
        )
    kind = LeRobotEpisodes if minari_folder(directory) is None else _MinariEpisodes
    episodes: Episodes = kind(directory, keys or {}, observation_space, action_space, ends)
    episodes.action_space, episodes.actions_outside = action_space, actions_outside
    _check_fps(episodes, fps)
    assert episodes.rule is not None
    if episodes.rule.assumed:
        rank_zero_warn(
            f"The dataset at {directory} does not say which episodes time cut: "
            f"{episodes.rule.words}. If this is wrong, set ends to terminated or truncated, or "
            "name the column: keys: {<column>: terminated}."
        )
    else:
        rank_zero_info(f"Dataset {directory}: {episodes.rule.words}.")
    return episodes


def read_numbers(path: str | Path) -> "LeRobotEpisodes":
    """Open a LeRobotDataset v3.0 of which no picture is read: observations lack them.

    Args:
        path: of the directory.

    Raises:
        ConfigurationError: where there is no dataset.
    """
    episodes = LeRobotEpisodes(expanded(path), {}, None, None, None)
    episodes.leaves = [leaf for leaf in episodes.leaves if not leaf.picture]
    return episodes


def lock_dataset(path: Path) -> Callable[[], None]:
    """Lock a dataset against other processes; return the function that unlocks it.

    Raises:
        ConfigurationError: if another process writes into it, or it holds links: writing would
            change files elsewhere.
    """
    for name in (LOCK, BEGUN, UNDER_WAY, UNFINISHED, FINISHED, *TOPS):
        _refuse_link(path / name)
        for file in (path / name).rglob("*"):
            _refuse_link(file)
    descriptor = lock_file(
        path / LOCK,
        f"{{owner}} records into {path}, or labels it: two would write over each other. Wait for "
        "it, or give another directory.",
    )
    return (lambda: None) if descriptor is None else partial(os.close, descriptor)


def _refuse_link(file: Path) -> None:
    require(
        not file.is_symlink(),
        f"{file} is a link, and writing into the dataset would change files elsewhere: copy the "
        "dataset without links (cp -rL) and write into the copy.",
    )


def _is_begun(path: Path) -> bool:
    """Tell whether a directory is empty, or holds a marked dataset without a finished episode."""
    names = {file.name for file in path.iterdir() if not file.name.startswith(TEMPORARY)}
    mark = path / BEGUN
    return not names or (
        names <= {LOCK, BEGUN, UNDER_WAY, *TOPS}
        and mark.is_file()
        and mark.stat().st_size == len(BEGUN_TEXT)
        and mark.read_bytes() == BEGUN_TEXT
    )


def _check_fps(episodes: Episodes, fps: float | None) -> None:
    if fps is not None and episodes.fps is not None and abs(fps - episodes.fps) > 1e-3 * fps:
        raise ConfigurationError(
            f"The dataset at {episodes.path} has {episodes.fps:g} frames per second, and the env "
            f"takes {fps:g} steps per second: what was done in one step there takes another time "
            "here. Record it with this env, or set the env to that rate."
        )


_ROW = ("episode_index", "length", "dataset_from_index", "dataset_to_index", "success")
_PLACES = ("data/", "videos/", "meta/episodes/")
"""The columns of the table of episodes that are read, and how others of them begin."""

MOST_STEPS = 2**22
"""The most steps of an episode, which is in memory as a whole."""

NAMES = {
    "action": "action",
    "reward": "next.reward",
    "done": "next.done",
    "terminated": "next.terminated",
    "truncated": "next.truncated",
    "success": "next.success",
    "intervened": lerobot.INTERVENED,
}
"""What the columns of LeRobot's names are here, beside observations."""


class LeRobotEpisodes(Episodes):
    """Episodes of a LeRobotDataset v3.0; see `read_episodes` for the arguments.

    Raises:
        ConfigurationError: see `read_episodes`.
    """

    def __init__(
        self,
        path: Path,
        keys: Mapping[str, str],
        observation_space: gymnasium.Space[Any] | None,
        action_space: gymnasium.Space[Any] | None,
        ends: Ends | None,
    ) -> None:
        self.path = path
        info = part_of(path, lerobot.INFO)
        known = info.is_file() or not path.is_dir()
        require(known or not _is_begun(path), _NONE_FINISHED.format(path))
        self._info = lerobot.read_info(info)
        self.fps: float = float(self._info["fps"])
        self._features: dict[str, Any] = self._info["features"]
        ours = part_of(path, lerobot.OURS)
        described = lerobot.read_ours(ours, self._features) if ours.is_file() else {}
        names = _names(path, keys, self._features)
        self._columns = {
            name: named
            for name, key in NAMES.items()
            if (named := names.get(name) or _column_of(name, key, self._features)) is not None
        }
        self.leaves = self._find_observation(names, described, observation_space)
        lerobot.check_paths(self.leaves, path)
        self._action = self._find_action(described, action_space)
        self.columns = {".".join(("observation", *leaf.path)): leaf.key for leaf in self.leaves}
        self.columns |= {"action": self._action.key, **self._columns}
        self.first_action = _first_action(described, action_space)
        self.rule = EndRule(self._columns, ends, path)
        self._find_extras(described)
        self._read_table_of_episodes()
        self._open: dict[str, TableFile] = {}

    def _find_extras(self, described: Mapping[str, Any]) -> None:
        """Find the columns of extras, and tell which columns of text are left out."""
        taken = {*self._columns.values(), *(leaf.key for leaf in self.leaves)}
        extras = [key for key in self._features if key.startswith(lerobot.EXTRA)]
        texts = [
            key
            for key, feature in self._features.items()
            if key.startswith((lerobot.EXTRA, "observation.")) and feature["dtype"] in lerobot.TEXTS
        ]
        if texts:
            rank_zero_warn(
                f"The dataset at {self.path} has columns of text, which are not read: "
                f"{', '.join(texts)}."
            )
        named: Mapping[str, str] = described.get("extras", {})
        self.extras = {
            named.get(key, key.removeprefix(lerobot.EXTRA)): key
            for key in extras
            if key not in taken and key not in texts
        }

    def _read_table_of_episodes(self) -> None:
        rows: list[dict[str, Any]] = []
        for file in lerobot.files_of(part_of(self.path, lerobot.EPISODES)):
            names = TableFile(file, []).names
            wanted = [name for name in names if name in _ROW or name.startswith(_PLACES)]
            found = read_table(file, wanted).to_pylist()
            finals = [name for name in names if name.startswith("final/")]
            place = {"file": file, "finals": finals}
            rows += [{**row, **place, "row": i} for i, row in enumerate(found)]
        require(bool(rows), _NONE_FINISHED.format(self.path))
        total = self._info.get("total_episodes")
        require(
            total is None or len(rows) >= total,
            f"The dataset at {self.path} has {total} episodes by info.json, and its table lists "
            f"{len(rows)}: restore the files of {lerobot.EPISODES}.",
        )
        for number, row in enumerate(rows):
            self._check_row(number, row)
        self._begins: dict[Path, int] = {}
        for row in rows:
            path, begin = self._data_file(row), row["dataset_from_index"]
            self._begins[path] = min(begin, self._begins.get(path, begin))
        self._rows = [rows[i] for i in self._without_empty([row["length"] for row in rows])]
        require(bool(self._rows), _NONE_FINISHED.format(self.path))
        self.lengths = [row["length"] for row in self._rows]
        for leaf in self.leaves:
            if self._features[leaf.key]["dtype"] == "video":
                self._check_films(f"videos/{leaf.key}")
        tasks = part_of(self.path, lerobot.TASKS)
        with readable(tasks):
            self.tasks = lerobot.tasks_of(read_table(tasks))

    def _check_row(self, number: int, row: Mapping[str, Any]) -> None:
        """Refuse a row of the table of episodes that lacks something or contradicts itself."""
        place = ("chunk_index", "file_index")
        needed = ["episode_index", "length", "dataset_from_index", *(f"data/{x}" for x in place)]
        needed += [
            f"videos/{leaf.key}/{name}"
            for leaf in self.leaves
            if self._features[leaf.key]["dtype"] == "video" and row.get("length")
            for name in (*place, "from_timestamp")
        ]
        missing = [name for name in needed if row.get(name) is None]
        require(
            not missing,
            f"{self.name_of(number)} has no {', '.join(missing)} in the table of episodes. {CURE}",
        )
        times = [name for name in row if name.endswith("_timestamp") and row[name] is not None]
        behind = row.get("dataset_to_index")
        counts = [*needed, *([] if behind is None else ["dataset_to_index"])]
        wrong = [name for name in counts if name not in times and not _is_count(row[name])]
        wrong += [name for name in times if not _is_time(row[name])]
        require(
            not wrong and row["length"] <= MOST_STEPS,
            f"{self.name_of(number)} has {wrong[0] if wrong else 'length'} "
            f"{row[wrong[0] if wrong else 'length']!r} in the table of episodes: indices are whole "
            f"numbers from 0, times are seconds, and an episode has {MOST_STEPS:,} steps at most. "
            f"{CURE}",
        )
        require(
            behind is None or behind - row["dataset_from_index"] == row["length"],
            f"{self.name_of(number)} contradicts itself: its length is {row['length']}, and its "
            f"rows are those from {row['dataset_from_index']} to {behind}. Restore the table.",
        )
        require(
            row.get("success") in (None, True, False),
            f"{self.name_of(number)} has success {row.get('success')!r} in the table of episodes, "
            "which is true, false or null.",
        )

    def _check_films(self, prefix: str) -> None:
        """Refuse films of which two episodes would show the same frames."""
        assert self.fps is not None
        names = [f"{prefix}/{one}" for one in ("chunk_index", "file_index", "from_timestamp")]
        order = sorted(range(len(self)), key=lambda i: [self._rows[i][name] for name in names])
        for i, following in pairwise(order):
            one, other = ([self._rows[n][name] for name in names] for n in (i, following))
            last = one[2] + (self.lengths[i] - 1) / self.fps
            require(
                one[:2] != other[:2] or last <= other[2] - 0.25 / self.fps,
                f"{self.name_of(i)} contradicts itself: its last row is at {last:g} s of {prefix}, "
                f"and episode {following} begins at {other[2]:g} s there. {CURE}",
            )

    def places(self) -> list[tuple[Path, int, Path, int]]:
        """Return of each episode the file of its rows, its first row there, and its own row.

        Its own row is in the table of episodes: the file and the number of the row.
        """
        found = []
        for row in self._rows:
            path = self._data_file(row)
            begin = row["dataset_from_index"] - self._begins[path]
            found.append((path, begin, row["file"], row["row"]))
        return found

    def _data_file(self, row: Mapping[str, Any]) -> Path:
        place = {name: row[f"data/{name}"] for name in ("chunk_index", "file_index")}
        return self._file_at("data_path", **place)

    def _file_at(self, template: str, **place: Any) -> Path:
        try:
            return part_of(self.path, lerobot.filled(self._info[template], place))
        except (ValueError, OSError) as error:  # OSError: the name is too long
            raise ConfigurationError(
                f"The {template} of the dataset at {self.path}, {self._info[template]!r}, does "
                f"not fit a LeRobotDataset v3.0 ({error}): it takes {', '.join(place)}. Restore "
                "info.json."
            ) from error

    def file_numbers(self) -> dict[str, int]:
        """Return the number behind the last file of each kind."""
        cameras = [key for key, feature in self._features.items() if feature["dtype"] == "video"]
        prefixes = {"data": "data", "meta": "meta/episodes"}

        def behind(prefix: str) -> int:
            chunk, file = f"{prefix}/chunk_index", f"{prefix}/file_index"
            numbers = [row[chunk] * lerobot.CHUNK_FILES + row[file] for row in self._rows]
            return int(max(numbers)) + 1

        numbers = {kind: behind(prefix) for kind, prefix in prefixes.items()}
        return numbers | {"videos": max([0, *(behind(f"videos/{key}") for key in cameras)])}

    def _find_observation(
        self,
        names: Mapping[str, str],
        described: Mapping[str, Any],
        space: gymnasium.Space[Any] | None,
    ) -> list[Leaf]:
        """Return where each part of an observation lies, with its shape and dtype."""
        known: list[Leaf] = described.get("observation", [])
        given = {name: key for name, key in names.items() if name.split(".")[0] == "observation"}
        if space is None and given:
            return [
                lerobot.leaf_of(key, self._features[key], tuple(name.split(".")[1:]))
                for name, key in given.items()
            ]
        if space is None:
            return known or lerobot.guessed_leaves(self._features)
        by_path = {leaf.path: leaf.key for leaf in known}
        guessed, wanted = lerobot.guessed_leaves(self._features), leaves_of(space)
        parts = [".".join(("observation", *leaf.path)) for leaf in wanted]
        for name, key in given.items():
            require(
                name in parts,
                f"keys names '{key}' {name}, and the observation of this env has no such part"
                f"{closest(name, parts)}; it has {', '.join(parts)}.",
            )
        found = []
        for name, leaf in zip(parts, wanted, strict=True):
            key = given.get(name) or by_path.get(leaf.path) or leaf.key
            if key not in self._features and len(wanted) == len(guessed) == 1:
                key = guessed[0].key
            found.append(self._checked(name, key, leaf))
        return found

    def _find_action(
        self, described: Mapping[str, Any], space: gymnasium.Space[Any] | None
    ) -> Leaf:
        key = self._columns.get("action", "action")
        if space is not None:
            return self._checked("action", key, lerobot.action_leaf(space))
        if "action" in described:
            action: Leaf = described["action"]
            return replace(action, key=key)
        return self._checked("action", key, None)

    def _checked(self, name: str, key: str, leaf: Leaf | None) -> Leaf:
        """Return the leaf of a column, which must be what an env has."""
        there = sorted(key for key in self._features if key not in lerobot.INDEX_COLUMNS)
        require(
            key in self._features,
            f"The dataset at {self.path} has no column '{key}' for {name}; it has "
            f"{', '.join(there)}. Say which one it is: keys: {{<column>: {name}}}, or record it "
            "with this env.",
        )
        found = lerobot.leaf_of(key, self._features[key], ())
        if leaf is None:
            return found
        leaf = replace(leaf, key=key, picture=found.picture)  # as this dataset keeps it
        kinds = {
            "text" if one.dtype in lerobot.TEXTS else np.dtype(one.dtype).kind.replace("u", "i")
            for one in (found, leaf)
        }
        kept = "pictures" if found.picture else found.dtype
        require(
            found.shape == leaf.kept_shape and len(kinds) == 1,
            f"The dataset at {self.path} is of another env: its {key} is {kept} of shape "
            f"{list(found.shape)}, and {name} of this env is {leaf.dtype} of shape "
            f"{list(leaf.shape)}. Record it with this env, or say which column it is: "
            f"keys: {{<column>: {name}}}.",
        )
        return leaf

    def read(self, index: int) -> Episode:
        assert self.rule is not None
        row, length, name = self._rows[index], self.lengths[index], self.name_of(index)
        table = self._frames(row, length, name)
        seconds = self._seconds(table, name)
        success = self._success(row, table, name)
        flags = {one: self._flags(table, one, name) for one in FLAGS if one in self._columns}
        terminated, truncated = self.rule.apply(length, flags, success, name)
        observation, final_known = self._observations(row, table, seconds, name)
        tasks = self._tasks_of(table, name)
        action = self._numbers(table, self._action, name)
        return Episode(
            observation=observation,
            action=torch.from_numpy(as_policy_counts(action, self.first_action)),
            reward=self._reward(table, length, name),
            terminated=terminated,
            truncated=truncated,
            success=success,
            intervened=torch.from_numpy(self._flags(table, "intervened", name)),
            task=tasks[0],
            tasks=tasks if len(set(tasks)) > 1 else (),
            extra={one: self._extra(table, one, name) for one in self.extras},
            final_known=final_known,
        )

    def _column(self, table: Any, key: str, shape: tuple[int, ...], name: str) -> np.ndarray:
        """Return the values [L, *shape] of a column.

        Raises:
            ConfigurationError: naming the episode and the column, if values are missing, no
                numbers, or of another shape.
        """
        arrow = lerobot.import_extra("pyarrow")
        try:
            return lerobot.from_column(table.column(key), shape)
        except (KeyError, ValueError, arrow.ArrowException) as error:
            raise ConfigurationError(
                f"{name} cannot be read: its column '{key}' is not usable, {error}. Restore it, "
                "or leave the episode out."
            ) from error

    def _flags(self, table: Any, column: str, name: str) -> np.ndarray:
        """Return a column of `NAMES` as bool [L]; false where the dataset has none."""
        if column not in self._columns:
            return np.zeros(len(table), bool)
        key = self._columns[column]
        return as_flags(self._column(table, key, (), name), f"{name}: its column '{key}'")

    def _seconds(self, table: Any, name: str) -> np.ndarray:
        """Return the times [L] of the rows, after checking that they are one step apart."""
        assert self.fps is not None
        found = {
            key: self._column(table, key, (), name)
            for key in ("frame_index", "timestamp")
            if key in self._features
        }
        frames = found.get("frame_index", np.arange(len(table)))
        times = found["timestamp"].astype(np.float64) if "timestamp" in found else None
        check_times(frames, times, self.fps, name)
        return frames / self.fps if times is None else times

    def _tasks_of(self, table: Any, name: str) -> tuple[str, ...]:
        """Return the task of each step, in words."""
        numbers = self._column(table, "task_index", (), name).tolist()
        unknown = sorted(set(numbers) - self.tasks.keys())
        require(
            not unknown,
            f"{name} is of task {unknown[:1]}, and {lerobot.TASKS} has {sorted(self.tasks)}: "
            "restore that table.",
        )
        return tuple(self.tasks[number] for number in numbers)

    def successes(self) -> list[bool | None]:
        found = []
        for index, row in enumerate(self._rows):
            if "success" in row or "success" not in self._columns:
                found.append(row.get("success"))
            else:  # no film is decoded for it
                name = self.name_of(index)
                table = self._frames(row, self.lengths[index], name)
                found.append(self._success(row, table, name))
        return found

    def _success(self, row: Mapping[str, Any], table: Any, name: str) -> bool | None:
        said: bool | None = row.get("success")
        if "success" not in self._columns:
            return said
        succeeded = bool(self._flags(table, "success", name).any())
        require(
            "success" not in row or bool(said) == succeeded,
            f"{name} contradicts itself: its success is {said} in the table of episodes, and its "
            f"column '{self._columns['success']}' says {succeeded}. Label it: rl-cli label.",
        )
        return said if "success" in row else succeeded

    def _observations(
        self, row: Mapping[str, Any], table: Any, seconds: np.ndarray, name: str
    ) -> tuple[Any, bool]:
        """Return the observations [L+1, ...] of an episode, and whether the last is true."""
        finals = self._file("finals", row["file"], row["finals"]).rows(row["row"], 1)
        known = all(
            f"final/{leaf.key}" in row["finals"]
            and finals.column(f"final/{leaf.key}").null_count == 0
            for leaf in self.leaves
        )
        leaves: dict[tuple[str, ...], Tensor] = {}
        for leaf in self.leaves:
            column = f"final/{leaf.key}"
            if self._features[leaf.key]["dtype"] == "video":
                end = self._column(finals, column, (), name) if known else np.empty(0)
                values = self._filmed(row, leaf, np.concatenate([seconds, end]), name)
            elif leaf.picture:
                kept = [table.column(leaf.key), *([finals.column(column)] if known else [])]
                values = self._pictures(kept, leaf)
            else:
                values = self._numbers(table, leaf, name)
                if known:
                    last = replace(leaf, key=column)
                    values = np.concatenate([values, self._numbers(finals, last, name)])
            if not known:
                values = np.concatenate([values, values[-1:]])
            if leaf.channels_first:
                values = np.ascontiguousarray(values.transpose(0, 3, 1, 2))
            leaves[leaf.path] = torch.from_numpy(values)
        return _tree(leaves), known

    def _filmed(
        self, row: Mapping[str, Any], leaf: Leaf, seconds: np.ndarray, name: str
    ) -> np.ndarray:
        """Return the frames of a film at seconds [M] behind the begin of an episode."""
        assert self.fps is not None
        prefix = f"videos/{leaf.key}"
        begin: float = row[f"{prefix}/from_timestamp"]
        lasts = (row.get(f"{prefix}/to_timestamp") or inf) - begin
        last = seconds[row["length"] - 1]  # the final observation's comes behind it
        require(
            last <= lasts - 0.25 / self.fps,
            f"{name} contradicts itself: its last row is {last:g} s behind its begin, and its film "
            f"'{leaf.key}' takes {lasts:g} s. {CURE}",
        )
        place = {one: row[f"{prefix}/{one}"] for one in ("chunk_index", "file_index")}
        path = self._file_at("video_path", video_key=leaf.key, **place)
        self._check_room(len(seconds), leaf)
        return read_frames(path, (begin + seconds).tolist(), self.fps, leaf.kept_shape)

    def _check_room(self, count: int, leaf: Leaf) -> None:
        """Refuse pictures of an episode that the memory has no room for."""
        size = count * prod(leaf.kept_shape)
        room = available_bytes("cpu", torch.device("cpu"), self.path)
        require(
            room is None or size <= room,
            f"The dataset at {self.path} has an episode with {count:,} pictures in '{leaf.key}', "
            f"which take {size / 2**30:.1f} GiB, and {(room or 0) / 2**30:.1f} GiB of memory are "
            "free: leave the camera out (keys), or give shorter episodes.",
        )

    def _pictures(self, columns: Sequence[Any], leaf: Leaf) -> np.ndarray:
        """Decode the pictures of some columns into one array."""
        self._check_room(sum(map(len, columns)), leaf)
        pictures = np.empty((sum(map(len, columns)), *leaf.kept_shape), np.uint8)
        contents = (content for column in columns for content in column)
        try:
            for picture, content in zip(pictures, contents, strict=True):
                picture[...] = decode_picture(content["bytes"].as_py(), leaf.kept_shape)
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"The dataset at {self.path} has a broken picture in '{leaf.key}': {error}. {CURE}"
            ) from error
        return pictures

    def _numbers(self, table: Any, leaf: Leaf, name: str) -> np.ndarray:
        """Return the values [L, ...] of a leaf, in its dtype.

        Raises:
            ConfigurationError: if the dtype cannot hold them.
        """
        values = self._column(table, leaf.key, leaf.shape, name)
        cast = values.astype(leaf.dtype)
        require(
            cast.dtype.kind not in "iu" or np.array_equal(cast, values),
            f"{name}: its column '{leaf.key}' holds numbers that {leaf.dtype} does not, such as "
            f"{values[cast != values][:1]}. Record it with this env, or correct the column.",
        )
        return cast

    def _extra(self, table: Any, extra: str, name: str) -> Tensor:
        key = self.extras[extra]
        shape = tuple(self._features[key]["shape"])
        values = self._column(table, key, () if shape == (1,) else shape, name)
        return torch.from_numpy(values.copy())

    def _reward(self, table: Any, length: int, name: str) -> Tensor:
        if "reward" not in self._columns:
            return torch.full((length,), torch.nan)
        values = self._column(table, self._columns["reward"], (), name)
        return torch.from_numpy(values.astype(np.float32))

    def _frames(self, row: Mapping[str, Any], length: int, name: str) -> Any:
        """Return the rows of an episode in the table of data."""
        path = self._data_file(row)
        videos = {key for key, one in self._features.items() if one["dtype"] == "video"}
        wanted = {leaf.key for leaf in self.leaves} | set(self._columns.values())
        wanted |= {*self.extras.values(), self._action.key}
        wanted |= {"frame_index", "timestamp"} & self._features.keys()
        wanted |= {"episode_index", "task_index"}
        file = self._file("data", path, sorted(wanted - videos))
        table = file.rows(row["dataset_from_index"] - self._begins[path], length)
        numbers = self._column(table, "episode_index", (), name)
        require(
            len(numbers) == length and bool((numbers == row["episode_index"]).all()),
            f"{path} is damaged: it does not hold the {length} frames of episode "
            f"{row['episode_index']}. Restore it, or give another dataset.",
        )
        return table

    def _file(self, kind: str, path: Path, columns: list[str]) -> "TableFile":
        """Return a file of a kind, of which the last one stays open."""
        if kind not in self._open or self._open[kind].path != path:
            self._open[kind] = TableFile(path, columns)
        return self._open[kind]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**31


def _names(path: Path, keys: Mapping[str, str], features: Mapping[str, Any]) -> dict[str, str]:
    """Return the column of each thing that `keys` names."""
    require(
        len(set(keys.values())) == len(keys),
        f"keys names two columns the same: {dict(keys)}. Name one of them.",
    )
    for key, name in keys.items():
        require(
            key in features,
            f"keys names '{key}', and the dataset at {path} has no such column"
            f"{closest(key, features)}. It has {', '.join(sorted(features))}.",
        )
        require(
            name in NAMES or name.split(".")[0] == "observation",
            f"keys: {{{key}: {name}}} is not understood: a column is observation, "
            f"observation.<key>, {', '.join(NAMES)}.",
        )
        kind = features[key]["dtype"]
        require(
            kind not in lerobot.TEXTS and (name not in NAMES or kind not in ("image", "video")),
            f"keys names '{key}' {name}, and it is a column of {kind}, which is not read as that: "
            "name another one.",
        )
    return {name: key for key, name in keys.items()}


def _column_of(name: str, key: str, features: Mapping[str, Any]) -> str | None:
    """Return the column of an entry of `NAMES`: by LeRobot's name, or by the plain one."""
    return next((one for one in (key, name) if one in features), None)


def _first_action(described: Mapping[str, Any], space: gymnasium.Space[Any] | None) -> np.ndarray:
    """Return the number of the first choice in the columns of actions, [*A] or [].

    Raises:
        ConfigurationError: where the dataset says another one than the env.
    """
    said = described.get("action_start")
    if space is None:
        return np.asarray(said or 0)
    first = first_choice(space)
    require(
        said is None or np.array_equal(said, first),
        f"The dataset counts its actions from {said}, and this env counts from "
        f"{first.tolist()}: record it with this env.",
    )
    return first


def _tree(leaves: Mapping[tuple[str, ...], Tensor]) -> Any:
    """Return the tensors by their paths, as nested dicts."""
    if () in leaves:
        return leaves[()]
    tree: dict[str, Any] = {}
    for (*above, last), value in leaves.items():
        here = tree
        for key in above:
            here = here.setdefault(key, {})
        here[last] = value
    return tree


class _MinariEpisodes(Episodes):
    """Episodes of a Minari dataset; see `read_episodes` for the arguments."""

    fps = None

    def __init__(
        self,
        path: Path,
        keys: Mapping[str, str],
        observation_space: gymnasium.Space[Any] | None,
        action_space: gymnasium.Space[Any] | None,
        ends: Ends | None,
    ) -> None:
        self.path, self._file = path, MinariFile(path)
        self._infos = {"success": "success", "is_success": "success", "intervened": "intervened"}
        self._infos |= {"is_intervention": "intervened", **keys}
        for name in keys.values():
            require(
                name in ("success", "intervened"),
                f"keys cannot say which entry of a Minari dataset's infos is {name}: success or "
                "intervened.",
            )
        for name, given, there in zip(
            ("observation", "action"),
            (observation_space, action_space),
            self._file.spaces,
            strict=True,
        ):
            mine, theirs = (
                None if one is None else [(x.path, x.shape, x.dtype) for x in leaves_of(one, name)]
                for one in (given, there)
            )
            assert theirs is not None
            require(
                mine is None
                or (sorted(mine) == sorted(theirs) and _same_choices(name, given, there)),
                f"The dataset at {path} is of another env: its {name} space is {there}, and that "
                f"of this env is {given}. Record it with this env.",
            )
        self.first_action = first_choice(self._file.spaces[1])
        self.rule = EndRule({name: name for name in ("terminated", "truncated")}, ends, path)
        self._numbers = self._without_empty(self._file.lengths)
        self.lengths = [self._file.lengths[number] for number in self._numbers]
        require(bool(self.lengths), _NONE_FINISHED.format(path))

    def read(self, index: int) -> Episode:
        assert self.rule is not None
        raw, length, name = (
            self._file.read(self._numbers[index]),
            self.lengths[index],
            self.name_of(index),
        )
        said = steps_of(raw["infos"], length)
        known = {}
        for key, flag in self._infos.items():
            if key in said:
                known[flag] = _per_step(said.pop(key), length, key, name).astype(bool)
            elif key in (raw["infos"] or {}):
                raise ConfigurationError(
                    f"{name}: its info '{key}' has no number for each of its {length} steps. "
                    "Correct it, or name another entry: keys: {<entry>: " + flag + "}."
                )
        success = bool(known["success"].any()) if "success" in known else None
        flags = {
            flag: as_flags(_per_step(raw[key], length, key, name), f"{name}: its {key}")
            for flag, key in {"terminated": "terminations", "truncated": "truncations"}.items()
        }
        terminated, truncated = self.rule.apply(length, flags, success, name)
        action, space = raw["actions"], self._file.spaces[1]
        require(
            action.shape == (length, *(space.shape or ())) and action.dtype.kind in "biuf",
            f"{name} has actions of shape {list(action.shape)} for {length} steps of {space}. "
            "Correct them, or leave the episode out.",
        )
        for leaf in leaves_of(self._file.spaces[0]):
            values = _value_at(raw["observations"], leaf.path)
            require(
                isinstance(values, np.ndarray)
                and values.dtype.kind in "biuf"
                and values.shape[1:] == leaf.shape,
                f"{name} has no numbers of shape {list(leaf.shape)} as "
                f"{'.'.join(('observation', *leaf.path))}, which its space has. Correct it, or "
                "leave the episode out.",
            )
        return Episode(
            observation=map_tree(torch.from_numpy, raw["observations"]),
            action=torch.from_numpy(as_policy_counts(action, self.first_action)),
            reward=torch.from_numpy(_per_step(raw["rewards"], length, "rewards", name)),
            terminated=terminated,
            truncated=truncated,
            success=success,
            intervened=torch.from_numpy(known.get("intervened", np.zeros(length, bool))),
            task=raw["task"],
            tasks=tuple(raw["tasks"]),
            extra={raw["names"].get(key, key): torch.from_numpy(x) for key, x in said.items()},
            final_known=raw["final_known"],
        )


def _value_at(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _same_choices(name: str, given: Any, there: Any) -> bool:
    """Return whether two action spaces have equal choices, counted from one number."""
    if name != "action" or not choices_of(there):
        return True
    same_first = np.array_equal(first_choice(given), first_choice(there))
    return same_first and choices_of(given) == choices_of(there)


def _per_step(values: Any, length: int, key: str, name: str) -> np.ndarray:
    """Return one number for each of L steps, [L].

    Raises:
        ConfigurationError: if there are more or fewer.
    """
    array = np.asarray(values)
    require(
        array.ndim > 0 and array.size == length == len(array) and array.dtype.kind in "biuf",
        f"{name} has {array.shape[0] if array.ndim else 1} {key} of shape {list(array.shape[1:])} "
        f"for {length} steps. Correct them, or leave the episode out.",
    )
    return array.reshape(length)


def write_minari(
    path: str | Path,
    episodes: Iterable[Episode],
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> None:
    """Write episodes as a Minari dataset, bit for bit; all of them or none.

    Args:
        path: of a directory that is not there yet. Minari finds it by its name where it lies in the
            folder of its datasets (`MINARI_DATASETS_PATH`).
        episodes: are read one after the other.
        observation_space: of the env.
        action_space: likewise.

    Raises:
        ConfigurationError: where something is there already, and for a space that cannot
            be written.
    """
    for leaf in leaves_of(observation_space):
        require(
            not any("/" in key for key in leaf.path),
            f"Minari cannot read an observation with the key {leaf.path}, which has a slash: "
            "rename it (gymnasium.wrappers.TransformObservation), or write a LeRobotDataset.",
        )
    lerobot.action_leaf(action_space)
    first = first_choice(action_space)

    def raw(episode: Episode) -> dict[str, Any]:
        check_lengths(episode, "The episode")
        steps = {name: values.numpy() for name, values in episode.extra.items()}
        steps["is_intervention"] = episode.intervened.numpy()
        if episode.success is not None:
            success = np.zeros(len(episode), bool)
            success[-1] = episode.success
            steps["success"] = success
        return {
            "observations": map_tree(lambda leaf: leaf.numpy(), episode.observation),
            "actions": as_env_counts(episode.action.numpy(), first),
            "rewards": episode.reward.numpy(),
            "terminations": episode.terminated.numpy(),
            "truncations": episode.truncated.numpy(),
            "infos": infos_of(steps),
            "task": episode.task,
            "tasks": episode.tasks,
            "names": {name.replace("/", "."): name for name in steps if "/" in name},
            "final_known": episode.final_known,
        }

    write_minari_files(expanded(path), map(raw, episodes), observation_space, action_space)


class EpisodeWriter:
    """Record episodes into a LeRobotDataset v3.0, step by step.

    Memory does not grow with what is recorded, and each finished episode survives a SIGKILL at any
    moment: it has files of its own until `finalise` joins them. A directory that holds a dataset of
    the same columns is gone on with.

    Args:
        path: of the directory.
        observation_space: of the env.
        action_space: likewise.
        fps: steps per second.
        task: what is to be done, in words.
        pictures: how pictures are kept.

    Raises:
        ConfigurationError: for a space that a dataset cannot hold, where the directory holds
            something else, and where another process records into it.
    """

    def __init__(
        self,
        path: str | Path,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        fps: float,
        task: str = "",
        pictures: Pictures = "video",
    ) -> None:
        check_range("fps", fps, above=0)
        for name in ("pyarrow", "av"):
            lerobot.import_extra(name)
        self.path, self._fps = expanded(path), float(fps)
        self._task, self._video = task, pictures == "video"
        self._leaves = leaves_of(observation_space)
        self._action = lerobot.action_leaf(action_space)
        self._action_space = action_space
        self._extras: tuple[str, ...] | None = None
        self._tasks: list[str] = []
        self._episodes = self._frames = 0
        self._next = {"data": 0, "meta": 0, "videos": 0}  # the numbers of the next files
        self._recording: Recording | None = None
        self._unlock: Callable[[], object] | None = None
        self._go_on()

    def _take_lock(self) -> None:
        if self._unlock is not None:
            return
        if not part_of(self.path, lerobot.INFO).is_file():  # the mark first: see `_is_begun`
            write_atomically(self.path / BEGUN, lambda file: file.write(BEGUN_TEXT))
        self._unlock = weakref.finalize(self, lock_dataset(self.path))

    def _go_on(self) -> None:
        """Take up what the directory holds."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if not part_of(self.path, lerobot.INFO).is_file() and not _is_begun(self.path):
            there = sorted(file.name for file in self.path.iterdir())
            raise ConfigurationError(
                f"{self.path} holds {', '.join(there)}, and no dataset: give a directory that is "
                "empty, or not there yet."
            )
        self._take_lock()
        complete_join(self.path)
        self._forget()
        if (self.path / lerobot.INFO).is_file():
            self._take_up()
            (self.path / BEGUN).unlink(missing_ok=True)
        else:
            self._remove_first_episode()

    def _remove_first_episode(self) -> None:
        """Remove an unfinished first episode: until it is finished, all of the dataset is its."""
        for top in TOPS:
            shutil.rmtree(self.path / top, ignore_errors=True)
        self._tasks = []

    def _take_up(self) -> None:
        """Go on behind the episodes that are there."""
        there = LeRobotEpisodes(self.path, {}, None, None, None)
        info = lerobot.read_json(self.path / lerobot.INFO)
        self._extras = tuple(there.extras)
        mine, theirs = self._features(), info["features"]
        differing = [key for key in mine | theirs if mine.get(key) != theirs.get(key)]
        require(
            not differing
            and info["fps"] == self._fps
            and info["data_path"] == lerobot.DATA
            and info.get("video_path", lerobot.VIDEOS) == lerobot.VIDEOS
            and there.leaves == self._leaves
            and np.array_equal(there.first_action, first_choice(self._action_space)),
            f"{self.path} holds a dataset of another kind ({info['fps']:g} frames per second, "
            f"columns {', '.join(theirs)}); this one would differ in "
            f"{', '.join(differing) or 'fps, a shape, a path, or the first action'}. Give another "
            "directory.",
        )
        self._tasks = list(there.tasks.values())
        self._episodes, self._frames = len(there), sum(there.lengths)
        self._next = there.file_numbers()
        # The files of an episode that was not finished: the next ones, which no row names.
        places = {kind: lerobot.place_of(number) for kind, number in self._next.items()}
        unfinished = [lerobot.DATA.format(**places["data"])]
        unfinished += [
            lerobot.VIDEOS.format(video_key=key, **places["videos"])
            for key, feature in info["features"].items()
            if feature["dtype"] == "video"
        ]
        for name in unfinished:
            (self.path / name).unlink(missing_ok=True)

    def add(
        self,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        intervened: bool = False,
        extra: Mapping[str, float] = {},
    ) -> None:
        """Take a step in: the observation acted on, what was executed, and what came of it.

        Raises:
            ConfigurationError: where it is of other spaces, or has other extras than the first.
            RuntimeError: where the episode has ended before.
        """
        self._add(self._task, observation, action, reward, terminated, truncated, intervened, extra)

    def _add(
        self,
        task: str,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        intervened: bool,
        extra: Mapping[str, float],
    ) -> None:
        if self._extras is None:
            self._extras = tuple(sorted(extra))
            require(
                len({_extra_column(name) for name in extra}) == len(extra),
                f"Two of the extras {sorted(extra)} would have one column: rename one of them.",
            )
        unlabelled = set(self._extras) & set(lerobot.LABELS) - set(extra)
        extra = {**extra, **dict.fromkeys(unlabelled, nan)}
        if set(extra) != set(self._extras):
            raise ConfigurationError(
                f"The steps of {self.path} have the extras {list(self._extras)}, and this one has "
                f"{sorted(extra)}: give each step all of them, 0 where nothing is said."
            )
        if choices_of(self._action_space) and not isinstance(self._action_space, StructuredActions):
            given = np.asarray(action)
            require(
                given.shape == self._action.shape
                and self._action_space.contains(given.astype(self._action.dtype)[()]),
                f"{self._action_space} does not have the action {given.tolist()}: give it as the "
                "env counts.",
            )
        if self._recording is None:
            self._recording = self._begin()
        if task not in self._recording.tasks:
            self._recording.tasks.append(task)
        numbers = {
            "next.reward": reward,
            "next.done": bool(terminated or truncated),
            "next.terminated": bool(terminated),
            "next.truncated": bool(truncated),
            "next.success": False,
            lerobot.INTERVENED: bool(intervened),
        }
        numbers |= {_extra_column(name): extra[name] for name in self._extras}
        self._recording.add(observation, action, numbers, self._number_of(task))

    def end_episode(self, final_observation: Any, success: bool | None = None) -> None:
        """Finish the episode; when this returns, nothing takes it away.

        Args:
            final_observation: the one after the last step; None if unknown.
            success: whether it succeeded; None where nobody says.

        Raises:
            RuntimeError: where no step was taken.
        """
        recording = self._recording
        if recording is None:
            raise RuntimeError("end_episode was called before the first step of an episode.")
        finals = recording.finish(final_observation, success)
        videos = {leaf.key: leaf for leaf in self._leaves if self._video and leaf.picture}
        for key in videos:
            name = lerobot.VIDEOS.format(video_key=key, **lerobot.place_of(self._next["videos"]))
            move(recording.folder / f"{key}.mp4", self.path / name)
        name = lerobot.DATA.format(**lerobot.place_of(self._next["data"]))
        move(recording.folder / ROWS, self.path / name)
        self._write_row(recording, finals, success, list(videos))
        self._episodes += 1
        self._frames += recording.length
        self._next = {kind: number + 1 for kind, number in self._next.items()}
        self._write_info()
        (self.path / BEGUN).unlink(missing_ok=True)
        self._forget()

    def discard_episode(self) -> None:
        """Forget the steps of the episode under way, as where it is to be recorded again."""
        self._forget()

    def finalise(self) -> None:
        """Join the files of the episodes, and write the statistics of all; then it may go on.

        An episode under way is forgotten.

        Raises:
            WriteError: where the disk is full: there has to be room for a copy of the dataset.
        """
        self._forget()
        if self._episodes:
            self._take_lock()
            join_files(self.path)
            self._next = LeRobotEpisodes(self.path, {}, None, None, None).file_numbers()
        elif self._unlock is not None:
            self._remove_first_episode()
        if self._unlock is not None:
            (self.path / LOCK).unlink(missing_ok=True)
            (self.path / BEGUN).unlink(missing_ok=True)
            self._unlock()
            self._unlock = None

    def write(self, episode: Episode) -> None:
        """Write a whole episode, of this or another dataset; its choices count from 0.

        Raises:
            ConfigurationError: for parts of unequal length, and see `add`.
        """
        check_lengths(episode, "The episode")
        extras = {name: values.numpy() for name, values in episode.extra.items()}
        actions = as_env_counts(episode.action.numpy(), first_choice(self._action_space))
        tasks = episode.tasks or (episode.task or self._task,) * len(episode)
        for t in range(len(episode)):
            self._add(
                tasks[t],
                map_tree(lambda leaf, t=t: leaf[t], episode.observation),
                actions[t],
                float(episode.reward[t]),
                bool(episode.terminated[t]),
                bool(episode.truncated[t]),
                bool(episode.intervened[t]),
                {name: values[t] for name, values in extras.items()},
            )
        final = map_tree(lambda leaf: leaf[-1], episode.observation)
        self.end_episode(final if episode.final_known else None, episode.success)

    def _number_of(self, task: str) -> int:
        if task not in self._tasks:
            self._tasks.append(task)
            lerobot.write_table(self.path / lerobot.TASKS, lerobot.tasks_table(self._tasks))
        return self._tasks.index(task)

    def _begin(self) -> Recording:
        self._take_lock()
        folder = self.path / UNDER_WAY
        with writing(folder):
            folder.mkdir(parents=True)
        indices = {"episode_index": self._episodes, "index": self._frames}
        return Recording(folder, self._leaves, self._action, self._fps, self._video, indices)

    def _forget(self) -> None:
        self._recording = None
        shutil.rmtree(self.path / UNDER_WAY, ignore_errors=True)

    def _write_row(
        self,
        recording: Recording,
        finals: Mapping[str, Any],
        success: bool | None,
        videos: Sequence[str],
    ) -> None:
        """Write the episode's row in the table of episodes, with which it is there."""
        arrow = lerobot.import_extra("pyarrow")
        length = recording.length
        columns: dict[str, Any] = {
            "episode_index": [self._episodes],
            "tasks": [recording.tasks],
            "length": [length],
            **_placed("data", self._next["data"]),
            "dataset_from_index": [self._frames],
            "dataset_to_index": [self._frames + length],
        }
        for key in videos:
            columns |= _placed(f"videos/{key}", self._next["videos"])
            columns[f"videos/{key}/from_timestamp"] = [0.0]
            columns[f"videos/{key}/to_timestamp"] = [length / self._fps]
        columns["success"] = arrow.array([success], arrow.bool_())
        columns |= {**finals, **recording.statistics()}
        columns |= _placed("meta/episodes", self._next["meta"])
        name = lerobot.file_name(self._next["meta"], ".parquet")
        lerobot.write_table(self.path / lerobot.EPISODES / name, arrow.table(columns))

    def _features(self) -> dict[str, Any]:
        numbers = dict(lerobot.STEP_COLUMNS)
        numbers |= {_extra_column(name): "float32" for name in self._extras or ()}
        numbers |= lerobot.INDEX_COLUMNS
        leaves = [*self._leaves, self._action]
        return {
            **{leaf.key: lerobot.feature_of(leaf, self._video, self._fps) for leaf in leaves},
            **{name: lerobot.number_feature(dtype) for name, dtype in numbers.items()},
        }

    def _write_info(self) -> None:
        if not (self.path / lerobot.OURS).is_file():
            leaves = [vars(leaf) for leaf in self._leaves]
            described: dict[str, Any] = {"observation": leaves, "action": vars(self._action)}
            if choices_of(self._action_space):
                described["action_start"] = first_choice(self._action_space).tolist()
            renamed = {_extra_column(name): name for name in self._extras or () if "/" in name}
            described |= {"extras": renamed} if renamed else {}
            lerobot.write_json(self.path / lerobot.OURS, described)
        info = {
            "codebase_version": lerobot.VERSION,
            "robot_type": None,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": lerobot.CHUNK_FILES,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": int(self._fps) if self._fps.is_integer() else self._fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": lerobot.DATA,
            "video_path": lerobot.VIDEOS,
            "features": self._features(),
        }
        lerobot.write_json(self.path / lerobot.INFO, info)


def _extra_column(name: str) -> str:
    """Return the column of an extra: LeRobot takes no slash in it."""
    return f"{lerobot.EXTRA}{name}".replace("/", "_")


def _placed(prefix: str, number: int) -> dict[str, list[int]]:
    return {f"{prefix}/{name}": [value] for name, value in lerobot.place_of(number).items()}
