"""Restore a Gymnasium env in the middle of an episode, exactly and without pickle."""

import copy
import multiprocessing
import random
import signal
import time
from typing import Any, Protocol, cast, runtime_checkable

import gymnasium
import numpy as np
import torch

from lightning_rl.envs.gymnasium.mujoco_bindings import has_mujoco_profiler, set_mujoco_profiler
from lightning_rl.envs.infos import READ
from lightning_rl.envs.step_results import check_observation, copy_of, read_reset, read_step


@runtime_checkable
class SupportsInterventions(Protocol):
    """A wrapper that replaces actions, such as `Intervention`: a replay needs its state."""

    def stop_interventions(self) -> None:
        """Let the policy act again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the start of the episode."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""


class CheckedReturns(gymnasium.Wrapper):
    """Checks the results of an env before Gymnasium's wrappers raise obscure errors."""

    @property
    def spec(self) -> Any:  # type: ignore[override]  # a property there too
        """The env's own spec, so that `gymnasium.make` does not add this wrapper."""
        return self.env.spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return read_reset(self.env, self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return read_step(self.env, self.env.step(action))


class ReplayableEpisode(gymnasium.Wrapper):
    """Stores the start of the episode, so that its actions can be replayed.

    An episode is a function of the env's generator state at its reset and of the actions since.
    This wrapper stores the state, `GymnasiumEnv` the actions, and `Intervention` the replaced
    actions. If an env depends on anything else, its replay ends at another observation.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.episode_start: dict[str, Any] | None = None
        self.replay_request: tuple[dict[str, Any], list[Any], list[dict[str, Any]]] | None = None
        self._replay: tuple[Any, list[Any]] = (None, [])  # last observation, remaining actions
        self.picture_wanted = False
        space = env.observation_space
        # Check spaces other than Box at every step: keys of a dict, ranges of choices.
        self._shape = space.shape if isinstance(space, gymnasium.spaces.Box) else None
        self._dtype = space.dtype
        self._in_worker = multiprocessing.parent_process() is not None
        self._seed: int | None = None  # `_seed` and `_episode` seed a worker's global generators
        self._episode = 0
        if self._in_worker:
            # Only the learner stops workers, not Ctrl-C or a closed terminal.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._seed, self._episode = int(seed), 0
            self.episode_start = {"seed": int(seed)}
        else:
            self._episode += 1
            self.episode_start = _generator_state(self.unwrapped)
        if self._in_worker and self._seed is not None:
            seed_globals(self._seed, self._episode)
            if self.episode_start is not None:
                self.episode_start |= {"globals": [self._seed, self._episode]}
        if self.env.metadata.get("is_real"):
            self.episode_start = None  # a resumed run must not repeat the motions of a robot
        observation, info = read_reset(self.env, self.env.reset(seed=seed, options=options))
        check_observation(self.env, observation)
        # Copy, because an env may reuse its array and its dict.
        return copy_of(self.env.observation_space, observation), self._sent(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step and check the observation: shared memory would broadcast a wrong shape."""
        result = read_step(self.env, self.env.step(action))
        observation, reward, terminated, truncated, info = result
        ended = terminated or truncated
        shape, dtype = getattr(observation, "shape", None), getattr(observation, "dtype", None)
        # Fast path: shape and dtype of the last checked observation.
        if ended or shape is None or shape != self._shape or dtype is not self._dtype:
            check_observation(self.env, observation)
            if getattr(dtype, "kind", "") == "f":  # other integer dtypes might wrap
                self._dtype = dtype
        if ended:
            observation = copy.deepcopy(observation)  # the env may reuse the array
        return observation, reward, terminated, truncated, self._sent(info)

    def _sent(self, info: dict[str, Any]) -> dict[str, Any]:
        if not (info and self._in_worker):
            return info
        return {key: info[key] for key in READ if key in info}

    def profile_mujoco(self, wanted: bool) -> bool | None:
        """Switch MuJoCo's profiler; return whether this process uses it (None without MuJoCo)."""
        set_mujoco_profiler(wanted)
        return has_mujoco_profiler(self.env)

    def time_limit(self) -> int | None:
        limits, env = [], self.env
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, gymnasium.wrappers.TimeLimit):
                # Without a copy of the env's settings there is no spec.
                own = env.unwrapped.spec
                spec = env.spec or gymnasium.registry.get(own.id if own is not None else "")
                limits.append(spec.max_episode_steps or 0 if spec is not None else 0)
            env = env.env
        return min(filter(None, limits), default=None)

    def stop_interventions(self) -> None:
        for wrapper in self._interventions():
            wrapper.stop_interventions()

    def intervention_states(self) -> list[dict[str, Any]]:
        return [wrapper.state_dict() for wrapper in self._interventions()]

    def _interventions(self) -> list[SupportsInterventions]:
        wrappers: list[SupportsInterventions] = []
        env = self.env
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, SupportsInterventions):
                wrappers.append(env)
            env = env.env
        return wrappers

    def picture(self) -> Any:
        return self.env.render() if self.picture_wanted else None

    def replay_episode(self, seconds: float) -> tuple[bool, Any]:
        """Replay for some seconds; return whether it is complete, and the last observation."""
        until = time.monotonic() + seconds
        if self.replay_request is not None:
            start, actions, states = self.replay_request
            self.replay_request = None
            for wrapper, state in zip(self._interventions(), states, strict=True):
                wrapper.load_state_dict(state)
            if "globals" in start and self._in_worker:
                self._seed, self._episode = map(int, start["globals"])
                seed_globals(self._seed, self._episode)
            if "seed" in start:
                observation, _ = self.env.reset(seed=start["seed"])
            else:
                own = {key: value for key, value in start.items() if key != "globals"}
                self.unwrapped.np_random = _generator(own)
                observation, _ = self.env.reset()
            self.episode_start = start
            self._replay = observation, list(reversed(actions))
        observation, left = self._replay
        while left and time.monotonic() < until:
            action = copy.copy(left.pop())  # the env may write into it
            observation, _, terminated, truncated, _ = self.env.step(action)
            if terminated or truncated:
                observation, left = None, []
        self._replay = observation, left
        return not left, copy.deepcopy(observation)  # other envs may write into the same array


def seed_globals(seed: int, number: int) -> None:
    """Seed the global generators of Python, NumPy and torch in the process of an env.

    Otherwise all forked processes would draw the same numbers. Each episode seeds them, for
    resuming.
    """
    word = int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1)[0])
    random.seed(word)
    np.random.seed(word)
    torch.default_generator.manual_seed(word)


def _generator_state(env: gymnasium.Env) -> dict[str, Any] | None:
    generator = env.np_random
    if not isinstance(generator, np.random.Generator):
        return None
    state = dict(generator.bit_generator.state)
    # Checkpoints hold plain numbers only; MT19937 has an array.
    return state if state.get("bit_generator") == "PCG64" else None


def _generator(state: dict[str, Any]) -> np.random.Generator:
    bit_generator = np.random.PCG64()
    bit_generator.state = cast(Any, state)
    return np.random.Generator(bit_generator)
