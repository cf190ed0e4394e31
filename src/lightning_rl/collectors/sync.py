"""Collect rollouts in the learner's own thread, with the learner's own weights."""

import warnings
from typing import Any

import torch
from tensordict import TensorDict

from lightning_rl.collectors.base import Collector
from lightning_rl.envs import RestoreError, VectorEnv
from lightning_rl.envs.vector_env import Observation
from lightning_rl.policies import Policy
from lightning_rl.rollout import allocate_rollout, copy_tree, step_views, time_major


class SyncCollector(Collector):
    """Step the env T times with the current policy; policy lag is 0.

    See `Collector` for the arguments.

    The env is reset once, by the first `collect`; later rollouts go on where the last one stopped.
    The rollout lives in one preallocated storage on the policy's device, written through views that
    are made once.
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
        self._stepper = env.rollout_stepper(rollout)
        self._observations = [step.get("observation") for step in step_views(rollout)]
        self._started = False

    @torch.no_grad()
    def collect(self) -> TensorDict:
        """See `Collector.collect`."""
        if not self._started:
            self._start(self.env.reset(seed=self.seed)[0])
        copy_tree(self._observations[0], self._observations[-1])
        with self.phase("inference"):
            self._actor.begin(self.generator)
        for t in range(self.num_steps):
            with self.phase("inference"):
                self._actor.act(t)
            with self.phase("env"):
                self._stepper.step(t)
        with self.phase("inference"):
            self._actor.finish()
        return self._finish()

    def state_dict(self) -> dict[str, Any]:
        """See `Collector.state_dict`."""
        return {
            "env": self.env.state_dict() if self._started else None,
            "generator": self.generator.get_state(),
            "statistics": self.statistics.state_dict(),
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`.

        Warns where the env cannot be restored, and then restarts its episodes.
        """
        self.generator.set_state(state["generator"].cpu())
        self.env_steps = state["env_steps"]
        if len(state["statistics"]["return"]) == self.env.num_envs:
            self.statistics.load_state_dict(state["statistics"])
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
            self.statistics.restart_episodes()
            self._start(self.env.reset(seed=self.seed + self.env_steps)[0])

    def _start(self, observation: Observation) -> None:
        """Put the observation where the next rollout looks for its first one."""
        copy_tree(self._observations[-1], observation)
        self._started = True

    def _finish(self) -> TensorDict:
        """Fill in what the steps did not write, count, and hand the storage out as a rollout.

        The container is new each time: what an algorithm adds or replaces stays its own.
        """
        storage = self._storage
        torch.logical_or(storage["terminated"], storage["truncated"], out=storage["done"])
        storage["policy_version"].fill_(self.policy.version)
        rollout = time_major(storage)
        transitions = rollout[:, :-1]
        self.statistics.update(transitions["reward"], transitions["done"])
        self.env_steps += self.num_steps * self.env.num_envs
        return rollout
