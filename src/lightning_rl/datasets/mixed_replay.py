"""Draw each minibatch in fixed shares from what is collected and from what others did."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers import GivenRewards, Replay, ReplayBuffer, ReplayFactory
from lightning_rl.buffers.replay_files import CURE, REPLAY_FOLDER
from lightning_rl.checkpoints.format import read_checkpoint
from lightning_rl.datasets.ends import Ends
from lightning_rl.datasets.episodes import Episode, Outside, read_episodes
from lightning_rl.datasets.replays import EXTRA, put_stream
from lightning_rl.rollout.contract import (
    final_observations,
    map_tree,
)
from lightning_rl.system.errors import ConfigurationError, check_range, require
from lightning_rl.system.files import expanded
from lightning_rl.system.runs import find_checkpoint

FIELDS = ("observation", "action", "reward", "next_observation", "discount")
"""Of each minibatch, in an order that does not depend on where its samples came from."""

ADDED = {"intervened": torch.bool, "penalty": torch.float32}
"""Behind them, zero in samples of which nobody has said it."""


class MixedReplay(Replay):
    """Two replays: what is collected goes into one, what was demonstrated into the other.

    Of each minibatch [B] the first round(B * online_ratio) samples, halves rounded up, are of what
    was collected, and the others of what was demonstrated, however few of them there are: both are
    drawn with replacement. Where one is empty all are the other's: `replay/online_share` says so.
    Source: RLPD (Ball et al. 2023, "Efficient Online Reinforcement Learning with Offline Data",
    section 4.1); that interventions count as demonstrations, HIL-SERL (Luo et al. 2024, "Precise
    and Dexterous Robotic Manipulation via Human-in-the-Loop Reinforcement Learning").

    Args:
        observation_space, action_space, num_envs, device, seed, directory: see `Replay`.
        online: keeps what is collected, all of it.
        offline: keeps what was demonstrated. Its oldest make room, which are those of
            `demonstrations`: give it room for them and for all interventions.
        online_ratio: the share of the former in each minibatch, from 0 to 1.
        demonstrations: what it begins with: a dataset (see `read_episodes`), or the run directory
            or the checkpoint of another run, whose replay it is. Nothing where not given.
        keys: what a column of the dataset is here, see `read_episodes`.
        penalties: weights of the columns of the dataset that make its `penalty`, by name, as of
            `PenaltyTerms`; where not given, its column `penalty`, if it has one.
        keep_interventions: whether the steps at which a person or a script had taken over go into
            both.
        ends: how episodes ended where the dataset does not say it, see `read_episodes`.
        actions_outside: what becomes of actions outside of the env's bounds, see `read_episodes`.

    Raises:
        ConfigurationError: for a number out of range, demonstrations that cannot be read or do not
            fit the env, and what the two replays raise.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        directory: Path = Path(),
        online: ReplayFactory = ReplayBuffer,
        offline: ReplayFactory = ReplayBuffer,
        online_ratio: float = 0.5,
        demonstrations: str | None = None,
        keys: dict[str, str] | None = None,
        penalties: dict[str, float] | None = None,
        keep_interventions: bool = True,
        ends: Ends | None = None,
        actions_outside: Outside = "clip",
    ) -> None:
        check_range("data.replay.online_ratio", online_ratio, least=0, most=1)
        self._spaces = observation_space, action_space
        self.online_ratio = online_ratio
        self.keep_interventions = keep_interventions
        where = {"directory": directory}
        self.online = online(*self._spaces, num_envs, device, seed, **where)
        # Its streams are episodes and interventions, one after the other, of whichever env.
        self.offline = offline(*self._spaces, 1, device, (seed + 1) % 2**31, **where)
        self._begun = False  # whether a rollout has come in, of this run or one that it resumes
        self._given: GivenRewards | None = None
        self._penalties = penalties
        # Opened now, to be refused before anything is collected; read with the first rollout.
        settings = {"keys": keys, "ends": ends, "actions_outside": actions_outside}
        self._source = None if demonstrations is None else self._open(demonstrations, settings)
        self._goes_on: int | None = None  # the env whose intervention the last slot belongs to
        self._interventions = 0
        self._online_share: float | None = None  # before anything is drawn

    def _open(self, path: str, settings: dict[str, Any]) -> "_Source":
        found = expanded(path)
        if found.suffix == ".ckpt" or (found / "checkpoints").is_dir():
            source: _Source = _OtherReplay(find_checkpoint(path, found), *self._spaces)
        else:
            source = _Dataset(path, settings, self._penalties, *self._spaces)
        room = getattr(self.offline, "capacity", None)
        require(
            room is None or room >= len(source),
            f"data.replay.offline.capacity={room} is less than the {len(source)} transitions of "
            f"{path}: the first of them would make room for the last. Raise it, also above the "
            "interventions that are to come.",
        )
        return source

    @property
    def capacity(self) -> int | None:
        """Transitions that both have room for; None where one does not say."""
        rooms = [getattr(replay, "capacity", None) for replay in (self.online, self.offline)]
        return None if None in rooms else sum(rooms)  # type: ignore[arg-type]  # no None in it

    def __len__(self) -> int:
        return len(self.online) + len(self.offline)

    # --- what comes in ---

    def extend(self, rollout: TensorDict) -> None:
        """Take a fresh rollout [N, T+1] in, and its interventions a second time.

        Raises:
            ConfigurationError: for actions that are chunks.
        """
        require(
            "executed" not in rollout.keys(),
            "MixedReplay keeps single actions, as demonstrations and interventions are, and the "
            "env takes chunks of them: leave ActionChunk out, or use a ReplayBuffer.",
        )
        self._read_demonstrations()
        if not self._begun:
            self._begun = True
            if isinstance(self.offline, ReplayBuffer):  # before interventions lie there too
                self._given = GivenRewards(1.0 - self.online_ratio, *self.offline.earned())
        self.online.extend(rollout)
        if self.keep_interventions and "intervened" in rollout.keys():
            self._keep_interventions(rollout)

    def _read_demonstrations(self) -> None:
        """Put in what is to be there from the beginning, unless that has been done, or restored."""
        source, self._source = self._source, None
        if source is not None:
            for stream in source:
                self._put(stream, goes_on=False)

    def take_given_rewards(self) -> GivenRewards | None:
        """Return the rewards of the demonstrations that a run begins with, once.

        Raises:
            ConfigurationError: where `offline` is a replay that does not tell them.
        """
        require(
            isinstance(self.offline, ReplayBuffer) or len(self.offline) == 0,
            f"normalize_reward scales demonstrations' rewards too, and "
            f"data.replay.offline, a {type(self.offline).__name__}, does not tell them: use a "
            "ReplayBuffer there, or set model.normalize_reward: false.",
        )
        given, self._given = self._given, None
        return given

    def _keep_interventions(self, rollout: TensorDict) -> None:
        """Put the steps at which somebody had taken over into the demonstrations, env by env."""
        taken = rollout["intervened"][:, :-1]
        if "padding" in rollout.keys():
            taken = taken & ~rollout["padding"][:, :-1]
        goes_on, self._goes_on = self._goes_on, None
        if not taken.any():
            return
        done = rollout["done"][:, :-1]
        for env in taken.any(1).nonzero().flatten().tolist():
            for first, stop in _stretches(taken[env].tolist(), done[env].tolist()):
                follows = first == 0 and goes_on == env and bool(rollout["continues"][env, 0])
                self._put(_stream_of(rollout, env, first, stop), goes_on=follows)
                # What is put in behind it, of another env, or later on, is another stream.
                goes_on = None
                if stop == taken.shape[1] and not done[env, stop - 1]:
                    self._goes_on = env
                else:
                    self._goes_on = None
        self._interventions += int(taken.sum())

    def _put(self, stream: Mapping[str, Any], *, goes_on: bool) -> None:
        put_stream(self.offline, stream, self._spaces, EXTRA, goes_on=goes_on)

    # --- what is drawn ---

    def batches(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        """Yield minibatches [B], first the samples of what was collected.

        Raises:
            RuntimeError: where both replays are empty.
        """
        first = self._share_of(batch_size)
        sizes = {self.online: first, self.offline: batch_size - first}
        self._online_share = first / batch_size
        parts = [
            replay.batches(count, size, n_steps=n_steps, gamma=gamma)
            for replay, size in sizes.items()
            if size
        ]
        return (_joined(batches) for batches in zip(*parts, strict=True))

    def _share_of(self, batch_size: int) -> int:
        """Return how many samples of a minibatch are of what was collected."""
        if len(self.offline) == 0:
            return batch_size  # where both are empty, the error is that of the first
        return 0 if len(self.online) == 0 else math.floor(batch_size * self.online_ratio + 0.5)

    def metrics(self) -> dict[str, float]:
        """Return sizes, the share of the last minibatches that was collected, and interventions."""
        share = self._online_share
        return {
            "replay/size": float(len(self)),
            "replay/online_size": float(len(self.online)),
            "replay/offline_size": float(len(self.offline)),
            "replay/interventions": float(self._interventions),
            **({} if share is None else {"replay/online_share": share}),
        }

    # --- checkpoints ---

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Write what is new of both into files of a folder; return their names and what is left."""
        both = {name: getattr(self, name).state_dict(folder) for name in ("online", "offline")}
        return {
            **both,
            "files": [name for state in both.values() for name in state.get("files", [])],
            "begun": self._source is None,
            "goes_on": self._goes_on,
            "interventions": self._interventions,
            "online_share": self._online_share,
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Take up both; the demonstrations are not read a second time.

        Raises:
            ConfigurationError: where the checkpoint's replay is another kind.
        """
        require(
            "online" in state and "offline" in state,
            f"The checkpoint's replay is not a MixedReplay, which data.replay is. {CURE}",
        )
        for name in ("online", "offline"):
            getattr(self, name).load_state_dict(state[name], folder)
        if state["begun"]:
            self._source = None
            self._begun = True
        self._goes_on, self._interventions = state["goes_on"], state["interventions"]
        self._online_share = state["online_share"]


def _stretches(taken: list[bool], done: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield from where to where, [first, stop), steps follow each other within an episode."""
    first: int | None = None
    for step, (one, ended) in enumerate(zip(taken, done, strict=True)):
        if one and first is None:
            first = step
        if first is not None and (ended or step + 1 == len(taken) or not taken[step + 1]):
            yield first, step + 1
            first = None


def _stream_of(rollout: TensorDict, env: int, first: int, stop: int) -> dict[str, Any]:
    """Return some steps of one env of a rollout [N, T+1], as `MixedReplay` keeps them."""
    part = rollout[env, first:stop]
    observation = map_tree(lambda x: x[env, first : stop + 1].clone(), rollout.get("observation"))
    if rollout["done"][env, stop - 1]:  # the next slot is another episode's
        at = (torch.tensor([place], device=rollout.device) for place in (env, stop - 1))
        final = final_observations(rollout, *at)
        map_tree(lambda kept, true: kept[-1:].copy_(true), observation, final)
    stream = {key: part[key] for key in ("reward", "terminated", "intervened")}
    if "penalty" in part.keys():
        stream["penalty"] = part["penalty"]
    return stream | {"observation": observation, "action": part["executed_action"]}


def _joined(batches: tuple[TensorDict, ...]) -> TensorDict:
    """Return one minibatch [B] of its parts, whose fields stand in a fixed order."""
    completed: list[Any] = []
    for batch in batches:
        fields = {key: batch.get(key) for key in FIELDS}
        for key, dtype in ADDED.items():
            value = batch.get(key, None)
            fields[key] = (
                batch["reward"].new_zeros(len(batch), dtype=dtype) if value is None else value
            )
        completed.append(TensorDict(fields, batch.batch_size))
    joined: Any = completed[0] if len(completed) == 1 else torch.cat(completed)
    return joined  # type: ignore[no-any-return]  # a TensorDict


class _Source(ABC):
    """What the demonstrations begin with: streams, and how many transitions they are."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class _Dataset(_Source):
    """The episodes of a dataset."""

    def __init__(
        self,
        path: str,
        settings: dict[str, Any],
        penalties: dict[str, float] | None,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self._path, self._penalties = path, penalties
        self._episodes = read_episodes(
            path, observation_space=observation_space, action_space=action_space, **settings
        )
        if len(self._episodes):
            self._stream(self._episodes[0])  # refused now where it lacks something

    def __len__(self) -> int:
        return sum(self._episodes.lengths)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for episode in self._episodes:
            stream = self._stream(episode)
            if len(stream["reward"]):
                yield stream

    def _stream(self, episode: Episode) -> dict[str, Any]:
        require(
            bool(episode.reward.isfinite().all()),
            f"The dataset {self._path} holds no rewards, or some that are not finite, and critics "
            "learn from them: label it (rl-cli label), or say by data.replay.keys which column "
            "they are.",
        )
        steps = len(episode)
        if not (episode.final_known or episode.terminated[-1:].any()):
            steps -= 1  # nobody knows what it came to
        fields = {key: getattr(episode, key)[:steps] for key in ("action", "reward", "terminated")}
        return fields | {
            "observation": map_tree(lambda x: x[: steps + 1], episode.observation),
            "intervened": episode.intervened[:steps],
            "penalty": self._penalty(episode)[:steps],
        }

    def _penalty(self, episode: Episode) -> Tensor:
        weights = self._penalties
        if weights is None:
            weights = {"penalty": 1.0} if "penalty" in episode.extra else {}
        missing = weights.keys() - episode.extra.keys()
        require(
            not missing,
            f"data.replay.penalties names {', '.join(sorted(missing))}, which the dataset "
            f"{self._path} does not hold; it has {', '.join(sorted(episode.extra)) or 'none'}.",
        )
        total = torch.zeros(len(episode))
        for name, weight in weights.items():
            total += weight * episode.extra[name].float()
        return total


class _OtherReplay(_Source):
    """What the checkpoint of another run holds of its replay, of all its processes."""

    def __init__(
        self,
        checkpoint: Path,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self._folder = checkpoint.parent / REPLAY_FOLDER
        states = read_checkpoint(checkpoint).get("RLDataModule", {}).get("replays", [])
        # Of a mixed one what it collected, which holds its interventions too.
        self._states = [state.get("online", state) for state in states]
        if not self._states or any("begin" not in state for state in self._states):
            raise ConfigurationError(
                f"{checkpoint} holds no replay to begin with: give a checkpoint of an off-policy "
                "run (last.ckpt) that was saved with trainer.save_replay, or a dataset."
            )
        self._spaces = observation_space, action_space

    def __len__(self) -> int:
        return sum((s["end"] - s["begin"]) * s["num_envs"] for s in self._states)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for state in self._states:
            room = max(1, state["end"] - state["begin"]) * state["num_envs"]
            replay = ReplayBuffer(*self._spaces, state["num_envs"], capacity=room)
            replay.load_state_dict(state, self._folder)
            yield from replay.streams()
