"""Collect rollouts in the learner's own thread, with the learner's own weights."""

import warnings
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.collectors.base import Collector
from lightning_rl.envs import RestoreError, VectorEnv
from lightning_rl.envs.vector_env import Observation
from lightning_rl.errors import ConfigurationError
from lightning_rl.functional import first_episode_mask
from lightning_rl.policies import Policy
from lightning_rl.rollout import allocate_rollout, copy_tree, step_views, time_major

LOOK_EVERY = 16
"""Steps between two looks, on a device other than the CPU, at whether all rows have finished.

A look waits for the device.
"""


class SyncCollector(Collector):
    """Step the env T times with the current policy; policy lag is 0.

    See `Collector` for the arguments.

    The env is reset by the first `collect`, and where the plan says so by each one; otherwise
    rollouts go on where the last one stopped. The rollout lives in one preallocated storage on the
    policy's device, written through views that are made once.
    """

    def __init__(self, env: VectorEnv, policy: Policy, num_steps: int, seed: int) -> None:
        super().__init__(env, policy, num_steps, seed)
        device = policy.version.device
        self.generator = torch.Generator(device).manual_seed(seed)
        rollout = allocate_rollout(
            env.single_observation_space,
            env.single_action_space,
            env.num_envs,
            num_steps,
            extra_fields=policy.extra_fields,
            device=device,
        )
        self._storage = time_major(rollout)
        self._actor = policy.rollout_actor(rollout)
        steps = step_views(rollout)
        self._observations, self._final_observations, self._actions = (
            [step.get(key) for step in steps]
            for key in ("observation", "final_observation", "action")
        )
        self._rewards, self._terminated, self._truncated = (
            self._storage[key].unbind(0) for key in ("reward", "terminated", "truncated")
        )
        self._finished = torch.zeros(env.num_envs, dtype=torch.bool, device=device)
        self._rollouts = 0
        self._last = 0
        self._started = False

    @torch.no_grad()
    def collect(self) -> TensorDict:
        """See `Collector.collect`; fewer than T steps where the plan ends the rollout early."""
        self._begin()
        with self.phase("inference"):
            self._actor.begin(self.generator)
        steps = 0
        while steps < self.num_steps and not self._all_have_finished(steps):
            with self.phase("inference"):
                self._actor.act(steps)
            with self.phase("env"):
                self._step(steps)
            steps += 1
        with self.phase("inference"):
            self._actor.finish(steps)
        return self._finish(steps)

    def _begin(self) -> None:
        """Put the first observation into slot 0, and clear what a step may leave as it was."""
        if not self._goes_on:
            self._reset()
        elif self._last:
            copy_tree(self._observations[0], self._observations[self._last])
        self._rollouts += 1
        self._finished.zero_()
        if "success" in self._storage.keys():
            self._storage["success"].zero_()

    def _step(self, t: int) -> None:
        """Step the env with the action of slot `t`, and write what comes of it."""
        observation, reward, terminated, truncated, info = self.env.step(self._actions[t])
        copy_tree(self._observations[t + 1], observation)
        self._rewards[t].copy_(reward)
        self._terminated[t].copy_(terminated)
        self._truncated[t].copy_(truncated)
        if info:
            self._record(t, info)

    def _record(self, t: int, info: dict[str, Any]) -> None:
        """Write what only some envs say, or only at some steps."""
        if "final_obs" in info:
            copy_tree(self._final_observations[t], info["final_obs"])
        if "success" in info:
            if "success" not in self._storage.keys():
                self._storage["success"] = torch.zeros_like(self._storage["terminated"])
            self._storage["success"][t].copy_(info["success"])
        self.reports.add(info)

    def _all_have_finished(self, steps: int) -> bool:
        """Tell whether the plan ends the rollout before its next step."""
        if not self.plan.first_episode_only or steps == 0:
            return False
        self._finished |= self._terminated[steps - 1] | self._truncated[steps - 1]
        look = self._finished.device.type == "cpu" or steps % LOOK_EVERY == 0
        return look and bool(self._finished.all())

    @property
    def _goes_on(self) -> bool:
        """Whether the next rollout goes on where the last one stopped."""
        return self._started and not self.plan.reset_every_rollout

    def state_dict(self) -> dict[str, Any]:
        """See `Collector.state_dict`."""
        return {
            "env": self.env.state_dict() if self._goes_on else None,
            "generator": self.generator.get_state(),
            "statistics": self.statistics.state_dict(),
            "env_steps": self.env_steps,
            "rollouts": self._rollouts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`.

        Warns where the env cannot be restored, and then restarts its episodes.
        """
        self.generator.set_state(state["generator"].cpu())
        self.env_steps = state["env_steps"]
        self._rollouts = state["rollouts"]
        if len(state["statistics"]["return"]) == self.env.num_envs:
            self.statistics.load_state_dict(state["statistics"])
        if self.plan.reset_every_rollout:
            return  # nothing of an env's state is needed
        try:
            if state["env"] is None:
                raise RestoreError("its state could not be saved")
            self._start(self.env.load_state_dict(state["env"]))
        except RestoreError as error:
            warnings.warn(
                f"The env could not be restored to where the checkpoint left it ({error}): its "
                "episodes restart, and "
                "the resumed run will differ from an uninterrupted one.",
                stacklevel=2,
            )
            self._reset()

    def _reset(self) -> None:
        """Begin new episodes, with the same state for all members of a group.

        Raises:
            ConfigurationError: where members of a group do not begin alike.
        """
        self.statistics.restart_episodes()
        size = self.plan.group_size
        if self._rollouts == 0 and size == 1:
            self._start(self.env.reset(seed=self.seed)[0])
            return
        drawn = np.random.SeedSequence([self.seed, self._rollouts])
        seeds = drawn.generate_state(self.env.num_envs // size).repeat(size)
        observation, _ = self.env.reset(seed=seeds.tolist())
        if not _alike(observation, size):
            raise ConfigurationError(
                f"The {size} members of a group began their episodes in different states, though "
                f"their envs were given the same seed. {type(self.env).__name__} must draw its "
                "starts from the seed of `reset` alone."
            )
        self._start(observation)

    def _start(self, observation: Observation) -> None:
        """Put an observation that no rollout has ended with where the next one begins."""
        copy_tree(self._observations[0], observation)
        self._started, self._last = True, 0

    def _finish(self, steps: int) -> TensorDict:
        """Fill in what the steps did not write, count, and hand the storage out as a rollout.

        The container is new each time: what an algorithm adds or replaces stays its own.
        """
        self._last = steps
        storage = self._storage[: steps + 1]
        torch.logical_or(storage["terminated"], storage["truncated"], out=storage["done"])
        storage["policy_version"].fill_(self.policy.version)
        rollout = time_major(storage)
        done = rollout["done"][:, :-1]
        if self.plan.first_episode_only:
            done = done & first_episode_mask(done)
        success = rollout["success"][:, :-1] if "success" in rollout.keys() else None
        self.statistics.update(rollout["reward"][:, :-1], done, success)
        self.reports.close_rollout()
        self.env_steps += steps * self.env.num_envs
        return rollout


def _alike(observation: Any, size: int) -> bool:
    """Tell whether the rows of each group are equal, bit for bit."""
    if isinstance(observation, Tensor):
        groups = observation.unflatten(0, (-1, size))
        return bool((groups == groups[:, :1]).all())
    return all(_alike(child, size) for child in observation.values())
