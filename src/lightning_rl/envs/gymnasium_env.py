"""Adapt Gymnasium's vector envs to tensors.

The one place that knows about autoreset and clipping.
"""

import atexit
import importlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.inline import InlineVectorEnv
from lightning_rl.envs.replay import ReplayableEpisode
from lightning_rl.envs.stepping import ArrayStepper, RolloutStepper
from lightning_rl.envs.vector_env import Observation, RestoreError, Seed, VectorEnv
from lightning_rl.envs.workers import WorkerVectorEnv
from lightning_rl.errors import ConfigurationError, closest, require

EnvWrapper = Callable[[gymnasium.Env], gymnasium.Env]

MAX_REPLAY_STEPS = 100_000
"""Longest episode, in steps, whose actions are kept so that a resumed run can replay it."""

EXTRAS = {
    "mujoco": "pip install 'lightning-rl[mujoco]'",
    "box2d": "pip install 'gymnasium[box2d]'",
    "toy_text": "pip install 'gymnasium[toy-text]'",
    "classic_control": "pip install 'gymnasium[classic-control]'",
    "phys2d": "pip install 'gymnasium[jax]'",
    "tabular": "pip install 'gymnasium[jax]'",
    "ale_py": "pip install 'gymnasium[atari]'",
}
"""What to install for an env whose module name contains the key."""


class GymnasiumEnv(VectorEnv):
    """Any registered Gymnasium env, N times.

    Args:
        num_envs: N.
        id: the registered id; `module:Name-v0` imports the module first.
        env_kwargs: passed to the env's constructor.
        vectorization: `sync` steps the envs one after the other, `async` each in a process of its
            own, `vector_entry_point` takes the env's own batched version (it must reset finished
            envs in the same step).
        wrappers: applied to each env in order, `gymnasium.Env -> gymnasium.Env`; in YAML a list of
            class paths.
        clip_action: clip continuous actions to the bounds of the space before stepping.

    Raises:
        ConfigurationError: for an unknown id, a missing package, or an env that resets finished
            envs a step late.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        num_envs: int,
        id: str,
        env_kwargs: dict[str, Any] | None = None,
        vectorization: Literal["sync", "async", "vector_entry_point"] = "sync",
        wrappers: Sequence[EnvWrapper] | None = None,
        clip_action: bool = True,
    ) -> None:
        require(num_envs >= 1, f"num_envs must be at least 1, got {num_envs}.")
        require(
            bool(id), "The env id is empty; give a registered Gymnasium id such as CartPole-v1."
        )
        self.id = id
        self.num_envs = num_envs
        self._replayable = vectorization != "vector_entry_point"
        self._env = _make(id, num_envs, env_kwargs or {}, vectorization, list(wrappers or []))
        atexit.register(_close, weakref.ref(self))
        self.single_observation_space = self._env.single_observation_space
        self.single_action_space = self._env.single_action_space
        self._clip: tuple[np.ndarray, np.ndarray] | None = None
        if clip_action and isinstance(self.single_action_space, gymnasium.spaces.Box):
            self._clip = (self.single_action_space.low, self.single_action_space.high)
        start = np.asarray(getattr(self.single_action_space, "start", 0))
        self._first_action = start if start.any() else None
        self._observation: Any = None
        self._forget_episodes()

    def reset(
        self, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See `VectorEnv.reset`."""
        seeds = seed if seed is None else _plain_seed(seed)
        self._observation, info = self._env.reset(seed=seeds, options=options)
        self._forget_episodes()
        return _to_tensors(self._observation), info

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """See `VectorEnv.step`."""
        observation, *results, info = self.step_arrays(action.cpu().numpy())
        reward, terminated, truncated = (torch.from_numpy(array) for array in results)
        return _to_tensors(observation), reward, terminated, truncated, info

    def rollout_stepper(self, rollout: TensorDict) -> RolloutStepper:
        """See `VectorEnv.rollout_stepper`."""
        # A subclass may step in another way.
        if type(self) is GymnasiumEnv and _is_plain(rollout):
            return ArrayStepper(self, rollout)
        return super().rollout_stepper(rollout)

    def step_arrays(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Do what `step` does, with arrays; `info` holds tensors all the same."""
        if self._clip is not None:
            actions = np.maximum(actions, self._clip[0])
            np.minimum(actions, self._clip[1], out=actions)
        elif self._first_action is not None:
            actions = actions + self._first_action
        elif self._replayable:
            actions = (
                actions.copy()
            )  # kept for the replay below, while the rollout's storage is written again
        self._observation, reward, terminated, truncated, info = self._env.step(actions)
        if self._replayable:
            self._remember(actions, terminated | truncated if "final_obs" in info else None)
        return self._observation, reward, terminated, truncated, self._tensor_info(info)

    def state_dict(self) -> dict[str, Any] | None:
        """See `VectorEnv.state_dict`: how each episode began, and its actions since."""
        if not self._replayable or self._episode_begin.min() < self._first_kept:
            return None
        starts = self._env.get_attr("episode_start")
        if any(start is None for start in starts):
            return None
        log = np.stack(self._actions) if self._actions else np.empty((0, self.num_envs))
        episodes = [
            {"start": start, "actions": torch.from_numpy(log[begin - self._first_kept :, i].copy())}
            for i, (start, begin) in enumerate(
                zip(starts, self._episode_begin.tolist(), strict=True)
            )
        ]
        return {"episodes": episodes, "observation": _plain(_to_tensors(self._observation))}

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """See `VectorEnv.load_state_dict`.

        Begin the episodes again, replay their actions, compare the observation.
        """
        episodes = state["episodes"]
        if len(episodes) != self.num_envs:
            raise RestoreError(
                f"the state was saved with {len(episodes)} envs, there are {self.num_envs}"
            )
        self._env.reset()
        actions = [episode["actions"].numpy() for episode in episodes]
        self._env.set_attr(
            "replay_request",
            [(e["start"], list(a)) for e, a in zip(episodes, actions, strict=True)],
        )
        rows = self._env.call("replay_episode")
        if any(row is None for row in rows):
            raise RestoreError("a replayed episode ended before its time")
        self._observation = _stack(self.single_observation_space, rows)
        if not _equal(_plain(_to_tensors(self._observation)), state["observation"]):
            raise RestoreError("replaying its actions gave another observation")
        self._restore_log(actions)
        if isinstance(self._env, InlineVectorEnv):
            self._env.set_elapsed([len(a) for a in actions])
        return _to_tensors(self._observation)

    def close(self) -> None:
        """See `VectorEnv.close`."""
        self._env.close()

    def _forget_episodes(self) -> None:
        """Empty the log of actions: all episodes begin here."""
        self._actions: list[np.ndarray] = []
        self._first_kept = 0
        self._episode_begin = np.zeros(self.num_envs, dtype=np.int64)

    def _remember(self, actions: np.ndarray, done: np.ndarray | None) -> None:
        """Keep the actions that the episodes under way would need for a replay."""
        self._actions.append(actions)
        now = self._first_kept + len(self._actions)
        if done is not None:
            self._episode_begin[done] = now
        if len(self._actions) % 1024 == 0:
            oldest = max(int(self._episode_begin.min()), now - MAX_REPLAY_STEPS)
            del self._actions[: oldest - self._first_kept]
            self._first_kept = oldest

    def _restore_log(self, actions: list[np.ndarray]) -> None:
        longest = max(len(a) for a in actions)
        self._forget_episodes()
        padded = [
            np.concatenate([np.zeros((longest - len(a), *a.shape[1:]), a.dtype), a])
            for a in actions
        ]
        self._actions = list(np.stack(padded, axis=1)) if longest else []
        self._episode_begin = np.array([longest - len(a) for a in actions], dtype=np.int64)

    def _tensor_info(self, info: dict[str, Any]) -> dict[str, Any]:
        """Translate what Gymnasium says of finished episodes."""
        if "final_obs" not in info:
            return {}
        final = info["final_obs"]
        if isinstance(final, np.ndarray) and final.dtype == object:
            rows = [
                _row(self._observation, i) if row is None else row for i, row in enumerate(final)
            ]
            final = _stack(self.single_observation_space, rows)
        result: dict[str, Any] = {"final_obs": _to_tensors(final)}
        for key in ("success", "is_success"):
            if key in info.get("final_info", {}):
                result["success"] = torch.as_tensor(np.asarray(info["final_info"][key], dtype=bool))
        return result


def _make(
    id: str,
    num_envs: int,
    env_kwargs: dict[str, Any],
    vectorization: str,
    wrappers: list[EnvWrapper],
) -> Any:
    """Call `gymnasium.make_vec`, and turn its errors into messages that say what to do."""
    require(
        vectorization != "vector_entry_point" or not wrappers,
        "wrappers need vectorization sync or async; a vector entry point cannot be wrapped env by "
        "env.",
    )
    make_one = partial(_make_one, id, env_kwargs, wrappers)
    try:
        if ":" in id:
            importlib.import_module(id.split(":", maxsplit=1)[0])
        env: Any
        if vectorization == "sync":
            env = InlineVectorEnv([make_one] * num_envs)
        elif vectorization == "async":
            # copy=False: the collector copies each observation before the next step overwrites it.
            env = WorkerVectorEnv(
                [make_one] * num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP
            )
        else:
            env = gymnasium.make_vec(
                id, num_envs=num_envs, vectorization_mode=vectorization, **env_kwargs
            )
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise ConfigurationError(
            f"No Gymnasium env '{id}'{closest(id.split(':')[-1], gymnasium.registry)}. ({error})"
        ) from error
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigurationError(
            f"Env '{id}' needs a package that is not installed: {_cure(id, error)}"
        ) from error
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigurationError(f"Env '{id}' could not be made: {error}") from error
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.SAME_STEP:
        env.close()
        raise ConfigurationError(
            f"Env '{id}' with vectorization={vectorization} has autoreset mode {mode}; finished "
            "envs must reset in the "
            "same step, or garbage transitions would be trained on. Use vectorization: sync or "
            "async."
        )
    return env


def _make_one(id: str, env_kwargs: dict[str, Any], wrappers: list[EnvWrapper]) -> gymnasium.Env:
    env = gymnasium.make(id, disable_env_checker=True, **env_kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return ReplayableEpisode(env)


def _cure(id: str, error: Exception) -> str:
    spec = gymnasium.registry.get(id)
    module = f"{spec.entry_point if spec else ''} {error}"
    cures = [cure for key, cure in EXTRAS.items() if key in module]
    return f"{cures[0]} ({error})" if cures else str(error)


def _close(reference: "weakref.ref[GymnasiumEnv]") -> None:
    """Close an env that is still alive at exit.

    Its workers ignore the signals that would end them.
    """
    env = reference()
    if env is not None:
        env.close()


def _to_tensors(observation: Any) -> Observation:
    """Wrap arrays, or dicts of them, as tensors [N, ...] that share their memory."""
    if isinstance(observation, dict):
        values = {key: _to_tensors(value) for key, value in observation.items()}
        return TensorDict(values, [len(next(iter(values.values())))])
    return torch.from_numpy(observation)


def _stack(space: gymnasium.Space[Any], rows: Sequence[Any]) -> Any:
    """Stack the observations of single envs to arrays [N, ...], or a dict of them."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _stack(child, [row[key] for row in rows]) for key, child in space.items()}
    return np.stack([np.asarray(row, dtype=space.dtype) for row in rows])


def _is_plain(rollout: TensorDict) -> bool:
    observation = rollout["observation"]
    return isinstance(observation, Tensor) and observation.device.type == "cpu"


def _row(observation: Any, i: int) -> Any:
    if isinstance(observation, dict):
        return {key: _row(value, i) for key, value in observation.items()}
    return observation[i]


def _plain(observation: Any) -> Any:
    """Copy an observation to what a checkpoint may hold: a tensor, or a dict of them."""
    if isinstance(observation, Tensor):
        return observation.clone()
    return {key: _plain(value) for key, value in observation.items()}


def _plain_seed(seed: int | Sequence[int]) -> int | list[int]:
    """Make Python's integers of a seed or of a sequence of them; Gymnasium takes no others."""
    return [int(s) for s in seed] if isinstance(seed, Sequence) else int(seed)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and a.keys() == b.keys()
            and all(_equal(a[key], b[key]) for key in a)
        )
    return isinstance(b, Tensor) and torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))
