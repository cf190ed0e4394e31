"""Play an env for some seconds through a `SyncCollector`, and record data for findings."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import CollectorContext, Policy, SyncCollector, VectorEnv
from lightning_rl.extend.envs import bounds_of
from lightning_rl.extend.rollout import final_observations, leaves_of_tree
from lightning_rl.extend.spaces import (
    MASK,
    allowed_random_action,
    as_policy_counts,
    first_choice,
    space_spec,
)

ROLLOUT_BYTES = 2**23
"""Maximum memory of a rollout, in bytes."""

ROLLOUT_STEPS = 128
"""Maximum steps of a rollout."""

ROLLOUTS = 8
"""Number of rollouts in the given time if steps are slow."""

SLACK = 1e-5
"""Tolerance for rounding beyond a bound, in units of 1 + |bound|."""


class RandomPolicy(Policy):
    """Draw random actions as Gymnasium samples the action space, bounded or not."""

    has_critic = False

    def __init__(self, env: VectorEnv, seed: int) -> None:
        super().__init__(env.single_observation_space, env.single_action_space)
        self._draw = random_actions(self.observation_space, self.action_space, env.num_envs, seed)
        self._dtype = space_spec(env.single_action_space)[1]
        self.to(env.device)

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        td["action"] = self._draw(td["observation"]).to(td.device, self._dtype)
        td["sample_log_prob"] = torch.zeros(td.batch_size, device=td.device)
        return td

    # Abstract methods that only training needs.
    def get_value(self, td: TensorDict) -> TensorDict:
        raise NotImplementedError

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        raise NotImplementedError


class Play:
    """Play an env by a policy.

    Args:
        env: env to reset and step.
        policy: chooses the actions.
        seed: seed of the env and of the policy.
        seconds: approximate time; at least two steps and one rollout are played.
        max_steps: maximum steps of each env.
        calls: times the calls into the env; see `EnvWatch`.

    Attributes:
        arrays: arrays of the observations, by name.
        statistics: of the collector: returns, lengths and successes of the last episodes.
        code_paths: names of the classes that act and step.
        steps: actions of each env.
        env_steps: env steps of all N envs; an action may be a chunk of several steps.
        seconds: per action of all N envs: `env`, resets included, and `inference`.
        rewards: [N, steps] float64.
        truncated: number of episodes that were truncated and not terminated.
        stale_finals: number of final observations equal to the next episode's first.
        reports: means of the rewards and metrics that the env reports, by name.
        interventions: steps of single envs with an intervention.
        clipped_share: share of action values outside of the bounds of the space.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        seed: int,
        seconds: float,
        max_steps: int,
        calls: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        until = time.perf_counter() + seconds
        self.max_episode_steps = env.max_episode_steps
        self.arrays = {
            name: ArrayStatistics(name, space)
            for name, space in leaves_of_tree("observation", env.single_observation_space)
        }
        self.steps = self.terminated = self.truncated = self.stale_finals = self.interventions = 0
        self._reported: dict[str, list[float]] = defaultdict(list)
        self._rewards: list[np.ndarray] = []
        self._clipped_shares: list[float] = []
        self._actions = env.single_action_space
        clock = Clock(policy.version.device)
        context = CollectorContext(env, policy, 1, seed, phase=clock, calls=calls)
        collector = SyncCollector(context)
        collector.collect()  # the first call includes setup
        clock.spent.clear()
        # A rollout of one step measures the speed, which sets the length of the others.
        measured = collector.collect()
        length = int(seconds / ROLLOUTS / max(1e-9, sum(clock.spent.values())))
        length = min(length, max_steps, ROLLOUT_STEPS, 2 * ROLLOUT_BYTES // measured.bytes())
        # A new collector, because the length of its rollouts is fixed.
        collector = SyncCollector(replace(context, num_steps=max(1, length)))
        while self.steps < max_steps and (self.steps == 0 or time.perf_counter() < until):
            rollout = collector.collect()
            self._observe_rollout(rollout)
            for name, value in collector.reports.items():
                self._reported[name].append(value)
        self.code_paths, self.statistics = collector.code_paths, collector.statistics
        self.reports_success, self.env_steps = collector.reports_success, collector.env_steps
        # The rollout of one step counts in the seconds, not in `steps`.
        self.seconds = {name: spent / (self.steps + 1) for name, spent in clock.spent.items()}
        self.rewards = np.concatenate(self._rewards, 1)
        self.reports = {name: float(np.mean(values)) for name, values in self._reported.items()}
        self.clipped_share = float(np.mean(self._clipped_shares))

    def _observe_rollout(self, rollout: TensorDict) -> None:
        observed = dict(leaves_of_tree("observation", rollout.get("observation")))
        for name, array in self.arrays.items():
            array.add(observed[name].flatten(0, 1).cpu().numpy())
        steps = rollout[:, :-1]
        terminated, truncated = steps["terminated"], steps["truncated"]
        self.steps += steps.shape[1]
        self._rewards.append(steps["reward"].double().cpu().numpy())
        self.terminated += int(terminated.sum())
        self.truncated += int((truncated & ~terminated).sum())
        if "intervened" in rollout.keys():
            self.interventions += int(steps["intervened"].sum())
        if isinstance(self._actions, gymnasium.spaces.Box):
            actions = steps["action"].cpu().numpy()
            low, high = (np.asarray(bound, np.float64) for bound in bounds_of(self._actions))
            slack = SLACK * (1.0 + np.abs(np.nan_to_num(high, posinf=0.0)))
            self._clipped_shares.append(
                float(((actions < low - slack) | (actions > high + slack)).mean())
            )
        else:
            self._clipped_shares.append(0.0)
        rows, times = (steps["done"] & (steps["final_index"] > 0)).nonzero(as_tuple=True)
        if len(rows):
            finals = final_observations(rollout, rows, times)
            # An env that resets too early gives the next episode's first observation as final.
            alike = [
                (final == observed[name][rows, times + 1]).view(len(rows), -1).all(1)
                for name, final in leaves_of_tree("observation", finals)
            ]
            self.stale_finals += int(torch.stack(alike).all(0).sum())


class ArrayStatistics:
    """Range of the values of one array of the observations.

    Args:
        name: `observation`, and the keys of the array.
        space: space of one env: Box, Discrete, MultiDiscrete or MultiBinary.

    Attributes:
        minimum, maximum: lowest and highest value of each element, finite values only.
        not_finite: the first NaN or infinite value, with its index; or None.
    """

    def __init__(self, name: str, space: gymnasium.Space[Any]) -> None:
        self.name, self.space = name, space
        self.shape, _ = space_spec(space)
        self.minimum, self.maximum = np.full(self.shape, np.inf), np.full(self.shape, -np.inf)
        self.not_finite: str | None = None

    def add(self, values: np.ndarray) -> None:
        """Add values [M, *shape]."""
        if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
            if self.not_finite is None:
                index = tuple(np.argwhere(~finite)[0])
                self.not_finite = f"{values[index]} in {self.place(index[1:])}"
            # `fmin` and `fmax` skip NaN.
            values = np.where(finite, values, np.nan)
        self.minimum = np.fmin(self.minimum, np.fmin.reduce(values, 0))
        self.maximum = np.fmax(self.maximum, np.fmax.reduce(values, 0))

    @property
    def outside(self) -> str | None:
        """The value farthest beyond its bounds, with index and bound; None if all are within."""
        low, high = (np.broadcast_to(bound, self.shape) for bound in bounds_of(self.space))
        excesses = []
        for name, bound, extreme, sign in (
            ("below its low", low, self.minimum, -1.0),
            ("above its high", high, self.maximum, 1.0),
        ):
            finite = np.isfinite(bound) & np.isfinite(extreme)
            # 0 instead of an infinite bound, because inf - inf is NaN.
            wide = np.where(finite, bound, 0.0).astype(np.float64)
            beyond = np.where(finite, sign * (extreme - wide) - SLACK * (1 + np.abs(wide)), -1.0)
            index = np.unravel_index(int(beyond.argmax()), self.shape)
            if beyond[index] > 0:
                text = f"{self.place(index)} was {extreme[index]:.6g}, {name} of {bound[index]:.6g}"
                excesses.append((float(beyond[index]), text))
        return max(excesses)[1] if excesses else None

    @property
    def still(self) -> np.ndarray:
        """Elements that never changed, bool [*shape]."""
        constant: np.ndarray = self.minimum >= self.maximum
        return constant

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        extremes = np.abs([self.minimum, self.maximum])
        return float(extremes.max(where=np.isfinite(extremes), initial=0))

    def place(self, index: tuple[Any, ...]) -> str:
        """Return the name of an element: `observation[3]`."""
        return f"{self.name}{[int(i) for i in index]}" if index else self.name


class Clock:
    """Phase timer that synchronizes the device; `spent`: total seconds by phase."""

    def __init__(self, device: torch.device) -> None:
        self.spent: dict[str, float] = {}
        self._device = device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the code inside the context."""
        began = time.perf_counter()
        yield
        # CUDA calls return before the device has finished.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - began


def random_actions(
    observation_space: gymnasium.Space[Any], space: gymnasium.Space[Any], num_envs: int, seed: int
) -> Callable[[Any], Tensor]:
    """Return a function that draws actions [N, *A] for observations [N, ...], as masks allow.

    It draws as Gymnasium samples the action space; discrete actions start at 0.
    """
    batched = batch_space(space, num_envs)
    masked = (
        isinstance(observation_space, gymnasium.spaces.Dict) and MASK in observation_space.keys()
    )
    batched.seed(seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(observation: Any) -> Tensor:
        sample = np.asarray(batched.sample())
        action = torch.from_numpy(as_policy_counts(sample, first_choice(space)))
        # The space itself does not know the mask.
        if not masked:
            return action
        mask = torch.as_tensor(observation[MASK]).cpu().view(num_envs, -1)
        return allowed_random_action(
            space, action, mask, torch.rand(mask.shape, generator=generator)
        )

    return draw
