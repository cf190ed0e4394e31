"""Draw each minibatch in fixed shares from what is collected and from what others did."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict

from lightning_rl.buffers import GivenRewards, Replay, ReplayBuffer, ReplayFactory
from lightning_rl.buffers.replay_files import CURE, REPLAY_FOLDER
from lightning_rl.checkpoints.format import read_checkpoint
from lightning_rl.datasets.ends import Ends
from lightning_rl.datasets.episode import Episode, Episodes, Outside
from lightning_rl.datasets.reader import read_episodes
from lightning_rl.datasets.replays import rewarded
from lightning_rl.rollout.contract import final_observations, map_tree
from lightning_rl.system.errors import check_range, require
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
        # Opened now, to be refused before anything is collected; read with the first rollout.
        settings = {"keys": keys, "ends": ends, "actions_outside": actions_outside}
        self._source: Iterator[Episode] | None = None
        if demonstrations is not None:
            self._source = self._open(demonstrations, penalties, settings)
        self._goes_on: int | None = None  # the env whose intervention the last slot belongs to
        self._interventions = 0
        self._online_share: float | None = None  # before anything is drawn

    def _open(
        self, path: str, penalties: dict[str, float] | None, settings: dict[str, Any]
    ) -> Iterator[Episode]:
        """Return the episodes that the replay begins with."""
        found = expanded(path)
        if found.suffix == ".ckpt" or (found / "checkpoints").is_dir():
            count, source = _of_replay(find_checkpoint(path, found), self._spaces)
        else:
            seen, acted = self._spaces
            episodes = read_episodes(path, observation_space=seen, action_space=acted, **settings)
            count, source = sum(episodes.lengths), _of_dataset(episodes, penalties)
            if (first := next(source, None)) is not None:  # refused now if it lacks something
                source = chain((first,), source)
        room = getattr(self.offline, "capacity", None)
        require(
            room is None or room >= count,
            f"data.replay.offline.capacity={room} is less than the {count} transitions of "
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
            for episode in source:
                self._put(episode)

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
                self._put(_steps_of(rollout, env, first, stop), continues=follows)
                # What is put in behind it, of another env, or later on, is another stream.
                goes_on = None
                is_last = stop == taken.shape[1] and not done[env, stop - 1]
                self._goes_on = env if is_last else None
        self._interventions += int(taken.sum())

    def _put(self, episode: Episode, *, continues: bool = False) -> None:
        """Put an episode into the demonstrations.

        Args:
            episode: whose last step, unless terminal, leads to its last observation.
            continues: whether it continues the episode that was put in last.
        """
        penalty = {"penalty": episode.extra.get("penalty", torch.zeros(len(episode)))}
        rollout = replace(episode, extra=penalty).to_rollout(*self._spaces)
        rollout["continues"].fill_(continues)
        self.offline.extend(rollout)

    # --- what is drawn ---

    def batches(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        """Yield minibatches [B], first the samples of what was collected.

        Args:
            count: minibatches.
            batch_size: B.
            n_steps: env steps whose rewards a transition sums.
            gamma: discount per env step.

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


def _steps_of(rollout: TensorDict, env: int, first: int, stop: int) -> Episode:
    """Return some steps of one env of a rollout [N, T+1] as an episode."""
    part = rollout[env, first:stop]
    observation = map_tree(lambda x: x[env, first : stop + 1].clone(), rollout.get("observation"))
    if rollout["done"][env, stop - 1]:  # the next slot is another episode's
        at = (torch.tensor([place], device=rollout.device) for place in (env, stop - 1))
        final = final_observations(rollout, *at)
        map_tree(lambda kept, true: kept[-1:].copy_(true), observation, final)
    names = ("reward", "terminated", "intervened", "penalty")
    steps = {name: part[name] for name in names if name in part.keys()}
    return Episode.of_steps(steps | {"observation": observation, "action": part["executed_action"]})


def _joined(batches: tuple[TensorDict, ...]) -> TensorDict:
    """Return one minibatch [B] of its parts, whose fields stand in a fixed order."""
    completed: list[Any] = []
    for batch in batches:
        fields = {key: batch.get(key) for key in FIELDS}
        nothing = torch.zeros_like(batch["reward"])
        fields |= {key: batch.get(key, nothing.to(kind)) for key, kind in ADDED.items()}
        completed.append(TensorDict(fields, batch.batch_size))
    joined: Any = completed[0] if len(completed) == 1 else torch.cat(completed)
    return joined  # type: ignore[no-any-return]  # a TensorDict


def _of_dataset(episodes: Episodes, penalties: dict[str, float] | None) -> Iterator[Episode]:
    """Yield the episodes of a dataset, with the `penalty` that some of its columns make."""
    for episode in rewarded(episodes):
        there = episode.extra
        weights = {"penalty": 1.0} if "penalty" in there else {}
        weights = weights if penalties is None else penalties
        missing = weights.keys() - there.keys()
        require(
            not missing,
            f"data.replay.penalties names {', '.join(sorted(missing))}, which the dataset "
            f"{episodes.path} does not hold; it has {', '.join(sorted(there)) or 'none'}.",
        )
        penalty = torch.zeros(len(episode))
        for name, weight in weights.items():
            penalty += weight * there[name].float()
        yield replace(episode, extra={"penalty": penalty})


def _of_replay(
    checkpoint: Path, spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]]
) -> tuple[int, Iterator[Episode]]:
    """Return the replay in a checkpoint, of all processes: its number of transitions, its episodes.

    Raises:
        ConfigurationError: if it holds none.
    """
    states = read_checkpoint(checkpoint).get("RLDataModule", {}).get("replays", [])
    # Of a mixed one what it collected, which holds its interventions too.
    states = [state.get("online", state) for state in states]
    require(
        bool(states) and all("begin" in state for state in states),
        f"{checkpoint} holds no replay to begin with: give a checkpoint of an off-policy run "
        "(last.ckpt) that was saved with trainer.save_replay, or a dataset.",
    )

    def episodes() -> Iterator[Episode]:
        for state in states:
            room = max(1, state["end"] - state["begin"]) * state["num_envs"]
            replay = ReplayBuffer(*spaces, state["num_envs"], capacity=room)
            replay.load_state_dict(state, checkpoint.parent / REPLAY_FOLDER)
            yield from map(Episode.of_steps, replay.streams())

    return sum((s["end"] - s["begin"]) * s["num_envs"] for s in states), episodes()
