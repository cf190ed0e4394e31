"""Draw fixed shares of each minibatch from collected and from demonstrated transitions."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Replay, ReplayBuffer
from lightning_rl.extend.algorithms import ReplayFactory
from lightning_rl.extend.checkpoints import find_checkpoint, read_checkpoint
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.files import expanded
from lightning_rl.extend.rollout import GoalFunction, final_observations, map_tree
from lightning_rl.extensions.datasets.ends import Ends
from lightning_rl.extensions.datasets.episode import Episode, Episodes, Outside
from lightning_rl.extensions.datasets.reader import check_fps, read_episodes
from lightning_rl.extensions.datasets.replays import rewarded
from lightning_rl.extensions.datasets.ring_fragments import fragment_rewards, fragments

FIELDS = ("observation", "action", "reward", "next_observation", "discount")
"""Fields of each minibatch, in a fixed order."""

ADDED = {"intervened": torch.bool, "penalty": torch.float32}
"""Further fields of each minibatch; zero for samples without them."""


class MixedReplay(Replay):
    """Keep collected transitions in one replay, and demonstrations in a second replay.

    The first round(B * online_ratio) samples of a minibatch [B] come from the online replay, the
    others from the offline replay. If one replay is empty, all samples come from the other.

    Source: RLPD (Ball et al. 2023, "Efficient Online Reinforcement Learning with Offline Data",
    section 4.1). Interventions as demonstrations: HIL-SERL (Luo et al. 2024, "Precise and Dexterous
    Robotic Manipulation via Human-in-the-Loop Reinforcement Learning").

    Args:
        observation_space, action_space, num_envs, device, seed, directory, goals: see `Replay`.
        online: replay of all collected transitions.
        offline: replay of demonstrations and interventions. A full replay first overwrites
            the demonstrations: choose a capacity for all of them.
        online_ratio: share of online samples in each minibatch, from 0 to 1.
        demonstrations: initial content of `offline`: a dataset (see `read_episodes`), or the run
            directory or checkpoint of another run with a replay. Default: empty.
        keys: rename columns of the dataset, see `read_episodes`.
        penalties: weights of the dataset's columns in `penalty`, by name, as in `PenaltyTerms`.
            Default: the column `penalty`, if the dataset has one.
        keep_interventions: whether `offline` also stores the steps of interventions.
        ends: how episodes ended if the dataset does not record it, see `read_episodes`.
        actions_outside: treatment of actions outside of the env's bounds, see `read_episodes`.

    Raises:
        ConfigurationError: for demonstrations that cannot be read or do not
            fit the env, and errors of the two replays.
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
        goals: GoalFunction | None = None,
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
        check_range("data.replay.online_ratio", online_ratio, minimum=0, maximum=1)
        self._spaces = observation_space, action_space
        self.online_ratio = online_ratio
        self.keep_interventions = keep_interventions
        replay_settings: dict[str, Any] = {"directory": directory}
        replay_settings |= {} if goals is None else {"goals": goals}
        self.online = online(*self._spaces, num_envs, device, seed, **replay_settings)
        # The offline replay has one stream: episodes and interventions of all envs follow each
        # other.
        self.offline = offline(*self._spaces, 1, device, (seed + 1) % 2**31, **replay_settings)
        self._begun = False  # whether this run, or the run it resumes, has added a rollout
        self._earned: tuple[float, Tensor, Tensor, Tensor] | None = None
        # Open the dataset now to report errors early; read it with the first rollout.
        settings = {"keys": keys, "ends": ends, "actions_outside": actions_outside}
        self._source: Iterator[Episode] | None = None
        self._rate: tuple[Path, float | None] | None = None  # of the dataset
        if demonstrations is not None:
            self._source = self._open(demonstrations, penalties, settings)
        self._open_env: int | None = None  # env of the last stored intervention, if it continues
        self._interventions = 0
        self._online_share: float | None = None  # None before the first minibatch

    def _open(
        self, path: str, penalties: dict[str, float] | None, settings: dict[str, Any]
    ) -> Iterator[Episode]:
        # Their files distinguish a run's replay from a dataset.
        resolved = expanded(path)
        if resolved.suffix == ".ckpt" or (resolved / "checkpoints").is_dir():
            count, source = _of_replay(find_checkpoint(path, resolved), self._spaces)
        else:
            obs, action = self._spaces
            episodes = read_episodes(path, observation_space=obs, action_space=action, **settings)
            self._rate = resolved, episodes.fps
            count, source = sum(episodes.lengths), _of_dataset(episodes, penalties)
            if (first := next(source, None)) is not None:  # read one episode to find errors now
                source = chain((first,), source)
        room = getattr(self.offline, "capacity", None)
        require(
            room is None or room >= count,
            f"data.replay.offline.capacity={room} is less than the {count} transitions of {path}: "
            "the last transitions would replace the first. Raise it, and leave room for "
            "interventions.",
        )
        return source

    @property
    def capacity(self) -> int | None:
        """Transitions that both replays can hold; None if one of them has no `capacity`."""
        rooms = [getattr(replay, "capacity", None) for replay in (self.online, self.offline)]
        return None if None in rooms else sum(rooms)  # type: ignore[arg-type]  # no None in it

    def __len__(self) -> int:
        return len(self.online) + len(self.offline)

    # --- write ---

    def check_rate(self, fps: float | None) -> None:
        if self._rate is not None:
            check_fps(*self._rate, fps)

    def extend(self, rollout: TensorDict) -> None:
        require(
            "executed" not in rollout.keys(),
            "MixedReplay stores single actions, but the env takes chunks of actions: remove "
            "ActionChunk, or use a ReplayBuffer.",
        )
        infos = [str(key) for key in rollout.keys() if str(key).startswith("info/")]
        require(
            not infos,
            f"data.extra_fields keeps {', '.join(infos)} of each step, but MixedReplay joins the "
            "steps with demonstrations, which have no infos: remove data.extra_fields, or set "
            "data.replay: ReplayBuffer.",
        )
        self._read_demonstrations()
        if not self._begun:
            self._begun = True
            if isinstance(self.offline, ReplayBuffer):  # before interventions are stored too
                # Normalization weighs these rewards by their share of the minibatches.
                self._earned = 1.0 - self.online_ratio, *fragment_rewards(self.offline)
        self.online.extend(rollout)
        if self.keep_interventions and "intervened" in rollout.keys():
            self._keep_interventions(rollout)

    def _read_demonstrations(self) -> None:
        # Forget the source first: a second call must not store demonstrations twice.
        source, self._source = self._source, None
        if source is not None:
            for episode in source:
                self._put(episode)

    def largest_new_return(self, gamma: float) -> Tensor | None:
        bounds = (part.largest_new_return(gamma) for part in (self.online, self.offline))
        return max((bound for bound in bounds if bound is not None), default=None)

    def take_offline_rewards(self) -> tuple[float, Tensor, Tensor, Tensor] | None:
        """Return the rewards of the initial demonstrations, once; None afterwards.

        Raises:
            ConfigurationError: if `offline` is not a `ReplayBuffer` and holds transitions.
        """
        require(
            isinstance(self.offline, ReplayBuffer) or len(self.offline) == 0,
            "normalize_reward also scales the rewards of demonstrations, but data.replay.offline, "
            f"a {type(self.offline).__name__}, cannot list them: use a ReplayBuffer there, or set "
            "model.normalize_reward: false.",
        )
        rewards, self._earned = self._earned, None
        return rewards

    def _keep_interventions(self, rollout: TensorDict) -> None:
        # The last slot holds no step, only the final observation.
        intervened = rollout["intervened"][:, :-1]
        if "padding" in rollout.keys():
            intervened = intervened & ~rollout["padding"][:, :-1]
        open_env, self._open_env = self._open_env, None
        if not intervened.any():
            return
        done = rollout["done"][:, :-1]
        for env in intervened.any(1).nonzero().flatten().tolist():
            for first, stop in _stretches(intervened[env].tolist(), done[env].tolist()):
                # An intervention may go on over the border of two rollouts; "continues" joins its
                # two parts in the stream, so that n-step returns cross the border.
                follows = first == 0 and open_env == env and bool(rollout["continues"][env, 0])
                self._put(steps_of(rollout, env, first, stop), continues=follows)
                # Only the next stored part can continue this part.
                open_env = None
                is_last = stop == intervened.shape[1] and not done[env, stop - 1]
                self._open_env = env if is_last else None
        self._interventions += int(intervened.sum())

    def _put(self, episode: Episode, *, continues: bool = False) -> None:
        """Store an episode in the offline replay; `continues`: it continues the last one."""
        # Without `penalty` an episode cannot join a replay whose other episodes have it.
        penalty = {"penalty": episode.extra.get("penalty", torch.zeros(len(episode)))}
        rollout = replace(episode, extra=penalty).to_rollout(*self._spaces)
        rollout["continues"].fill_(continues)
        self.offline.extend(rollout)

    # --- draw ---

    def batches(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        return self._drawn("batches", count, batch_size, n_steps=n_steps, gamma=gamma)

    def chunks(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        return self._drawn("chunks", count, batch_size, n_steps=n_steps, gamma=gamma)

    def _drawn(
        self, kind: str, count: int, batch_size: int, **settings: Any
    ) -> Iterator[TensorDict]:
        first = self._share_of(batch_size)
        sizes = {self.online: first, self.offline: batch_size - first}
        self._online_share = first / batch_size
        parts = [
            getattr(replay, kind)(count, size, **settings) for replay, size in sizes.items() if size
        ]
        return (_joined(batches) for batches in zip(*parts, strict=True))

    def _share_of(self, batch_size: int) -> int:
        if len(self.offline) == 0:
            return batch_size  # if both are empty, `online` raises the error
        # Round half up; `round` would give the online replay 2 of 5, but 2 of 3.
        return 0 if len(self.online) == 0 else math.floor(batch_size * self.online_ratio + 0.5)

    def metrics(self) -> dict[str, float]:
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
        states = {name: getattr(self, name).state_dict(folder) for name in ("online", "offline")}
        return {
            **states,
            "files": [name for state in states.values() for name in state.get("files", [])],
            # Once the source is read its transitions are in the replay's files, and a resumed run
            # must not read it again.
            "begun": self._source is None,
            "goes_on": self._open_env,
            "interventions": self._interventions,
            "online_share": self._online_share,
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        require(
            "online" in state and "offline" in state,
            "The checkpoint's replay is not a MixedReplay, but data.replay is. "
            "Start with an empty replay: --restore_replay false.",
        )
        for name in ("online", "offline"):
            getattr(self, name).load_state_dict(state[name], folder)
        if state["begun"]:
            self._source = None
            self._begun = True
        self._open_env, self._interventions = state["goes_on"], state["interventions"]
        self._online_share = state["online_share"]


def _stretches(steps: list[bool], done: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield the ranges [first, stop) of consecutive true `steps` within an episode."""
    first: int | None = None
    for step, (is_taken, is_end) in enumerate(zip(steps, done, strict=True)):
        if is_taken and first is None:
            first = step
        if first is not None and (is_end or step + 1 == len(steps) or not steps[step + 1]):
            yield first, step + 1
            first = None


def steps_of(rollout: TensorDict, env: int, first: int, stop: int) -> Episode:
    """Return the steps `first` to `stop` - 1 of an env of a rollout [N, T+1]."""
    part = rollout[env, first:stop]
    observation = map_tree(lambda x: x[env, first : stop + 1].clone(), rollout.get("observation"))
    # An episode's true final observation is stored apart from the slots.
    if rollout["done"][env, stop - 1]:  # the next slot belongs to the next episode
        at = (torch.tensor([place], device=rollout.device) for place in (env, stop - 1))
        final = final_observations(rollout, *at)
        map_tree(lambda leaf, end: leaf[-1:].copy_(end), observation, final)
    names = ("reward", "terminated", "intervened", "penalty")
    steps = {name: part[name] for name in names if name in part.keys()}
    action = part.get("executed_action", part.get("action"))
    return Episode.of_steps(steps | {"observation": observation, "action": action})


def _joined(batches: tuple[TensorDict, ...]) -> TensorDict:
    completed: list[Any] = []
    for batch in batches:
        keys = [*FIELDS, "executed"] if "executed" in batch.keys() else FIELDS
        fields = {key: batch.get(key) for key in keys}
        # A replay without a field has zeros of it, so that both batches can be joined.
        nothing = torch.zeros_like(batch["reward"])
        fields |= {key: batch.get(key, nothing.to(kind)) for key, kind in ADDED.items()}
        completed.append(TensorDict(fields, batch.batch_size))
    joined: Any = completed[0] if len(completed) == 1 else torch.cat(completed)
    return joined  # type: ignore[no-any-return]  # a TensorDict


def _of_dataset(episodes: Episodes, penalties: dict[str, float] | None) -> Iterator[Episode]:
    for episode in rewarded(episodes):
        columns = episode.extra
        weights = {"penalty": 1.0} if "penalty" in columns else {}
        weights = weights if penalties is None else penalties
        missing = weights.keys() - columns.keys()
        require(
            not missing,
            f"data.replay.penalties names {', '.join(sorted(missing))}, which the dataset "
            f"{episodes.path} does not hold; it has {', '.join(sorted(columns)) or 'none'}.",
        )
        penalty = torch.zeros(len(episode))
        for name, weight in weights.items():
            penalty += weight * columns[name].float()
        yield replace(episode, extra={"penalty": penalty})


def _of_replay(
    checkpoint: Path, spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]]
) -> tuple[int, Iterator[Episode]]:
    states = read_checkpoint(checkpoint).get("RLDataModule", {}).get("replays", [])
    # A mixed replay has two parts.
    parts = [s[name] for s in states for name in ("online", "offline") if name in s]
    parts += [state for state in states if "online" not in state]
    require(
        bool(parts) and all("begin" in part for part in parts),
        f"{checkpoint} holds no replay: give a checkpoint of an off-policy run (last.ckpt) that "
        "was saved with trainer.save_replay, or a dataset.",
    )

    def size_of(part: dict[str, Any]) -> int:
        return (part["end"] - part["begin"]) * part["num_envs"]  # type: ignore[no-any-return]  # a plain dict

    def stored(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        replay = ReplayBuffer(*spaces, part["num_envs"], capacity=max(1, size_of(part)))
        replay.load_state_dict(part, checkpoint.parent / "replay")
        return fragments(replay)

    def episodes() -> Iterator[Episode]:
        for state in states:
            twice = 0  # interventions in both parts: the newest steps of `offline`
            for steps in stored(state.get("online", state)):
                twice += int(steps["intervened"].sum()) if "intervened" in steps else 0
                yield Episode.of_steps(steps)
            if "offline" not in state:
                continue
            left = size_of(state["offline"]) - min(twice, state["interventions"])
            for steps in stored(state["offline"]):
                count = min(left, len(steps["reward"]))
                left -= count
                if count > 0:
                    yield Episode.of_steps(_first_steps(steps, count))

    # Interventions that `online` holds for certain count once.
    twice = sum(
        min(s["interventions"], size_of(s["offline"]))
        for s in states
        if "offline" in s and s["online"]["begin"] == 0
    )
    return sum(map(size_of, parts)) - twice, episodes()


def _first_steps(steps: dict[str, Any], count: int) -> dict[str, Any]:
    return {
        name: map_tree(lambda leaf, n=count + (name == "observation"): leaf[:n], column)
        for name, column in steps.items()
    }
