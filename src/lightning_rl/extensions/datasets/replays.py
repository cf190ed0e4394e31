"""Convert replays to datasets, and datasets to replays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from lightning_rl import ReplayBuffer
from lightning_rl.extend.errors import require
from lightning_rl.extend.spaces import first_choice
from lightning_rl.extensions.datasets.episode import Episode, Episodes
from lightning_rl.extensions.datasets.ring_fragments import fragments
from lightning_rl.extensions.datasets.writer import EpisodeWriter, Pictures


def write_replay(
    path: str | Path,
    replay: ReplayBuffer,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    fps: float,
    task: str = "",
    pictures: Pictures = "png",
) -> None:
    """Write the content of a replay as a LeRobotDataset v3.0, bit for bit.

    Consecutive steps of one env become an episode, truncated if the replay cuts it off.

    Args:
        path: path of a directory.
        replay: replay of single actions; it is not changed.
        observation_space: observation space of the env.
        action_space: action space of the env.
        fps: steps per second.
        task: task in words.
        pictures: `video` (lossy) or `png` (lossless).

    Raises:
        ConfigurationError: for a replay of chunks, and see `EpisodeWriter`.
    """
    writer = EpisodeWriter(path, observation_space, action_space, fps, task, pictures)
    for steps in fragments(replay):
        writer.write(Episode.of_steps(steps, task))
    writer.finalise()


def read_replay(
    episodes: Episodes,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    **settings: Any,
) -> ReplayBuffer:
    """Make a replay of all transitions of a dataset, as if one env had played them.

    `settings` are arguments of `ReplayBuffer`; the default `capacity` fits the dataset exactly.

    Raises:
        ConfigurationError: if the dataset has no rewards, and see `ReplayBuffer`.
    """
    require(
        # A choice's number in the files is the env's; a replay counts from 0.
        np.array_equal(first_choice(action_space), episodes.first_action),
        f"The first action of the dataset at {episodes.path} has the number "
        f"{episodes.first_action.tolist()}, because the dataset was opened without an action "
        f"space: pass {action_space}, read_episodes(path, action_space=...).",
    )
    settings = {"capacity": max(1, sum(episodes.lengths))} | settings
    replay = ReplayBuffer(observation_space, action_space, 1, **settings)
    for episode in rewarded(episodes):
        replay.extend(episode.to_rollout(observation_space, action_space))
    return replay


def rewarded(episodes: Episodes) -> Iterator[Episode]:
    """Yield episodes for critics: steps with known next observations, without empty episodes.

    Raises:
        ConfigurationError: if a reward is unknown.
    """
    for episode in episodes:
        require(
            bool(episode.reward.isfinite().all()),
            f"The dataset at {episodes.path} has no rewards, or rewards that are not finite, but "
            "critics need them. Label it (rl-cli label), or name the column of the rewards, "
            "keys: {<column>: reward}.",
        )
        if len(steps := episode.steps_with_successor()):
            yield steps
