"""Write episodes into a LeRobotDataset v3.0, step by step or whole."""

import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium
import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.files import expanded, move, write_atomically, writing
from lightning_rl.extend.rollout import map_tree
from lightning_rl.extend.spaces import StructuredActions, as_env_counts, choices_of, first_choice
from lightning_rl.extensions.datasets import lerobot_format as lerobot
from lightning_rl.extensions.datasets.directory import (
    BEGUN,
    BEGUN_TEXT,
    LOCK,
    TOPS,
    UNDER_WAY,
    complete_join,
    has_no_episodes,
    lock_dataset,
    part_of,
)
from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.extensions.datasets.episode_files import ROWS, EpisodeFiles
from lightning_rl.extensions.datasets.joining import join_files
from lightning_rl.extensions.datasets.lerobot_reader import LeRobotEpisodes

Pictures = Literal["video", "png"]
"""Storage of pictures: lossy in a video, or lossless in the table."""


class EpisodeWriter:
    """Record episodes into a LeRobotDataset v3.0, step by step, in constant memory.

    A finished episode survives a SIGKILL: it has its own files until `finalise` joins them. An
    existing dataset with the same columns is extended.

    Args:
        path: path of the directory.
        observation_space: observation space of the env.
        action_space: action space of the env.
        fps: steps per second.
        task: task in words.
        pictures: `video` (lossy) or `png` (lossless).

    Raises:
        ConfigurationError: for a space that a dataset cannot hold, if the directory holds something
            else, and if another process records into it.
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
        allowed = get_args(Pictures)
        require(pictures in allowed, f"pictures is {pictures!r}; allowed: {', '.join(allowed)}.")
        # Missing packages are errors now, not at the end of the first episode.
        for name in ("pyarrow", "av"):
            lerobot.import_extra(name)
        self.path, self._fps = expanded(path), float(fps)
        self._task, self._video = task, pictures == "video"
        self._leaves = lerobot.leaves_of(observation_space)
        self._action = lerobot.action_leaf(action_space)
        self._action_space = action_space
        self._extras: tuple[str, ...] | None = None
        self._tasks: list[str] = []
        self._episodes = self._frames = 0
        self._next = {"data": 0, "meta": 0, "videos": 0}  # numbers of the next files
        self._recording: EpisodeFiles | None = None
        self._end_rules: set[str] = set()  # of copied episodes
        self._unlock: Callable[[], object] | None = None
        self._open()

    def _take_lock(self) -> None:
        if self._unlock is not None:
            return
        # Mark the dataset before locking it: see `has_no_episodes`.
        if not part_of(self.path, lerobot.INFO).is_file():
            write_atomically(self.path / BEGUN, lambda file: file.write(BEGUN_TEXT))
        # Unlocks also when the writer is garbage-collected; after a kill the system unlocks.
        self._unlock = weakref.finalize(self, lock_dataset(self.path))

    def _open(self) -> None:
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if not part_of(self.path, lerobot.INFO).is_file() and not has_no_episodes(self.path):
            names = sorted(file.name for file in self.path.iterdir())
            raise ConfigurationError(
                f"{self.path} holds {', '.join(names)}, but not a dataset: give an empty or a new "
                "directory."
            )
        self._take_lock()
        # An earlier process may have been killed while it moved the joined folders.
        complete_join(self.path)
        self.discard_episode()
        if (self.path / lerobot.INFO).is_file():
            self._extend()
            (self.path / BEGUN).unlink(missing_ok=True)
        else:
            self._remove_first_episode()

    def _remove_first_episode(self) -> None:
        for top in TOPS:
            shutil.rmtree(self.path / top, ignore_errors=True)
        self._tasks = []

    def _extend(self) -> None:
        dataset = LeRobotEpisodes(self.path, {}, None, None, None)
        info = lerobot.read_json(self.path / lerobot.INFO)
        self._extras = tuple(dataset.extras)
        old = info["features"]
        valid = lerobot.read_info(self.path / lerobot.INFO)["features"]
        names = {key: lerobot.leaf_of(key, valid[key], ()).names for key in valid}
        # What the dataset films stays a film: an earlier version filmed small arrays, too.
        films = {
            (leaf.path, leaf.shape, leaf.dtype): leaf for leaf in dataset.leaves if leaf.picture
        }
        self._leaves = [
            films.get((leaf.path, leaf.shape, leaf.dtype), leaf) for leaf in self._leaves
        ]
        # Names of joints and the like may stand on one side only: adopt them, do not refuse.
        self._leaves = [
            replace(leaf, names=leaf.names or names.get(leaf.key, ())) for leaf in self._leaves
        ]
        action = self._action
        self._action = replace(action, names=action.names or names.get(action.key, ()))
        new = self._features()
        for key in new.keys() & old.keys():  # a dataset without names gets them
            old[key]["names"] = old[key].get("names") or new[key]["names"]
        differing = [key for key in new | old if new.get(key) != old.get(key)]
        require(
            not differing
            and info["fps"] == self._fps
            and info["data_path"] == lerobot.DATA
            and info.get("video_path", lerobot.VIDEOS) == lerobot.VIDEOS
            and dataset.leaves == self._leaves
            and np.array_equal(dataset.first_action, first_choice(self._action_space)),
            f"{self.path} holds a different dataset ({info['fps']:g} frames per second, columns "
            f"{', '.join(old)}); the new dataset would differ in "
            f"{', '.join(differing) or 'fps, a shape, a path, or the first action'}. Give another "
            "directory.",
        )
        self._tasks, self._end_rules = list(dataset.tasks.values()), set(dataset.end_rules)
        self._episodes, self._frames = len(dataset), sum(dataset.lengths)
        self._next = dataset.file_numbers()
        # Files with the next numbers belong to an unfinished episode.
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
        *,
        task: str | None = None,
    ) -> None:
        """Add a step.

        Args:
            observation: before the step.
            action: executed action, with choices numbered as in the env.
            reward: reward of the step.
            terminated: whether the step terminated the episode.
            truncated: whether a time limit ended the episode.
            intervened: whether a person or a script chose the action.
            extra: other numbers of the step, by name.
            task: task in words. Default: the writer's `task`.

        Raises:
            ConfigurationError: if the step does not fit the spaces, or the first step's extras.
            RuntimeError: if the episode has ended.
        """
        task = self._task if task is None else task
        require(isinstance(task, str), f"task must be a text, got {task!r}.")
        extras = self._all_extras(extra)
        # An executed action may leave the bounds of a Box, but not be a choice that does not exist.
        if choices_of(self._action_space) and not isinstance(self._action_space, StructuredActions):
            env_action = np.asarray(action)
            require(
                env_action.shape == self._action.shape
                and self._action_space.contains(env_action.astype(self._action.dtype)[()]),
                f"{self._action_space} does not have the action {env_action.tolist()}: number the "
                "choices as the env does.",
            )
        if self._recording is None:
            self._recording = self._new_files()
        if task not in self._recording.tasks:
            self._recording.tasks.append(task)
        numbers = {
            "next.reward": reward,
            "next.done": False,
            "next.terminated": terminated,
            "next.truncated": truncated,
            "next.success": False,
            lerobot.INTERVENED: intervened,
        }
        numbers |= {_extra_column(name): value for name, value in extras.items()}
        self._recording.add(observation, action, numbers, self._number_of(task))

    def _all_extras(self, extra: Mapping[str, float]) -> dict[str, float]:
        if self._extras is None:
            self._extras = tuple(sorted(extra))
            require(
                len({_extra_column(name) for name in extra}) == len(extra),
                f"Two of the extras {sorted(extra)} would have the same column: rename one.",
            )
        # Labels such as the advantage are unknown for new steps: NaN until they are labelled again.
        extras = {name: nan for name in self._extras if name in lerobot.LABELS} | dict(extra)
        require(
            extras.keys() == set(self._extras),
            f"The steps of {self.path} have the extras {list(self._extras)}, but this step has "
            f"{sorted(extras)}: give the same extras at each step, 0 for a missing value.",
        )
        return {name: extras[name] for name in self._extras}

    def end_episode(self, final_observation: Any, success: bool | None = None) -> None:
        """Finish the episode; afterwards it survives a SIGKILL.

        Args:
            final_observation: after the last step; None if unknown.
            success: whether the episode succeeded; None if unknown.

        Raises:
            ConfigurationError: for another `success`, or an observation that does not fit.
            RuntimeError: for an episode without steps.
        """
        require(success in (None, True, False), f"success is {success!r}: give a bool, or None.")
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
        # This row adds the episode to the dataset.
        self._write_row(recording, finals, success, list(videos))
        self._episodes += 1
        self._frames += recording.length
        self._next = {kind: number + 1 for kind, number in self._next.items()}
        self._write_info()
        (self.path / BEGUN).unlink(missing_ok=True)
        self.discard_episode()

    def discard_episode(self) -> None:
        """Remove the steps of the unfinished episode."""
        self._recording = None
        shutil.rmtree(self.path / UNDER_WAY, ignore_errors=True)

    def finalise(self) -> None:
        """Remove an unfinished episode, join the files, and write the statistics.

        Raises:
            WriteError: if the disk is full: joining needs room for a copy.
        """
        self.discard_episode()
        # Without an episode there is nothing to join: remove the folders of an unfinished one.
        if self._episodes and (self.path / lerobot.INFO).is_file():
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
        """Write a whole episode; its choices count from 0.

        Raises:
            ConfigurationError: for parts of unequal length, and see `add`.
        """
        episode.check_lengths()
        extras = {name: values.numpy() for name, values in episode.extra.items()}
        actions = as_env_counts(episode.action.numpy(), first_choice(self._action_space))
        for t in range(len(episode)):
            self.add(
                map_tree(lambda leaf, t=t: leaf[t], episode.observation),
                actions[t],
                float(episode.reward[t]),
                bool(episode.terminated[t]),
                bool(episode.truncated[t]),
                bool(episode.intervened[t]),
                {name: values[t] for name, values in extras.items()},
                task=episode.tasks[t] if episode.tasks else episode.task or self._task,
            )
        # The last observation of a dataset without final observations is a copy: write null.
        final = map_tree(lambda leaf: leaf[-1], episode.observation)
        final = final if episode.final_known else None
        if episode.end_rule:
            self._end_rules.add(episode.end_rule)
        self.end_episode(final, episode.success)

    def _number_of(self, task: str) -> int:
        if task not in self._tasks:
            # The table of tasks is written before a step may refer to it.
            self._tasks.append(task)
            lerobot.write_table(self.path / lerobot.TASKS, lerobot.tasks_table(self._tasks))
        return self._tasks.index(task)

    def _new_files(self) -> EpisodeFiles:
        self._take_lock()
        folder = self.path / UNDER_WAY
        with writing(folder):
            folder.mkdir(parents=True)
        indices = {"episode_index": self._episodes, "index": self._frames}
        return EpisodeFiles(folder, self._leaves, self._action, self._fps, self._video, indices)

    def _write_row(
        self,
        recording: EpisodeFiles,
        finals: Mapping[str, Any],
        success: bool | None,
        videos: Sequence[str],
    ) -> None:
        arrow = lerobot.import_extra("pyarrow")
        length = recording.length
        place = {
            "episode_index": self._episodes,
            "tasks": recording.tasks,
            "length": length,
            **_placed("data", self._next["data"]),
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + length,
        }
        for key in videos:
            place |= _placed(f"videos/{key}", self._next["videos"])
            place[f"videos/{key}/from_timestamp"] = 0.0
            place[f"videos/{key}/to_timestamp"] = length / self._fps
        measured = recording.statistics() | _placed("meta/episodes", self._next["meta"])
        columns = {
            **{name: lerobot.as_row(value) for name, value in place.items()},
            "success": arrow.array([success], arrow.bool_()),
            **finals,
            **{name: lerobot.as_row(value) for name, value in measured.items()},
        }
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
        # An existing description stays, unless a copied episode brings a rule.
        description = self.path / lerobot.OURS
        if self._end_rules or not description.is_file():
            leaves, action = map(lerobot.description_of, self._leaves), self._action
            described: dict[str, Any] = {"observation": list(leaves)}
            described["action"] = lerobot.description_of(action)
            if choices_of(self._action_space):
                described["action_start"] = first_choice(self._action_space).tolist()
            box = self._action_space
            flat = isinstance(box, StructuredActions)
            if isinstance(box, gymnasium.spaces.Box) and not flat and box.is_bounded():
                described["action_bounds"] = [box.low.tolist(), box.high.tolist()]
            renamed = {_extra_column(name): name for name in self._extras or () if "/" in name}
            described |= {"extras": renamed} if renamed else {}
            described |= {"end_rules": sorted(self._end_rules)} if self._end_rules else {}
            lerobot.write_json(description, described)
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
    return f"{lerobot.EXTRA}{name}".replace("/", "_")


def _placed(prefix: str, number: int) -> dict[str, int]:
    return {f"{prefix}/{name}": value for name, value in lerobot.place_of(number).items()}
