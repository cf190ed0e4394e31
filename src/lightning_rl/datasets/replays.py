"""Write what a replay holds as a dataset, and make a replay of one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.buffers import Replay, ReplayBuffer
from lightning_rl.datasets.episodes import Episode, Episodes, EpisodeWriter, Pictures
from lightning_rl.envs.vector_env import PENALTY_FIELD
from lightning_rl.rollout.contract import (
    FieldSpec,
    allocate_rollout,
    copy_tree,
    map_tree,
)
from lightning_rl.rollout.structured_actions import first_choice
from lightning_rl.system.errors import require


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
    require(
        np.array_equal(first_choice(action_space), episodes.first_action),
        f"The dataset at {episodes.path} counts its actions from {episodes.first_action.tolist()}, "
        f"as far as it was opened, and the action space is {action_space}: open it with that, "
        "read_episodes(path, action_space=...).",
    )
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
            fields = EXTRA if "penalty" in episode.extra else {"intervened": EXTRA["intervened"]}
            stream = _stream_of(episode, steps)
            put_stream(replay, stream, (observation_space, action_space), fields)
    return replay


def _stream_of(episode: Episode, steps: int) -> dict[str, Any]:
    """Return the first steps of an episode, and what it held else of them that a replay takes."""
    fields = {key: getattr(episode, key) for key in ("action", "reward", "terminated")}
    fields |= {"intervened": episode.intervened, **episode.extra}
    observation = map_tree(lambda leaf: leaf[: steps + 1], episode.observation)
    return {key: field[:steps] for key, field in fields.items()} | {"observation": observation}


EXTRA: dict[str, FieldSpec] = {"intervened": ((), torch.bool), **PENALTY_FIELD}
"""What a stream may have beside what every replay holds."""


def put_stream(
    replay: Replay,
    stream: Mapping[str, Any],
    spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]],
    fields: Mapping[str, FieldSpec],
    *,
    goes_on: bool = False,
) -> None:
    """Put a stream of L steps, with L+1 observations, into a replay of one env.

    Its last step goes on from the last observation, unless it is terminal: the next stream does not
    continue it.

    Args:
        replay: of one env.
        stream: `observation` [L+1, ...], and [L, ...] of `action`, `reward`, `terminated`, and of
            those of `fields` that somebody has said; the others are zero.
        spaces: of observations and actions.
        fields: of `EXTRA` those that the replay holds.
        goes_on: whether it continues the stream that was put in last.
    """
    continues: dict[str, FieldSpec] = {"continues": ((), torch.bool)}
    steps = len(stream["reward"])
    rollout = allocate_rollout(*spaces, 1, steps, extra_fields={**continues, **fields})
    rollout["continues"].fill_(goes_on)
    seen = map_tree(lambda leaf: torch.as_tensor(leaf)[None], stream["observation"])
    copy_tree(rollout.get("observation"), seen)
    for key in ("action", "reward", "terminated", *fields):
        if key in stream:
            rollout[key][0, :-1] = torch.as_tensor(stream[key]).to(rollout[key])
    replay.extend(rollout)
