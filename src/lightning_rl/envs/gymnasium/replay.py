"""Bring a Gymnasium env back to the middle of an episode, exactly and without pickle."""

import copy
import multiprocessing
import random
import signal
import time
from typing import Any, cast

import gymnasium
import numpy as np
import torch

from lightning_rl.envs.gymnasium.mujoco_bindings import has_mujoco_profiler, set_mujoco_profiler
from lightning_rl.envs.people.intervention import Intervention
from lightning_rl.envs.step_results import (
    READ,
    check_observation,
    copy_of,
    read_reset,
    read_step,
)


class CheckedReturns(gymnasium.Wrapper):
    """The env itself, of which each wrapper around it gets what an env should return.

    Without it a wrapper of Gymnasium's would fail of an env that returns other things.
    """

    @property
    def spec(self) -> Any:  # type: ignore[override]  # a property there too
        """The env's own, so that nobody makes this wrapper again from it."""
        return self.env.spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return read_reset(self.env, self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return read_step(self.env, self.env.step(action))


class ReplayableEpisode(gymnasium.Wrapper):
    """Remember how the episode began, so that it can be begun again and its actions replayed.

    What an episode depends on is the state of the env's generator at its reset and the actions
    since. The wrapper keeps the former; `GymnasiumEnv` keeps the latter for all envs at once, and
    an `Intervention` what was executed instead of some of them. An env that depends on anything
    else gives another observation on replay, which the caller compares.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.episode_start: dict[str, Any] | None = None
        self.replay_request: tuple[dict[str, Any], list[Any], list[dict[str, Any]]] | None = None
        self._replay: tuple[Any, list[Any]] = (None, [])  # the last observation, the actions left
        self.picture_wanted = False
        space = env.observation_space
        # Other spaces than Box are looked at each time: keys of a dict, ranges of choices.
        self._shape = space.shape if isinstance(space, gymnasium.spaces.Box) else None
        self._dtype = space.dtype
        self._in_worker = multiprocessing.parent_process() is not None
        self._seed: int | None = None  # with `_episode`, of the global generators of a worker
        self._episode = 0
        if self._in_worker:
            # In a worker: the learner decides when to stop, also if Ctrl-C reaches the whole group.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and remember the seed, or the generator's state from before."""
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
        observation, info = read_reset(self.env, self.env.reset(seed=seed, options=options))
        check_observation(self.env, observation)
        # Copies: an env may use the same array, and the same dict, again.
        return copy_of(self.env.observation_space, observation), self._sent(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; keep the final observation apart from an array that the env uses again.

        Raises:
            ConfigurationError: for a wrong shape or kind, at whichever step: the memory that
                workers share would take it, broadcast.
        """
        result = read_step(self.env, self.env.step(action))
        observation, reward, terminated, truncated, info = result
        ended = terminated or truncated
        shape, dtype = getattr(observation, "shape", None), getattr(observation, "dtype", None)
        # What is like the last one that was looked at costs two comparisons.
        if ended or shape is None or shape != self._shape or dtype is not self._dtype:
            check_observation(self.env, observation)
            if getattr(dtype, "kind", "") == "f":  # integers of another dtype might wrap
                self._dtype = dtype
        if ended:
            observation = copy.deepcopy(observation)
        return observation, reward, terminated, truncated, self._sent(info)

    def _sent(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return an info of which a worker sends what is read alone: the rest may not pickle."""
        if not (info and self._in_worker):
            return info
        return {key: info[key] for key in READ if key in info}

    def profile_mujoco(self, wanted: bool) -> bool | None:
        """Have MuJoCo time its steps in the process of this env, or not.

        Returns:
            whether it does from here on; None where this is no env of MuJoCo's.
        """
        set_mujoco_profiler(wanted)
        return has_mujoco_profiler(self.env)

    def time_limit(self) -> int | None:
        """Return the least of the limits that wrappers set to an episode, in steps."""
        limits, env = [], self.env
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, gymnasium.wrappers.TimeLimit):
                # It has none where settings of the env cannot be copied.
                own = env.unwrapped.spec
                spec = env.spec or gymnasium.registry.get(own.id if own is not None else "")
                limits.append(spec.max_episode_steps or 0 if spec is not None else 0)
            env = env.env
        return min(filter(None, limits), default=None)

    def stop_interventions(self) -> None:
        """Leave every step to the policy from here on."""
        for wrapper in self._interventions():
            wrapper.stop_interventions()

    def intervention_states(self) -> list[dict[str, Any]]:
        """Return the state of each wrapper by which somebody may take over."""
        return [wrapper.state_dict() for wrapper in self._interventions()]

    def _interventions(self) -> list[Intervention]:
        found, env = [], self.env
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, Intervention):
                found.append(env)
            env = env.env
        return found

    def picture(self) -> Any:
        """Draw the env, if `picture_wanted`; asked of all envs at once."""
        return self.env.render() if self.picture_wanted else None

    def replay_episode(self, seconds: float) -> tuple[bool, Any]:
        """Replay `replay_request`, or go on with that, for some seconds.

        Returns:
            whether it is done; and the last observation, or None if the episode ended.
        """
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
    """Seed the global generators of Python, NumPy and torch in the process of one env.

    Envs that draw from them would else draw the same in each process that was forked. They are
    seeded at each episode, so that a resumed run can begin it again.

    Args:
        seed: of the env.
        number: of the episode.
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
    # Only plain numbers go into a checkpoint; a generator that keeps arrays (MT19937) has others.
    return state if state.get("bit_generator") == "PCG64" else None


def _generator(state: dict[str, Any]) -> np.random.Generator:
    bit_generator = np.random.PCG64()
    bit_generator.state = cast(Any, state)
    return np.random.Generator(bit_generator)
