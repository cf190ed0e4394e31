"""Write what a replay holds as a dataset, and make a replay of one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor

from lightning_rl.buffers import ReplayBuffer
from lightning_rl.errors import require
from lightning_rl.offline.episodes import Episode, Episodes, EpisodeWriter, Pictures
from lightning_rl.rollout import allocate_rollout, copy_tree, map_tree


def write_replay(
    path: str | Path,
    replay: ReplayBuffer,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    fps: float,
    task: str = "",
    pictures: Pictures = "png",
) -> None:
    """Write all that a replay holds as a LeRobotDataset v3.0, bit for bit.

    Steps of one env that follow each other become an episode; where the replay cuts them off, it
    ends by time, in the observation that truly followed.

    Args:
        path: of a directory.
        replay: of single actions, of which nothing is taken away.
        observation_space: of the env.
        action_space: likewise.
        fps: steps per second.
        task: what was to be done, in words.
        pictures: how pictures are kept; as a video they are no longer the same.

    Raises:
        ConfigurationError: where the replay holds chunks, and what `EpisodeWriter` raises.
    """
    writer = EpisodeWriter(path, observation_space, action_space, fps, task, pictures)
    for stream in replay.streams():
        writer.write(_episode_of(stream, task))
    writer.finalise()


def _episode_of(stream: Mapping[str, Any], task: str) -> Episode:
    """Return the episode of steps that follow each other, as `ReplayBuffer.streams` has them."""
    terminated: Tensor = stream["terminated"]
    truncated = torch.zeros_like(terminated)
    truncated[-1] = ~terminated[-1]
    extra = {"penalty": stream["penalty"]} if "penalty" in stream else {}
    return Episode(
        observation=stream["observation"],
        action=stream["action"],
        reward=stream["reward"],
        terminated=terminated,
        truncated=truncated,
        success=None,
        intervened=stream.get("intervened", torch.zeros_like(terminated)),
        task=task,
        extra=extra,
    )


def read_replay(
    episodes: Episodes,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    **settings: Any,
) -> ReplayBuffer:
    """Make a replay of all the transitions of a dataset, as if one env had played it.

    Args:
        episodes: of the dataset, whose rewards are known.
        observation_space: of the env.
        action_space: likewise.
        settings: of `ReplayBuffer`; its `capacity` is that of the dataset where not given.

    Raises:
        ConfigurationError: where the dataset has no rewards, and what `ReplayBuffer` raises.
    """
    settings = {"capacity": max(1, sum(episodes.lengths))} | settings
    replay = ReplayBuffer(observation_space, action_space, 1, **settings)
    for episode in episodes:
        require(
            bool(episode.reward.isfinite().all()),
            f"The dataset at {episodes.path} has no rewards, or some that are not finite, and a "
            "replay learns from them: say which column they are, keys: {<column>: reward}.",
        )
        # Of what came after the last step nobody knows, unless it was the end of all.
        known = episode.final_known or bool(episode.terminated[-1])
        steps = len(episode) - (0 if known else 1)
        if steps:
            _extend(replay, episode, steps, observation_space, action_space)
    return replay


def _extend(
    replay: ReplayBuffer,
    episode: Episode,
    steps: int,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> None:
    """Put the first steps of an episode into a replay, as a rollout [1, T+1] of its own."""
    fields = {"continues": ((), torch.bool), "intervened": ((), torch.bool)}
    rollout = allocate_rollout(observation_space, action_space, 1, steps, extra_fields=fields)
    seen = map_tree(lambda leaf: leaf[None, : steps + 1], episode.observation)
    copy_tree(rollout.get("observation"), seen)
    for name in ("action", "reward", "terminated", "intervened"):
        rollout[name][0, :-1] = getattr(episode, name)[:steps].to(rollout[name])
    replay.extend(rollout)
