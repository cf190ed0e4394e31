"""Save the running episodes of N envs as actions, and replay them in a resumed run."""

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from lightning_rl.envs.gymnasium.checksums import Checksums, EpisodeChecksums
from lightning_rl.envs.vector_env import RestoreError
from lightning_rl.rollout.contract import leaves_by_path, map_tree

MAX_REPLAY_STEPS = 100_000
"""Longest episode, in steps, that a resumed run can replay."""

CURE = (
    "The env or a wrapper keeps something from episode to episode, or draws from a generator other "
    "than self.np_random: give it state_dict() and load_state_dict(state), which hold it."
)
"""Cure for an env whose episodes do not depend on its generator and the actions alone."""

REPLAY_SECONDS = 5.0
"""Duration of one turn of a replay, in seconds, for all `sync` envs together."""


class EpisodeLog:
    """Actions and checksums of the running episodes of N envs; `name` names them in warnings.

    Attributes:
        actions: [N, *A] of each step, from step `first_kept` on.
        starts: [N], the step with which each running episode began.
        checksums: of observations, rewards and infos.
        turns: number of turns of replays so far.
    """

    def __init__(self, name: str, num_envs: int) -> None:
        self._name, self._num_envs = name, num_envs
        self.checksums = EpisodeChecksums(num_envs)
        self.turns = 0
        self.clear()

    def clear(self) -> None:
        """Forget all episodes."""
        self.actions: list[np.ndarray] = []
        self.first_kept = 0
        self.starts = np.zeros(self._num_envs, dtype=np.int64)

    def begin(self, observation: Any) -> None:
        """Begin an episode in every env, with observation [N, ...]."""
        self.clear()
        self.checksums.begin(observation)

    def trim(self) -> None:
        """Forget the actions before all running episodes, and of very long episodes."""
        now = self.first_kept + len(self.actions)
        oldest = max(int(self.starts.min()), now - MAX_REPLAY_STEPS)
        del self.actions[: oldest - self.first_kept]
        self.first_kept = oldest

    @property
    def is_cut(self) -> bool:
        """Whether actions of a running episode are missing: it cannot be replayed."""
        return bool(self.starts.min() < self.first_kept)

    def lengths(self) -> list[int]:
        """Return the number of actions of each running episode."""
        return [self.first_kept + len(self.actions) - start for start in self.starts.tolist()]

    def state_dict(self, starts: Sequence[Any], observation: Any) -> dict[str, Any]:
        """Return the episodes, for each env's state at the start, and the observation [N, ...]."""
        log = np.stack(self.actions) if self.actions else np.empty((0, self._num_envs))
        episodes = [
            {
                "start": start,
                "actions": torch.from_numpy(log[begin - self.first_kept :, i].copy()),
                "checksums": checksums,
            }
            for i, (start, begin, checksums) in enumerate(
                zip(starts, self.starts.tolist(), self.checksums.values(), strict=True)
            )
        ]
        return {"episodes": episodes, "observation": _copied(observation)}

    def replay(self, env: Any, state: dict[str, Any], space: gymnasium.Space[Any]) -> Any:
        """Replay saved episodes in a vector env; return the observation [N, ...] of `space`.

        Raises:
            RestoreError: if the state belongs to other envs, or the replay differs from it.
        """
        episodes = state["episodes"]
        if len(episodes) != self._num_envs:
            raise RestoreError(
                f"the state was saved with {len(episodes)} envs, but there are {self._num_envs}"
            )
        interventions = state.get("interventions", [[]] * self._num_envs)
        current_states = env.call("intervention_states")
        if [len(states) for states in interventions] != [len(states) for states in current_states]:
            raise RestoreError("the state was saved with other Intervention wrappers")
        env.reset()  # `InlineVectorEnv` makes its arrays at a reset
        actions = [episode["actions"].numpy() for episode in episodes]
        env.set_attr(
            "replay_request",
            [
                (e["start"], list(a), states)
                for e, a, states in zip(episodes, actions, interventions, strict=True)
            ],
        )
        rows, checksums = zip(*self._replayed(env), strict=True)
        if any(row is None for row in rows):
            raise RestoreError(f"a replayed episode ended too early. {CURE}")
        observation = _stack(space, rows)
        if not _equal(_copied(observation), state["observation"]):
            raise RestoreError(f"replaying its actions gave a different observation. {CURE}")
        saved = [episode.get("checksums") for episode in episodes]
        self._warn_of_differences(saved, checksums)
        self.checksums.restore(checksums)
        longest = max(len(a) for a in actions)
        self.clear()
        # Episodes differ in length: those that began later are padded in front.
        padded = [
            np.concatenate([np.zeros((longest - len(a), *a.shape[1:]), a.dtype), a])
            for a in actions
        ]
        self.actions = list(np.stack(padded, axis=1)) if longest else []
        self.starts = np.array([longest - len(a) for a in actions], dtype=np.int64)
        return observation

    def _replayed(self, env: Any) -> list[Any]:
        while True:
            # In turns of seconds: each turn raises `progress`, so that a long replay does not count
            # as hanging.
            replayed = env.call("replay_episode", REPLAY_SECONDS / self._num_envs)
            self.turns += 1
            if all(done for done, _ in replayed):
                return [result for _, result in replayed]

    def _warn_of_differences(self, saved: Sequence[Any], replayed: Sequence[Checksums]) -> None:
        """Warn of values that a replay did not repeat; older checkpoints have no checksums."""
        differing = [
            {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
            for old, new in zip(saved, replayed, strict=True)
            if old is not None
        ]
        if names := sorted(set().union(*differing)):
            count = sum(map(bool, differing))
            warnings.warn(
                f"Replaying the running episodes of {self._name} gave a different "
                f"{', '.join(names)} in {count} of {self._num_envs} envs, so the resumed run may "
                f"differ from an uninterrupted one (no matter for an entry that is a time). {CURE}",
                stacklevel=2,
            )


def _stack(space: gymnasium.Space[Any], rows: Sequence[Any]) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _stack(child, [row[key] for row in rows]) for key, child in space.items()}
    return np.stack([np.asarray(row, dtype=space.dtype) for row in rows])


def _copied(observation: Any) -> Any:
    return map_tree(lambda array: torch.from_numpy(array).clone(), observation)


def _equal(a: Any, b: Any) -> bool:
    leaves, leaves_of_b = leaves_by_path(a), leaves_by_path(b)
    return leaves.keys() == leaves_of_b.keys() and all(
        # NaN equals NaN here.
        torch.equal(leaf.nan_to_num(nan=1e30), leaves_of_b[path].nan_to_num(nan=1e30))
        for path, leaf in leaves.items()
    )
