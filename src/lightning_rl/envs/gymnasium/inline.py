"""Step Gymnasium envs one after the other, with little Python overhead."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl.envs.gymnasium.shortcuts import shortcut, step_together
from lightning_rl.envs.infos import InfoReader
from lightning_rl.envs.step_results import FLAGS, NUMBERS, check_observation, name_of, read_step
from lightning_rl.rollout.contract import map_tree


class FastDiscrete(gymnasium.spaces.Discrete):
    """`Discrete` with a fast `contains` for np.int64, which takes a quarter of a CartPole step."""

    def contains(self, x: Any) -> bool:
        if type(x) is np.int64:
            return bool(self.start <= x < self.start + self.n)
        return super().contains(x)


class InlineVectorEnv(SyncVectorEnv):
    """Gymnasium's `SyncVectorEnv` with same-step autoreset and less overhead.

    Differences: `step` counts the time limit of all envs and bypasses wrappers that only count and
    check. Only the info entries that the package reads are collected, in `report` (see
    `envs.step_results`). The next step overwrites the returned arrays. A step of 8 envs is about a
    fifth faster.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gymnasium.Env]]) -> None:
        super().__init__(env_fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
        for env in self.envs:
            _use_fast_discrete(env)
        shortcuts = [shortcut(env) for env in self.envs]
        self._steps = [env.step for env, _ in shortcuts]
        self._limits = [limit for _, limit in shortcuts]
        self._step_together = step_together([env for env, _ in shortcuts])
        self._clock = 0
        self.set_elapsed([0] * self.num_envs)
        self._reader = InfoReader.of(name_of(self.envs[0]), self.num_envs, self.metadata)
        self._is_array = isinstance(self.single_observation_space, gymnasium.spaces.Box)
        shape = self.single_observation_space.shape
        self._size = None if shape is None else math.prod(shape)
        self._dtype: Any = self.single_observation_space.dtype
        self._rows: list[Any] = []  # per env: views of its observation in `_arrays`
        self._arrays: Any = None  # observations, overwritten by each step
        self._outcomes = (
            np.zeros(self.num_envs),
            np.zeros(self.num_envs, np.bool_),
            np.zeros(self.num_envs, np.bool_),
        )

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        self.set_elapsed([0] * self.num_envs)
        observations, infos = super().reset(seed=seed, options=options)
        self._arrays = observations  # Gymnasium's own arrays, because of copy=False
        self._rows = [
            map_tree(lambda array, i=i: array[i, ...], observations) for i in range(self.num_envs)
        ]
        return observations, infos

    def set_elapsed(self, steps: Sequence[int]) -> None:
        # Step numbers at which the envs run out of time: a step compares with the first only.
        self._ends = [
            self._clock - passed + limit for passed, limit in zip(steps, self._limits, strict=True)
        ]
        self._first_end = min(self._ends)

    def step(self, actions: Any) -> Any:
        if actions.ndim > 1:  # rows are views, and an env may write into its action
            actions = actions.copy()
        infos: dict[str, Any] = {}
        self._clock = now = self._clock + 1
        someone_is_out_of_time = now >= self._first_end
        size, rows, is_array = self._size, self._rows, self._is_array
        rewards, terminations, truncations = self._outcomes
        has_reports = self._reader.has_reports
        if self._step_together is not None:
            results = self._step_together(actions)
        else:
            results = (step(action) for step, action in zip(self._steps, actions, strict=True))
        for i, result in enumerate(results):
            try:
                observation, reward, terminated, truncated, info = result
            except (TypeError, ValueError):
                read_step(self.envs[i], result)  # raises the error
                raise
            if not (
                type(reward) in NUMBERS
                and type(terminated) in FLAGS
                and type(truncated) in FLAGS
                and type(info) is dict
            ):
                _, reward, terminated, truncated, info = read_step(self.envs[i], result)
            rewards[i] = reward
            truncated = truncated or (someone_is_out_of_time and now >= self._ends[i])
            if info and has_reports(info):
                self._reader.gather(infos.setdefault("report", {}), info, i)
            terminations[i], truncations[i] = terminated, truncated
            if terminated or truncated:
                check_observation(self.envs[i], observation)
                # Copy, because the env may reuse its observation array.
                self._note_end(infos, i, copy.deepcopy(observation))
                observation, _ = self.envs[i].reset()
                self._ends[i] = now + self._limits[i]  # `_first_end` follows below, once per step
            if is_array:
                try:
                    # Compare only the size: NumPy refuses another shape of equal size, and `shape`
                    # allocates a tuple.
                    if observation.size != size or observation.dtype is not self._dtype:
                        self._check_observation(i, observation)
                    rows[i][...] = observation  # a third faster than observations[i]
                except AttributeError:  # a list or a number
                    check_observation(self.envs[i], observation)
                    rows[i][...] = observation
                except ValueError:
                    check_observation(self.envs[i], observation)
                    raise
            else:
                check_observation(self.envs[i], observation)
                # Copy now: another env may write into the same arrays.
                _write(rows[i], observation)
        if "final_obs" in infos:
            self._first_end = min(self._ends)
        return self._arrays, rewards, terminations, truncations, infos

    def _note_end(self, infos: dict[str, Any], i: int, observation: Any) -> None:
        if "final_obs" not in infos:
            infos["final_obs"] = np.full(self.num_envs, None, dtype=object)
            infos["_final_obs"] = np.zeros(self.num_envs, np.bool_)
        infos["final_obs"][i], infos["_final_obs"][i] = observation, True

    def _check_observation(self, i: int, observation: Any) -> None:
        """Check the observation of env i, and store the dtype of a valid float observation."""
        check_observation(self.envs[i], observation)
        if getattr(observation.dtype, "kind", "") == "f":  # torch dtypes have no kind
            self._dtype = observation.dtype


def _write(place: Any, observation: Any) -> None:
    if isinstance(place, dict):
        for key, child in place.items():
            _write(child, observation[key])
    else:
        place[...] = observation


def _use_fast_discrete(env: gymnasium.Env) -> None:
    space = env.unwrapped.action_space
    if type(space) is gymnasium.spaces.Discrete and space.dtype == np.int64:
        fast = FastDiscrete(space.n)
        vars(fast).update(vars(space))  # its generator among them, which the env may draw from
        env.unwrapped.action_space = fast
