"""Play an env by random actions on the storage of a rollout, and measure what comes of it."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.step_results import refuse_missing_end
from lightning_rl.envs.vector_env import VectorEnv
from lightning_rl.rollout.contract import (
    allocate_rollout,
    clear_final_observations,
    copy_tree,
    final_observations,
    space_spec,
    step_views,
    time_major,
)
from lightning_rl.rollout.structured_actions import as_policy_counts, first_choice
from lightning_rl.system.phases import PhaseTimer

BLOCK_BYTES = 2**23
"""How much of observations is stored, and looked at, at once."""

BLOCK_STEPS = 128
"""Steps of a block at most."""

PLAYED = 2_000
"""Steps of each env after which enough has been seen, unless its time limit lies beyond."""

LONGEST = 20_000
"""The greatest time limit that is waited for, in steps of each env."""

MEASURED = 2**17
"""Of how many numbers of a block mean and standard deviation are taken; extremes are of all."""

SLACK = 1e-5
"""How far beyond a bound rounding may lead, in units of 1 + |bound|."""


class ArraySeen:
    """What was seen of one array of the observations.

    Args:
        path: `observation`, and the keys that lead to the array.
        space: of one env: Box, Discrete, MultiDiscrete or MultiBinary.

    Attributes:
        least, greatest: of each element, finite values alone.
        not_finite: where a NaN or an infinite value was, the first one; or None.
        outside: the value farthest beyond its bound, with that bound and its place; or None.
    """

    def __init__(self, path: tuple[str, ...], space: gymnasium.Space[Any]) -> None:
        self.path, self.name, self.space = path, ".".join(path), space
        self.shape, _ = space_spec(space)
        self.low, self.high = (
            np.broadcast_to(np.asarray(bound, np.float64), self.shape) for bound in bounds(space)
        )
        self.least = np.full(self.shape, np.inf)
        self.greatest = np.full(self.shape, -np.inf)
        self.not_finite: str | None = None
        self.outside: tuple[float, float, str] | None = None
        self._farthest = 0.0
        self._count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        """Take in values [M, *shape]."""
        if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
            if self.not_finite is None:
                index = tuple(np.argwhere(~finite)[0])
                self.not_finite = f"{values[index]} in {self.place(index[1:])}"
            values = np.where(finite, values, np.nan)
        least, greatest = (reduce(values, 0) for reduce in (np.fmin.reduce, np.fmax.reduce))
        self.least = np.fmin(self.least, least)
        self.greatest = np.fmax(self.greatest, greatest)
        some = values[:: max(1, values.size // MEASURED)].astype(np.float64)
        self._count += int(np.isfinite(some).sum())
        self._sum += float(np.nansum(some))
        self._squares += float(np.nansum(some * some))
        self._compare(least, self.low, -1.0)
        self._compare(greatest, self.high, 1.0)

    def _compare(self, extreme: np.ndarray, bound: np.ndarray, sign: float) -> None:
        """Keep the value that lies farthest beyond its bound, below (-1) or above (1) it."""
        beyond = np.zeros(self.shape)
        at = np.isfinite(bound) & np.isfinite(extreme)
        slack = SLACK * (1.0 + np.abs(bound[at]))
        beyond[at] = sign * (extreme[at].astype(np.float64) - bound[at]) - slack
        if beyond.size and beyond.max() > self._farthest:
            self._farthest = float(beyond.max())
            index = np.unravel_index(int(beyond.argmax()), self.shape)
            self.outside = (float(extreme[index]), float(bound[index]), self.place(index))

    @property
    def mean(self) -> float:
        """Of all elements."""
        return self._sum / max(1, self._count)

    @property
    def std(self) -> float:
        """Of all elements."""
        return math.sqrt(max(0.0, self._squares / max(1, self._count) - self.mean**2))

    @property
    def still(self) -> np.ndarray:
        """Which elements never moved, bool [*shape]."""
        still: np.ndarray = self.least >= self.greatest
        return still

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return float(max(np.abs(self.least).max(initial=0), np.abs(self.greatest).max(initial=0)))

    def place(self, index: tuple[Any, ...]) -> str:
        """Name an element: `observation[3]`."""
        return f"{self.name}{[int(i) for i in index]}" if index else self.name


class RandomPlay:
    """Play by random actions, through the stepper that a collector would use.

    Args:
        env: is reset and stepped.
        seed: of the envs and of the actions.
        seconds: how long, at most; a first step is taken in any case.
        calls: times the calls into the env; see `EnvWatch`.

    Attributes:
        arrays: of the observations.
        steps: that each env was stepped; an action may be a chunk of several env steps.
        env_steps: taken, by all N envs.
        step_seconds: how long a step of all N envs takes, resets of those that finish included.
        stepper: the name of the class that stepped.
        rewards: [steps, N] float64.
        returns, lengths: of finished episodes; lengths in env steps.
        terminated, truncated: how many episodes ended so; one that did both is terminated.
        successes: of the finished episodes, where the env said so of any.
        success_steps: at how many steps it said so, whether an episode ended by them or not.
        alike_ends: how many final observations equal that with which the next episode began.
        terms, metrics: means of what was said, by name.
        interventions: steps of single envs in which somebody had taken over.
        missing_end: the `ConfigurationError` of a truncation without a final observation, or None.
    """

    def __init__(self, env: VectorEnv, seed: int, seconds: float, calls: PhaseTimer) -> None:
        self.env, self._calls = env, calls
        self.arrays = [ArraySeen(*one) for one in named_spaces(env.single_observation_space)]
        self.steps = self.env_steps = self.terminated = self.truncated = 0
        self.success_steps = self.alike_ends = self.interventions = 0
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.successes: list[bool] = []
        self.terms: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.missing_end: Exception | None = None
        self._said: dict[tuple[str, str], list[float]] = {}
        self._return = np.zeros(env.num_envs)
        self._length = np.zeros(env.num_envs, np.int64)
        self._rewards: list[np.ndarray] = []
        self._seconds, self._timed = 0.0, 0
        self._play(seed, seconds)
        self.rewards = np.concatenate(self._rewards)
        self.step_seconds = self._seconds / max(1, self._timed)
        for (kind, name), values in self._said.items():
            getattr(self, kind)[name] = float(np.mean(values)) if values else float("nan")

    @property
    def episodes(self) -> int:
        """How many have finished."""
        return self.terminated + self.truncated

    def _play(self, seed: int, seconds: float) -> None:
        env, until = self.env, time.perf_counter() + seconds
        limit = env.max_episode_steps or 0
        wanted = max(PLAYED, 1 + limit if limit <= LONGEST else 0)
        wanted = -(-wanted // env.steps_per_action)
        space = env.single_observation_space
        each = sum(space_bytes(child) for _, child in named_spaces(space)) * env.num_envs
        length = max(1, min(BLOCK_STEPS, BLOCK_BYTES // max(1, each)))
        rollout = allocate_rollout(
            *(space, env.single_action_space, env.num_envs, length),
            extra_fields=env.extra_fields,
            device=env.device,
        )
        storage, first, *following = time_major(rollout), *step_views(rollout)
        stepper = env.rollout_stepper(rollout)
        self.stepper = type(stepper).__name__
        draw = random_actions(env.single_action_space, env.num_envs, seed)
        with self._calls("reset"):
            copy_tree(first.get("observation"), env.reset(seed=seed)[0])
        self._look([first.get("observation")])
        while self.steps < wanted and (self.steps == 0 or time.perf_counter() < until):
            for t in range(length):
                storage["action"][t].copy_(draw())
            clear_final_observations(rollout)
            t = 0
            for t in range(length):
                began = time.perf_counter()
                with self._calls("step"):
                    info = stepper.step(t)
                synchronize(env.device)
                now = time.perf_counter()
                if self.steps > 0 or length == 1 or t > 0:  # the first of all sets things up
                    self._seconds, self._timed = self._seconds + now - began, self._timed + 1
                self._note(info, storage["terminated"][t] | storage["truncated"][t])
                if now > until:
                    break
            stepper.finish()
            self._close(rollout, t + 1)
            self._look([slot.get("observation") for slot in following[: t + 1]])
            copy_tree(first.get("observation"), following[t].get("observation"))

    def _look(self, slots: list[Any]) -> None:
        for array in self.arrays:
            key = array.path[1:]
            values = [_at(slot, key).cpu().numpy() for slot in slots]
            array.add(np.stack(values).reshape(-1, *array.shape))

    def _note(self, info: dict[str, Any], done: Tensor) -> None:
        """Take in what an env said of a step."""
        if "success" in info:
            self.success_steps += 1
            self.successes += info["success"][done].tolist()
        if "intervened" in info:
            self.interventions += int(info["intervened"].sum())
        for kind, key in (
            ("terms", "rewards"),
            ("metrics", "metrics"),
            ("metrics", "final_metrics"),
        ):
            for name, values in info.get(key, {}).items():
                said = self._said.setdefault((kind, name), [])
                mean = float(values.double().nanmean())
                if mean == mean:
                    said.append(mean)

    def _close(self, rollout: TensorDict, steps: int) -> None:
        """Take in what a block [N, T+1] of some steps brought."""
        storage = time_major(rollout)
        reward, terminated, truncated, final_index = (
            storage[key][:steps].cpu().numpy()
            for key in ("reward", "terminated", "truncated", "final_index")
        )
        executed = (
            storage["executed"][:steps].sum(-1).cpu().numpy()
            if "executed" in storage.keys()
            else None
        )
        cut = truncated & ~terminated
        try:
            refuse_missing_end(type(self.env).__name__, cut & (final_index == 0))
        except ValueError as error:
            self.missing_end = self.missing_end or error
        self._rewards.append(reward.astype(np.float64))
        self.terminated += int(terminated.sum())
        self.truncated += int(cut.sum())
        for t in range(steps):
            taken = 1 if executed is None else executed[t]
            self.env_steps += int(np.broadcast_to(taken, self._length.shape).sum())
            self._return += reward[t]
            self._length += taken
            done = terminated[t] | truncated[t]
            if done.any():
                self.returns += self._return[done].tolist()
                self.lengths += self._length[done].tolist()
                self._return[done], self._length[done] = 0.0, 0
                self.alike_ends += self._alike(rollout, t, done & (final_index[t] > 0))
        self.steps += steps

    def _alike(self, rollout: TensorDict, t: int, ended: np.ndarray) -> int:
        """Count the rows `ended` whose final observation is that of the next episode."""
        if not ended.any():
            return 0
        rows = torch.from_numpy(np.flatnonzero(ended)).to(rollout.device)
        finals = final_observations(rollout, rows, torch.full_like(rows, t))
        alike = np.ones(len(rows), dtype=bool)
        for array in self.arrays:
            key = array.path[1:]
            final = _at(finals, key).cpu().numpy()
            begun = _at(rollout["observation"], key)[rows, t + 1].cpu().numpy()
            alike &= (final == begun).reshape(len(rows), -1).all(1)
        return int(alike.sum())


def random_actions(space: gymnasium.Space[Any], num_envs: int, seed: int) -> Callable[[], Tensor]:
    """Return what draws actions [N, *A] from a space, as a policy gives them: counted from 0."""
    batched = batch_space(space, num_envs)
    batched.seed(seed)
    start = first_choice(space)

    def draw() -> Tensor:
        return torch.from_numpy(as_policy_counts(np.asarray(batched.sample()), start))

    return draw


def named_spaces(
    space: gymnasium.Space[Any], path: tuple[str, ...] = ("observation",)
) -> Iterator[Any]:
    """Yield path and space of each array of an observation."""
    if isinstance(space, gymnasium.spaces.Dict):
        for key, child in space.items():
            yield from named_spaces(child, (*path, key))
    else:
        yield path, space


def bounds(space: gymnasium.Space[Any]) -> tuple[Any, Any]:
    """Return the least and the greatest values that a space of one array allows."""
    if isinstance(space, gymnasium.spaces.Box):
        return space.low, space.high
    if isinstance(space, gymnasium.spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


def space_bytes(space: gymnasium.Space[Any]) -> int:
    """Return how much memory one element of a space of one array takes in a rollout."""
    shape, dtype = space_spec(space)
    return int(np.prod(shape)) * dtype.itemsize


def synchronize(device: torch.device) -> None:
    """Wait for what a device has been told to do: what is timed has to be done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _at(tree: Any, key: tuple[str, ...]) -> Tensor:
    """Return the tensor at a path."""
    for name in key:
        tree = tree[name]
    found: Tensor = tree
    return found
