"""Adapt EnvPool's batched C++ envs to tensors.

Weng et al. 2022, "EnvPool: A Highly Parallel Reinforcement Learning Environment Execution Engine".
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError, VectorEnv
from lightning_rl.extend.envs import (
    InfoReader,
    Observation,
    Seed,
)
from lightning_rl.extend.errors import closest, import_extra, reason_of, require
from lightning_rl.extend.rollout import map_tree
from lightning_rl.extend.spaces import as_env_counts, first_choice

OWN_SETTINGS = ("num_envs", "num_threads", "batch_size", "seed", "env_seed", "render_mode")
"""EnvPool settings that `env_kwargs` cannot set."""

TERM = "reward_"
"""Before the name of a reward term in EnvPool's infos."""


class EnvPoolEnv(VectorEnv):
    """Any env of EnvPool, N times, stepped by C++ threads.

    Each seeded reset makes a new pool, because a pool takes seeds only at its construction: .1 to
    .3 CPU seconds per humanoid. Each of its envs has a model of its own: 57 MB for a T1, 122 MB for
    a G1. A resumed run restarts its episodes, with a warning. If an episode
    fails exactly at the time limit, only `truncated` is set. Reward terms are charted as they add
    up to the reward, before a task bounds the sum. Films of MuJoCo tasks need `mujoco`, and without
    a screen the environment variable `MUJOCO_GL=egl`.

    Args:
        num_envs: N.
        id: one of `envpool.list_all_envs()`.
        num_threads: threads that step the envs; 0: EnvPool chooses.
        env_kwargs: further settings of the env, such as `max_episode_steps`.
        clip_action: clip continuous actions to the bounds of the space before stepping.
        keep_pool: make one pool only. Seeds after the first are then without effect, and every
            evaluation meets other episodes.

    Raises:
        ConfigurationError: EnvPool is not installed; the id is unknown; EnvPool rejects a setting.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        num_envs: int,
        id: str,
        num_threads: int = 0,
        env_kwargs: dict[str, Any] | None = None,
        clip_action: bool = True,
        keep_pool: bool = False,
    ) -> None:
        require(num_envs >= 1, f"num_envs must be at least 1, got {num_envs}.")
        require(num_threads >= 0, f"num_threads must be at least 0, got {num_threads}.")
        require(bool(id), "The env id is empty; give an EnvPool id such as CartPole-v1.")
        kwargs = env_kwargs or {}
        for name in OWN_SETTINGS:
            require(
                name not in kwargs,
                f"env_kwargs cannot set '{name}'; num_envs and num_threads are arguments of "
                "EnvPoolEnv, and reset takes the seeds.",
            )
        self.id = id
        self.num_envs, self.keep_pool = num_envs, keep_pool
        self._envpool = _import_envpool()
        self._settings = {**kwargs, "num_envs": num_envs, "num_threads": num_threads}
        self._pool: Any = None
        self._reader = InfoReader(f"EnvPool env '{id}'", num_envs)
        spec, *spaces = _make_spec(self._envpool, id, self._settings)
        modules = [kind.__module__ for kind in type(spec).__mro__]
        self._needs_gl, self._gl = any(".mujoco." in module for module in modules), None
        self.max_episode_steps = spec.config.max_episode_steps
        # Playground's tasks have terms per second, and a reward per control step.
        self._term_scale = getattr(spec.config, "ctrl_dt", 1.0)
        self.single_observation_space, self.single_action_space = map(_as_stored, spaces)
        self._clip: tuple[np.ndarray, np.ndarray] | None = None
        if clip_action and isinstance(self.single_action_space, gymnasium.spaces.Box):
            self._clip = (self.single_action_space.low, self.single_action_space.high)
        self._first_choice = first_choice(self.single_action_space)

    def record_info(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        raise ConfigurationError(
            f"data.extra_fields keeps {', '.join(shapes)}, but EnvPoolEnv passes no other entries "
            "of EnvPool's infos on than success and rewards: remove the setting."
        )

    def reset(self, seed: Seed = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        if self._pool is None or (seed is not None and not self.keep_pool):
            self.close()  # a pool takes seeds only at its construction
            if seed is None:
                seed = np.random.SeedSequence().generate_state(self.num_envs).tolist()
            # EnvPool's seeds are signed 32-bit numbers.
            seeds = [s % 2**31 for s in self.seeds_of(seed)]
            with _explained(self.id):
                self._pool = self._envpool.make_gymnasium(self.id, **self._settings, seed=seeds)
                observation, _ = self._pool.reset()
        else:
            observation, _ = self._pool.reset()
        return _to_tensors(observation), {}

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        require(self._pool is not None, "Call reset before the first step, and after close.")
        actions = as_env_counts(action.cpu().numpy(), self._first_choice)
        if self._clip is not None:
            actions = np.clip(actions, *self._clip)
        observation, reward, terminated, truncated, numpy_info = self._pool.step(actions)
        result, info = _to_tensors(observation), {}
        done = terminated | truncated
        if self._reader.has_reports(numpy_info):
            info = self._reader.to_tensors(self._reader.read_arrays(numpy_info, done))
        terms = {name: term for name, term in numpy_info.items() if name.startswith(TERM)}
        if terms:
            scaled = {
                name.removeprefix(TERM): term * self._term_scale for name, term in terms.items()
            }
            info["rewards"] = map_tree(_narrowed, scaled)
        finished = np.flatnonzero(done)
        if finished.size:
            info["final_obs"] = result
            # Reset now: EnvPool would reset these envs in the next step and ignore its action.
            first, _ = self._pool.reset(finished.astype(np.int32))
            # A copy with first observations: `final_obs` keeps the last ones.
            result = _with_rows(result, torch.from_numpy(finished), _to_tensors(first))
        return (
            result,
            torch.from_numpy(reward.astype(np.float32, copy=False)),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            info,
        )

    def make_renderable(self) -> None:
        """Restart the envs with pictures, and for a MuJoCo task make a GL context.

        Raises:
            ConfigurationError: there is no `mujoco`, or no GL.
        """
        self._settings["render_mode"] = "rgb_array"
        self.close()
        if self._needs_gl and self._gl is None:
            try:
                from mujoco import GLContext

                self._gl = GLContext(64, 64)
            except Exception as error:  # of the import, or of the GL that MUJOCO_GL chooses
                raise ConfigurationError(
                    f"EnvPool '{self.id}' cannot be drawn: {reason_of(error)}. Install mujoco; "
                    "without a screen set the variable MUJOCO_GL=egl. Or turn videos off."
                ) from error

    def render(self, rows: Sequence[int]) -> np.ndarray:
        if self._gl is not None:
            self._gl.make_current()  # in this thread: without it, EnvPool ends the process
        pictures: np.ndarray = self._pool.render(env_ids=np.asarray(rows))
        return pictures

    def close(self) -> None:
        self._pool = None


def _import_envpool() -> Any:
    missing = "EnvPoolEnv needs a package that is not installed: pip install -e '.[envpool]'"
    return import_extra("envpool", missing)


def _make_spec(envpool: Any, id: str, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the spec of an env, its observation space and its action space."""
    ids = envpool.list_all_envs()
    require(id in ids, f"No EnvPool env '{id}'{closest(id, ids)}.")
    with _explained(id):
        spec = envpool.make_spec(id, **settings)
        spaces = spec.gymnasium_observation_space, spec.gymnasium_action_space
    players = spec.config.max_num_players
    require(players == 1, f"EnvPool env '{id}' has {players} players; only one is supported.")
    return spec, *spaces


@contextmanager
def _explained(id: str) -> Iterator[None]:
    # EnvPool has float64 bounds for float32 spaces, and Gymnasium warns each time.
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*precision lowered by casting")
            yield
    except Exception as error:  # an assertion, a TypeError, or a C++ error
        raise ConfigurationError(f"EnvPool '{id}' could not be made: {reason_of(error)}") from error


def _as_stored(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({key: _as_stored(child) for key, child in space.items()})
    if isinstance(space, gymnasium.spaces.Box) and space.dtype == np.float64:
        with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
            low, high = (bound.astype(np.float32) for bound in (space.low, space.high))
        return gymnasium.spaces.Box(low, high, dtype=np.float32)
    return space


def _to_tensors(observation: Any) -> Observation:
    tensors = map_tree(_narrowed, observation)
    if isinstance(tensors, Tensor):
        return tensors
    return TensorDict(tensors, [len(next(iter(tensors.values())))])


def _narrowed(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)


def _with_rows(observation: Observation, index: Tensor, rows: Observation) -> Observation:
    copied = observation.clone()
    copied[index] = rows
    return copied
