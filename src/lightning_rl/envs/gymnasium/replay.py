"""Restore a Gymnasium env in the middle of an episode, exactly and without pickle."""

import copy
import multiprocessing
import random
import time
from typing import Any, Protocol, cast, runtime_checkable

import gymnasium
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl.envs.gymnasium.checksums import Checksums, EpisodeChecksums
from lightning_rl.envs.gymnasium.mujoco_bindings import has_mujoco_profiler, set_mujoco_profiler
from lightning_rl.envs.infos import READ, EnvReport, InfoReader
from lightning_rl.envs.step_results import (
    check_observation,
    copy_of,
    name_of,
    read_reset,
    read_step,
)
from lightning_rl.rollout.contract import map_tree


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

    def close(self) -> None:
        # Also called for the trial env of Gymnasium's processes, outside of all handlers.
        try:
            super().close()
        except Exception as error:
            name = type(self.unwrapped).__name__
            rank_zero_warn(f"{name} raised {type(error).__name__} in close: {error}.")


class ReplayableEpisode(gymnasium.Wrapper):
    """Stores the start of the episode, so that its actions can be replayed.

    An episode is a function of the env's generator state at its reset and of the actions since.
    This wrapper stores the state, `GymnasiumEnv` the actions, and `Intervention` the replaced
    actions. An env or a wrapper with more state has `state_dict()`, which returns plain data, and
    `load_state_dict(state)`: its state at the start of the episode is stored, too.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.episode_start: dict[str, Any] | None = None
        self.replay_request: tuple[dict[str, Any], list[Any], list[dict[str, Any]]] | None = None
        self._replay: tuple[Any, list[Any]] = (None, [])  # last observation, remaining actions
        self._checksums = EpisodeChecksums(1)
        self._keepers: list[Any] = [
            layer
            for layer in self._layers()
            if hasattr(type(layer), "load_state_dict")
            and not isinstance(layer, SupportsInterventions)
        ]
        self._reader = InfoReader.of(name_of(env), 1, env.metadata)
        self.picture_wanted = False
        space = env.observation_space
        # Check spaces other than Box at every step: keys of a dict, ranges of choices.
        self._shape = space.shape if isinstance(space, gymnasium.spaces.Box) else None
        self._dtype = space.dtype
        self._in_worker = multiprocessing.parent_process() is not None
        self._seed: int | None = None  # `_seed` and `_episode` seed a worker's global generators
        self._episode = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._seed, self._episode = int(seed), 0
            self.episode_start = {"seed": int(seed)}
        else:
            self._episode += 1
            # Before the reset, which draws from this generator.
            self.episode_start = _generator_state(self.unwrapped)
        if self._in_worker and self._seed is not None:
            seed_globals(self._seed, self._episode)
            if self.episode_start is not None:
                self.episode_start |= {"globals": [self._seed, self._episode]}
        if self._keepers and self.episode_start is not None:
            layer_states = [copy.deepcopy(layer.state_dict()) for layer in self._keepers]
            self.episode_start |= {"kept": layer_states}  # plain data: no pickles in checkpoints
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
        done = terminated or truncated
        shape, dtype = getattr(observation, "shape", None), getattr(observation, "dtype", None)
        # Fast path: shape and dtype of the last checked observation.
        if done or shape is None or shape != self._shape or dtype is not self._dtype:
            check_observation(self.env, observation)
            if getattr(dtype, "kind", "") == "f":  # other integer dtypes might wrap
                self._dtype = dtype
        if done:
            observation = copy.deepcopy(observation)  # the env may reuse the array
        return observation, reward, terminated, truncated, self._sent(info, done)

    # Infos travel from a worker through a pipe: only what is read, to save pickling.
    def _sent(self, info: dict[str, Any], done: bool = False) -> dict[str, Any]:
        if not (info and self._in_worker):
            return info
        entries = {key: info[key] for key in READ if key in info}
        # At an end the worker resets the env before it sends, and the env may reuse its entries.
        return copy.deepcopy(entries) if done else entries

    def profile_mujoco(self, enabled: bool) -> bool | None:
        """Switch MuJoCo's profiler; return whether this process uses it (None without MuJoCo)."""
        set_mujoco_profiler(enabled)
        return has_mujoco_profiler(self.env)

    def time_limit(self) -> int | None:
        limits, env = [], self.env
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, gymnasium.wrappers.TimeLimit):
                # Without a copy of the env's settings there is no spec.
                base = env.unwrapped.spec
                spec = env.spec or gymnasium.registry.get(base.id if base is not None else "")
                limits.append(spec.max_episode_steps or 0 if spec is not None else 0)
            env = env.env
        return min(filter(None, limits), default=None)

    def stop_interventions(self) -> None:
        for wrapper in self._interventions():
            wrapper.stop_interventions()

    def intervention_states(self) -> list[dict[str, Any]]:
        return [wrapper.state_dict() for wrapper in self._interventions()]

    def _interventions(self) -> list[SupportsInterventions]:
        return [layer for layer in self._layers() if isinstance(layer, SupportsInterventions)]

    def _layers(self) -> list[gymnasium.Env]:
        layers = [self.env]
        while isinstance(layers[-1], gymnasium.Wrapper):
            layers.append(layers[-1].env)
        return layers

    def picture(self) -> Any:
        return self.env.render() if self.picture_wanted else None

    def replay_episode(self, seconds: float) -> tuple[bool, tuple[Any, Checksums]]:
        """Replay for some seconds; return whether it is complete, and its end.

        The end is the last observation, or None if the episode ended, and the checksums.
        """
        until = time.monotonic() + seconds
        # The first turn begins the episode, later turns continue it.
        if self.replay_request is not None:
            start, actions, states = self.replay_request
            self.replay_request = None
            # Their states were saved at the start of the episode, before its reset.
            for wrapper, state in zip(self._interventions(), states, strict=True):
                wrapper.load_state_dict(state)
            if "globals" in start and self._in_worker:
                self._seed, self._episode = map(int, start["globals"])
                seed_globals(self._seed, self._episode)
            for layer, layer_state in zip(self._keepers, start.get("kept", []), strict=False):
                layer.load_state_dict(copy.deepcopy(layer_state))
            if "seed" in start:
                # The first episode after a seed.
                observation, _ = self.env.reset(seed=start["seed"])
            else:
                rng = {key: value for key, value in start.items() if key not in ("globals", "kept")}
                self.unwrapped.np_random = _generator(rng)
                observation, _ = self.env.reset()
            self._checksums.begin(self._batch_of_one(observation))
            self.episode_start = start
            self._replay = observation, list(reversed(actions))  # `pop` takes from the end
        observation, remaining = self._replay
        while remaining and time.monotonic() < until:
            action = copy.copy(remaining.pop())  # the env may write into it
            result = read_step(self.env, self.env.step(action))
            observation, reward, terminated, truncated, info = result
            report: EnvReport = {}
            self._reader.gather(report, info, 0)
            batch = self._batch_of_one(observation)
            self._checksums.add(batch, np.array([reward], float), report, None)
            if terminated or truncated:  # too early: the saved episode was still running
                observation, remaining = None, []
        self._replay = observation, remaining
        end = (
            copy.deepcopy(observation),
            self._checksums.values()[0],
        )  # other envs may write into it
        return not remaining, end

    def _batch_of_one(self, observation: Any) -> Any:
        copied = copy_of(self.env.observation_space, observation)
        return map_tree(lambda array: array[None], copied)


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
